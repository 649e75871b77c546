"""Which unit is whose: pure bookkeeping of leases, retries and their bounds.

A unit is pending, leased to one replica, or done. A lease ends with the unit's commit or with its release; a release
counts as a failed attempt only when the unit itself may be at fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ray_jobs.errors import JobError


class UnitFailedError(JobError):
    """A unit failed as often as it may. The message names the unit and every cause."""


@dataclass(frozen=True)
class Lease:
    unit: int
    attempt: int  # from 0; part of the names of the unit's files
    replica: str


class Leases:
    """Leases of one job. Units are given out in ascending order, released ones first.

    A unit that must be alone goes to a replica that holds nothing, which gets nothing else meanwhile; one replica at a
    time is emptied for it, the others go on.
    """

    def __init__(self, units: Iterable[int], max_attempts: int, must_be_alone: Callable[[int], bool]) -> None:
        """`must_be_alone` is asked whenever a unit is given out. Its answer for a leased unit changes only before its
        release, when the replica that holds it is lost."""
        self._pending = deque(sorted(units))
        self._leased: dict[int, Lease] = {}
        self._attempts: dict[int, int] = {}
        self._failures: dict[int, list[str]] = {}
        self._max_attempts = max_attempts
        self._must_be_alone = must_be_alone
        self._emptying: str | None = None  # the replica that gets nothing until it can take an exclusive unit
        self.num_retries = 0

    @property
    def is_done(self) -> bool:
        return not self._pending and not self._leased

    def lease(self, replica: str) -> Lease | None:
        """Give the next unit to `replica`; None when there is none for it now."""
        held = self.held_by(replica)
        if any(map(self._must_be_alone, held)):
            return None
        exclusive = next(filter(self._must_be_alone, self._pending), None)
        if exclusive is not None and (not held or self._emptying in (None, replica)):
            self._emptying = replica if held else None
            return None if held else self._give(exclusive, replica)
        shared = next((unit for unit in self._pending if not self._must_be_alone(unit)), None)
        return None if shared is None else self._give(shared, replica)

    def _give(self, unit: int, replica: str) -> Lease:
        self._pending.remove(unit)
        attempt = self._attempts.get(unit, 0)
        self._attempts[unit] = attempt + 1
        self._leased[unit] = Lease(unit, attempt, replica)
        return self._leased[unit]

    def finish(self, unit: int) -> None:
        """The unit is committed."""
        assert unit in self._leased, f"unit {unit} is not leased"
        del self._leased[unit]

    def release(self, unit: int, cause: str, *, counts: bool = True) -> None:
        """The unit's work is lost; it is pending again.

        Args:
            unit: the leased unit.
            cause: what happened, kept for the final message.
            counts: False when the unit cannot be at fault (its replica was stopped on purpose).

        Raises:
            UnitFailedError: when it failed `max_attempts` times.
        """
        assert unit in self._leased, f"unit {unit} is not leased"
        if self._leased.pop(unit).replica == self._emptying:
            self._emptying = None  # it may be lost for long; another can be emptied as well
        self.num_retries += 1
        if counts:
            failures = self._failures.setdefault(unit, [])
            failures.append(cause)
            if len(failures) >= self._max_attempts:
                history = "; ".join(f"attempt {i + 1}: {text}" for i, text in enumerate(failures))
                raise UnitFailedError(f"unit {unit} failed {len(failures)} times: {history}")
        self._pending.appendleft(unit)

    def held_by(self, replica: str) -> list[int]:
        """Units leased to `replica`, ascending."""
        return sorted(unit for unit, lease in self._leased.items() if lease.replica == replica)
