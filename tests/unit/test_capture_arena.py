"""States by KV slot: whatever blocks are evicted, reused and hit, a cached prefix's rows are those of its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gen.capture.arena import CachedPrefix, PrefixArena
from gen.capture.messages import UnitAttempt
from gen.capture.rows import RowStore
from gen.capture.transfer import RowTransfer, StepSource
from storage.types import SampleKey, StateSpec

SPEC = StateSpec((1, 3), 4, "float32")
UNIT = UnitAttempt(0, 0)
BLOCK = 2
NUM_BLOCKS = 8


def states_of(token_ids: list[int]) -> torch.Tensor:
    """What a causal model computes: a row depends on all tokens up to its own."""
    rows = torch.zeros(len(token_ids), len(SPEC.layer_ids), SPEC.hidden_size)
    for position in range(len(token_ids)):
        prefix = token_ids[: position + 1]
        for layer in range(len(SPEC.layer_ids)):
            rows[position, layer] = torch.tensor([sum(prefix), len(prefix), prefix[-1], layer + 1])
    return rows


def test_an_arena_that_is_too_large_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"capture\.prefix_arena_gib 1: the states of the KV cache's 100000000 tokens"):
        PrefixArena(100_000_000, SPEC, 1 << 30)


def test_a_slot_that_was_never_written_holds_no_token() -> None:
    _, token_ids = PrefixArena(4, SPEC, 1 << 20).read(np.array([1, 3]))
    assert token_ids.tolist() == [-1, -1]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), threaded=st.booleans(), piece_rows=st.integers(1, 5))
def test_rows_of_hits_are_those_of_the_tokens(data: Any, threaded: bool, piece_rows: int) -> None:
    """Plays an engine with a prefix cache: full blocks are hit by their whole prefix, also by requests of the step that
    computes them; blocks of no request are evicted at random; some requests are not captured."""
    store = RowStore(SPEC)
    store.open_unit(UNIT)
    transfer = RowTransfer(
        SPEC, torch.device("cpu"), piece_bytes=piece_rows * SPEC.row_bytes, num_pieces=2, threaded=threaded
    )
    transfer.use_arena(PrefixArena(NUM_BLOCKS * BLOCK, SPEC, 1 << 20))
    cached: dict[tuple[int, ...], int] = {}  # tokens up to the end of a full block -> block
    num_hits = 0
    for step in range(data.draw(st.integers(2, 6), label="steps")):
        used: set[int] = set()
        parts, requests, slots, prefixes = [], [], [], []
        expected = {}
        for index in range(data.draw(st.integers(1, 2), label="requests")):
            token_ids = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=7), label="tokens")
            blocks: list[int] = []
            # The last token is always computed, as in vLLM.
            while (end := (len(blocks) + 1) * BLOCK) < len(token_ids) and tuple(token_ids[:end]) in cached:
                blocks.append(cached[tuple(token_ids[:end])])
            position = len(blocks) * BLOCK
            used.update(blocks)
            while len(blocks) * BLOCK < len(token_ids):
                block = data.draw(st.sampled_from(sorted(set(range(NUM_BLOCKS)) - used)), label="block")
                cached = {prefix: held for prefix, held in cached.items() if held != block}
                used.add(block)
                blocks.append(block)
            for full in range(position // BLOCK, len(token_ids) // BLOCK):
                cached[tuple(token_ids[: (full + 1) * BLOCK])] = blocks[full]
            where = np.array([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(len(token_ids))])
            name, key = f"{step}-{index}", SampleKey(step, 0, index)
            if data.draw(st.integers(0, 3), label="captured"):
                store.begin(name, UNIT, key, len(token_ids))
                expected[key] = token_ids
                rows = store.running(name)
                assert rows is not None
                if position:
                    prefixes.append(CachedPrefix(rows, where[:position]))
                    num_hits += 1
            parts.append((states_of(token_ids)[position:], token_ids[position:]))
            requests.append((name, position, len(token_ids) - position))
            slots.append(where[position:])
        states = torch.cat([part for part, _ in parts])
        layers = [states[:, layer].contiguous() for layer in range(len(SPEC.layer_ids))]
        ids = torch.tensor([token for _, tokens in parts for token in tokens], dtype=torch.int32)
        transfer.submit_all(StepSource(layers, ids), store.spans(requests), np.concatenate(slots), prefixes)
        fence = transfer.fence()
        if fence is not None:
            fence.result()
        for key, token_ids in expected.items():
            rows = store.take(UNIT, key)
            assert rows is not None
            assert (rows.fault, rows.num_rows) == (None, len(token_ids))
            assert rows.token_ids[: rows.num_rows].tolist() == token_ids
            np.testing.assert_array_equal(rows.states_TLH.view(np.float32), states_of(token_ids).numpy())
    transfer.close()
