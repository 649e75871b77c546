"""Rows by (request, position): whatever the order of steps, preemptions and aborts, a row ends where it belongs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gen.capture.messages import UnitAttempt
from gen.capture.rows import RowStore
from gen.capture.transfer import RowTransfer, StepSource
from storage.types import SampleKey, StateSpec

SPEC = StateSpec((1, 3), 4)
KEY = SampleKey(0, 0, 0)
UNIT = UnitAttempt(0, 1)


def true_states(token_ids: list[int], request: int) -> np.ndarray[Any, Any]:
    """The states a request's tokens would have: every element names request, position, token and layer."""
    rows = np.empty((len(token_ids), len(SPEC.layer_ids), SPEC.hidden_size), np.float32)
    for position, token in enumerate(token_ids):
        for layer in range(len(SPEC.layer_ids)):
            rows[position, layer] = [request + 1, position + 1, token + 1, layer + 1]
    return rows


def bits(states: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return torch.from_numpy(states).to(torch.bfloat16).view(torch.uint16).numpy()


class Schedule:
    """Plays an engine: computes arbitrary chunks of several requests per step, preempts some from time to time."""

    def __init__(self, draw: Any, num_requests: int, threaded: bool, piece_rows: int) -> None:
        self.draw = draw
        self.tokens = [
            draw(st.lists(st.integers(0, 99), min_size=1, max_size=12), label="tokens") for _ in range(num_requests)
        ]
        self.computed = [0] * num_requests
        self.store = RowStore(SPEC)
        self.store.open_unit(UNIT)
        self.transfer = RowTransfer(
            SPEC, torch.device("cpu"), piece_bytes=piece_rows * SPEC.row_bytes, num_pieces=2, threaded=threaded
        )
        for request, tokens in enumerate(self.tokens):
            self.store.begin(f"r{request}", UNIT, SampleKey(request, 0, 0), len(tokens))

    def step(self) -> None:
        waiting = [request for request, tokens in enumerate(self.tokens) if self.computed[request] < len(tokens)]
        chosen = self.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True), label="scheduled")
        scheduled = []
        states, token_ids = [], []
        for request in chosen:
            if self.computed[request] and self.draw(st.integers(0, 4), label="preempt") == 0:
                self.computed[request] = 0
                if self.draw(st.booleans(), label="told"):
                    rows = self.store.running(f"r{request}")
                    assert rows is not None
                    self.transfer.then(rows.reset)
            start = self.computed[request]
            count = self.draw(st.integers(1, len(self.tokens[request]) - start), label="count")
            scheduled.append((f"r{request}", start, count))
            states.append(true_states(self.tokens[request], request)[start : start + count])
            token_ids += self.tokens[request][start : start + count]
            self.computed[request] += count
        all_states = torch.from_numpy(np.concatenate(states)).to(torch.bfloat16)
        padding = torch.full((3, SPEC.hidden_size), 7.0, dtype=torch.bfloat16)
        layers = [torch.cat([all_states[:, layer], padding]) for layer in range(len(SPEC.layer_ids))]
        ids = torch.tensor([*token_ids, -1], dtype=torch.int32)
        self.transfer.submit(StepSource(layers, ids), self.store.spans(scheduled))
        for tensor in (*layers, ids):  # the next step overwrites the model's outputs
            tensor.fill_(0)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_requests=st.integers(1, 4), threaded=st.booleans(), piece_rows=st.integers(1, 5))
def test_rows_end_where_they_belong(data: Any, num_requests: int, threaded: bool, piece_rows: int) -> None:
    schedule = Schedule(data.draw, num_requests, threaded, piece_rows)
    while any(done < len(tokens) for done, tokens in zip(schedule.computed, schedule.tokens, strict=True)):
        schedule.step()
    fence = schedule.transfer.fence()
    if fence is not None:
        fence.result(10)
    for request, tokens in enumerate(schedule.tokens):
        rows = schedule.store.take(UNIT, SampleKey(request, 0, 0))
        assert rows is not None
        assert rows.fault is None
        assert rows.num_rows == len(tokens)
        assert rows.token_ids[: rows.num_rows].tolist() == tokens
        np.testing.assert_array_equal(rows.states_TLH[: rows.num_rows], bits(true_states(tokens, request)))
    schedule.transfer.close()


def put(store: RowStore, request_id: str, position: int, count: int, value: float = 1.0) -> None:
    transfer = RowTransfer(SPEC, torch.device("cpu"))
    layers = [torch.full((count, SPEC.hidden_size), value, dtype=torch.bfloat16) for _ in SPEC.layer_ids]
    ids = torch.arange(position, position + count, dtype=torch.int32)
    transfer.submit(StepSource(layers, ids), store.spans([(request_id, position, count)]))


def opened() -> RowStore:
    store = RowStore(SPEC)
    store.open_unit(UNIT)
    return store


def test_a_gap_is_a_fault() -> None:
    """Positions that came out of the prefix cache have no forward pass."""
    store = opened()
    store.begin("a", UNIT, KEY, 8)
    put(store, "a", 3, 2)
    rows = store.take(UNIT, KEY)
    assert rows is not None
    assert rows.fault == "rows 0 to 2 were never computed"


def test_a_row_past_the_end_is_dropped() -> None:
    store = opened()
    store.begin("a", UNIT, KEY, 3)
    put(store, "a", 0, 3)
    put(store, "a", 3, 1)
    rows = store.take(UNIT, KEY)
    assert rows is not None
    assert rows.num_rows == 3
    assert rows.fault is None


def test_rows_of_a_taken_request_go_nowhere() -> None:
    """An asynchronous scheduler runs one step ahead of the answer's end."""
    store = opened()
    store.begin("a", UNIT, KEY, 8)
    put(store, "a", 0, 3)
    rows = store.take(UNIT, KEY)
    put(store, "a", 3, 1)
    assert rows is not None
    assert rows.num_rows == 3
    assert store.running("a") is None


def test_a_finished_request_may_be_tried_again() -> None:
    store = opened()
    store.begin("a", UNIT, KEY, 8)
    put(store, "a", 0, 3)
    store.end("a")
    store.begin("b", UNIT, KEY, 8)
    put(store, "b", 0, 2, value=2.0)
    rows = store.take(UNIT, KEY)
    assert rows is not None
    assert rows.fault is None
    assert rows.num_rows == 2


def test_two_running_requests_with_one_key_poison_it() -> None:
    store = opened()
    store.begin("a", UNIT, KEY, 8)
    store.begin("b", UNIT, KEY, 8)
    rows = store.take(UNIT, KEY)
    assert rows is not None
    assert rows.fault is not None
    assert "same time" in rows.fault


def test_a_dropped_units_rows_are_forgotten() -> None:
    store = opened()
    store.begin("a", UNIT, KEY, 8)
    put(store, "a", 0, 4)
    store.drop_unit(UNIT)
    put(store, "a", 4, 1)
    assert store.running("a") is None
    assert not store.has_unit(UNIT)


@pytest.mark.parametrize("unit", [UnitAttempt(5, 1), UNIT._replace(attempt=0)])
def test_a_request_of_a_unit_that_is_not_open_leaves_nothing(unit: UnitAttempt) -> None:
    """Nor does one of an earlier attempt: it may outlive its abort in the engine, with the same sample key."""
    store = opened()
    store.begin("current", UNIT, KEY, 8)
    store.begin("old", unit, KEY, 8)
    put(store, "current", 0, 2)
    put(store, "old", 0, 4)
    assert store.running("old") is None
    rows = store.take(UNIT, KEY)
    assert rows is not None
    assert (rows.num_rows, rows.fault) == (2, None)
