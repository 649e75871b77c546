"""Which unit is whose: pure bookkeeping of leases, retries and their bounds.

A unit is pending, leased to one replica, or done. A lease ends with the unit's commit or with its release; a release
counts as a failed attempt only when the unit itself may be at fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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
    """Leases of one job. Units are given out in ascending order, released ones first."""

    def __init__(self, units: Iterable[int], max_attempts: int) -> None:
        self._pending = deque(sorted(units))
        self._leased: dict[int, Lease] = {}
        self._attempts: dict[int, int] = {}
        self._failures: dict[int, list[str]] = {}
        self._max_attempts = max_attempts
        self.num_retries = 0

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    @property
    def is_done(self) -> bool:
        return not self._pending and not self._leased

    def lease(self, replica: str) -> Lease | None:
        """Give the next unit to `replica`; None when nothing is pending."""
        if not self._pending:
            return None
        unit = self._pending.popleft()
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
        del self._leased[unit]
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
