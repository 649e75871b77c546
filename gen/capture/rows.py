"""The rows of running and finished requests in host memory, keyed by (request, position)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gen.capture.messages import UnitAttempt
from storage.types import SampleKey, StateSpec


class RequestRows:
    """Hidden states of one request, by position, with the token each row was computed from.

    The buffer is allocated for the longest answer the request may give. Memory that was never written is not resident
    (a large numpy allocation is lazily committed), so a request holds what it has computed and nothing is copied while
    it grows.
    """

    __slots__ = ("fault", "key", "num_rows", "states_TLH", "token_ids", "unit")

    def __init__(self, unit: UnitAttempt, key: SampleKey, max_rows: int, spec: StateSpec) -> None:
        self.unit = unit
        self.key = key
        self.states_TLH: np.ndarray[Any, Any] = np.empty(
            (max_rows, len(spec.layer_ids), spec.hidden_size), spec.np_dtype
        )
        self.token_ids: np.ndarray[Any, Any] = np.empty(max_rows, np.int32)
        self.num_rows = 0
        self.fault: str | None = None

    def put(self, position: int, states_TLH: np.ndarray, token_ids: np.ndarray) -> None:
        """Store rows from `position` on.

        A position below the rows already held means that the request was preempted and is computed again: what follows
        is stale and goes away. A position above them is a gap, which poisons the rows.
        """
        if position > self.num_rows:
            self.fault = self.fault or f"rows {self.num_rows} to {position - 1} were never computed"
        # An asynchronous scheduler may compute one token more than the answer can have.
        count = max(0, min(len(states_TLH), len(self.token_ids) - position))
        self.states_TLH[position : position + count] = states_TLH[:count]
        self.token_ids[position : position + count] = token_ids[:count]
        self.num_rows = position + count

    def skip_to(self, num_rows: int) -> None:
        """Leave out the first rows, which `fill` brings: the request begins, or is taken up again, behind them."""
        self.num_rows = num_rows

    def fill(self, states_TLH: np.ndarray, token_ids: np.ndarray) -> None:
        """The first rows."""
        self.states_TLH[: len(states_TLH)] = states_TLH
        self.token_ids[: len(token_ids)] = token_ids

    def reset(self) -> None:
        """Forget all rows and give their memory back: a preempted request is computed again from its first token."""
        self.states_TLH = np.empty_like(self.states_TLH)
        self.num_rows = 0


@dataclass(frozen=True)
class Span:
    """Rows `first .. first + count` of a step belong to `rows` from `position` on."""

    rows: RequestRows
    position: int
    first: int
    count: int


class RowStore:
    """All requests being captured. Requests of units that are not open, and requests without a key, leave no rows."""

    def __init__(self, spec: StateSpec) -> None:
        self._spec = spec
        self._running: dict[str, RequestRows] = {}  # by engine request id
        self._units: dict[UnitAttempt, dict[SampleKey, RequestRows]] = {}

    def open_unit(self, unit: UnitAttempt) -> None:
        assert unit not in self._units
        self._units[unit] = {}

    def has_unit(self, unit: UnitAttempt) -> bool:
        return unit in self._units

    def drop_unit(self, unit: UnitAttempt) -> None:
        for key in list(self._units.get(unit, ())):
            self.take(unit, key)
        self._units.pop(unit, None)

    def begin(self, request_id: str, unit: UnitAttempt, key: SampleKey, max_rows: int) -> None:
        """A new request enters the engine."""
        samples = self._units.get(unit)
        if samples is None:
            return
        rows = RequestRows(unit, key, max_rows, self._spec)
        previous = samples.get(key)
        if previous is not None and any(previous is running for running in self._running.values()):
            rows.fault = previous.fault = "two requests with this sample key were running at the same time"
        samples[key] = rows
        self._running[request_id] = rows

    def running(self, request_id: str) -> RequestRows | None:
        return self._running.get(request_id)

    def end(self, request_id: str) -> None:
        """The request has left the engine, finished or aborted; its rows stay until `take` or `drop_unit`."""
        self._running.pop(request_id, None)

    def take(self, unit: UnitAttempt, key: SampleKey) -> RequestRows | None:
        """Hand the rows out and forget them; the engine's further rows for this request go nowhere."""
        rows = self._units[unit].pop(key, None)
        if rows is not None:
            for request_id in [name for name, running in self._running.items() if running is rows]:
                del self._running[request_id]
        return rows

    def spans(self, step: list[tuple[str, int, int]]) -> list[Span]:
        """Where the rows of a step go; `step` lists (request id, first position, count) in the order of the rows."""
        spans = []
        first = 0
        for request_id, position, count in step:
            rows = self._running.get(request_id)
            if rows is not None:
                spans.append(Span(rows, position, first, count))
            first += count
        return spans
