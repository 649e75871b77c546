"""Reading a data set while it is written: each unit once, in the order in which units were committed."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

from storage.dataset import Dataset
from storage.manifest import COMMITTED
from storage.prefetch import prefetched
from storage.reader import LoadedSample, SampleReader
from storage.snapshot import Snapshot
from storage.types import SampleKey

STATE_VERSION = 2


class Follower:
    """Iterates the samples of a data set, those of commits that appear meanwhile included.

    Ends when the data set is complete and read to its end, or when nothing new came for `idle_timeout_s`; then
    `is_complete` tells which, and iterating again goes on waiting. Deleted samples and expired units are left out as of
    the moment their unit is read.

    `state_dict()` is the place after the last sample that was yielded; a follower that loads it goes on there.

    Args:
        uri: of the data set.
        poll_s: seconds between looks at the log while there is nothing to read; one small request each.
        idle_timeout_s: None waits for ever.
        prefetch_samples: samples read ahead within a unit; bounds memory.
        threads: that read ahead.
    """

    def __init__(
        self,
        uri: str,
        *,
        poll_s: float = 1.0,
        idle_timeout_s: float | None = None,
        prefetch_samples: int = 4,
        threads: int = 2,
    ) -> None:
        if poll_s <= 0:
            raise ValueError(f"poll_s {poll_s} must be positive")
        self.dataset = Dataset.open(uri)
        self.is_complete = False
        self._poll_s = poll_s
        self._idle_timeout_s = idle_timeout_s
        self._prefetch_samples = prefetch_samples
        self._threads = threads
        self._done: set[int] = set()
        # A unit begun and the last sample of it that was yielded; not how many, since others may be deleted meanwhile.
        self._partial: tuple[int, SampleKey] | None = None

    def __iter__(self) -> Iterator[LoadedSample]:
        idle_since = time.monotonic()
        looked_at = -1
        while True:
            snapshot = self.dataset.snapshot()
            # Looking through 100,000 units takes longer than asking for the next log entry.
            fresh = self._fresh_units(snapshot) if snapshot.version != looked_at else []
            looked_at = snapshot.version
            for unit in fresh:
                # A backlog takes hours: units may expire, and gc remove files of the snapshot that began it.
                newest = self.dataset.snapshot()
                snapshot = newest if newest.version != snapshot.version else snapshot
                if unit not in snapshot.expired_units:
                    yield from self._read_unit(snapshot, unit)
                idle_since = time.monotonic()
            if fresh:
                continue
            if snapshot.is_complete:
                self.is_complete = True
                return
            if self._idle_timeout_s is not None and time.monotonic() - idle_since >= self._idle_timeout_s:
                return
            time.sleep(self._poll_s)

    def _fresh_units(self, snapshot: Snapshot) -> list[int]:
        table = snapshot.units_table().select(["unit", "status", "version"])
        fresh = [
            (row["version"], row["unit"])
            for row in table.to_pylist()
            if row["status"] == COMMITTED and row["unit"] not in self._done
        ]
        begun = self._partial[0] if self._partial else None
        return [unit for _, unit in sorted(fresh, key=lambda item: (item[1] != begun, *item))]

    def _read_unit(self, snapshot: Snapshot, unit: int) -> Iterator[LoadedSample]:
        reader = SampleReader(snapshot, units=[unit])
        keys = list(reader.keys())
        first = 0
        if self._partial is not None and self._partial[0] == unit:
            first = bisect_right(keys, self._partial[1])  # a unit's samples come in order of key
        samples = prefetched(
            lambda index: reader.read_at([index])[0],
            range(first, len(keys)),
            depth=self._prefetch_samples,
            threads=self._threads,
        )
        for sample in samples:
            self._partial = (unit, sample.key)
            if sample.key == keys[-1]:
                self._finish(unit)
            yield sample
        self._finish(unit)

    def _finish(self, unit: int) -> None:
        self._done.add(unit)
        self._partial = None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; its size grows with the gaps between units read, not with their number."""
        return {
            "state_version": STATE_VERSION,
            "done": _as_ranges(self._done),
            "partial": [self._partial[0], *self._partial[1]] if self._partial else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for a state of an unknown version."""
        if state.get("state_version") != STATE_VERSION:
            raise ValueError(f"follower state has state_version {state.get('state_version')!r}, known: {STATE_VERSION}")
        self._done = {unit for first, last in state["done"] for unit in range(first, last)}
        self._partial = (state["partial"][0], SampleKey(*state["partial"][1:])) if state["partial"] else None


def _as_ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Half-open ranges that hold the numbers."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number, number + 1])
    return ranges
