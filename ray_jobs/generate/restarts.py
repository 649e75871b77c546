"""How often replicas may be started again: pure bookkeeping of their deaths and of what explains them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from ray_jobs.generate.deaths import Death


class Restarts:
    """Deaths of each replica that nothing explains, against their bound."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._num_starts = Counter[int]()
        self._num_unexplained = Counter[int]()
        self._explained: set[Death] = set()

    def start(self, replica: int) -> Death:
        """A replica is started; returns what its death will be called."""
        self._num_starts[replica] += 1
        return Death(replica, self._num_starts[replica] - 1)

    def explain(self, deaths: Set[Death]) -> None:
        """These deaths say nothing about their replicas. One may have been in several units, and is explained once."""
        self._num_unexplained.subtract(death.replica for death in deaths - self._explained)
        self._explained |= deaths

    def allow(self, replica: int, *, excused: bool) -> bool:
        """Whether a replica that died may be started again; a death that is excused does not count."""
        if excused:
            return True
        if self._num_unexplained[replica] >= self._max_restarts:
            return False
        self._num_unexplained[replica] += 1
        return True
