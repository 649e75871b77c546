"""The reader's order and packs as pure functions."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.packing import (
    SampleTooLongError,
    make_packs,
    round_positions,
    shuffled_order,
    weighted_selection,
    worker_position,
)

KEYS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 3)), unique=True, max_size=60)


def as_array(keys: list[tuple[int, int, int]]) -> np.ndarray:
    return np.array(keys, np.int64).reshape(-1, 3)


def sequence(keys: list[tuple[int, int, int]], seed: int, epoch: int) -> list[tuple[int, int, int]]:
    return [keys[index] for index in shuffled_order(as_array(keys), seed, epoch)]


@given(keys=KEYS, seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000), data=st.data())
@settings(max_examples=60, deadline=None)
def test_order_depends_on_the_set_of_keys_alone(keys, seed, epoch, data):
    order = sequence(keys, seed, epoch)
    assert sorted(order) == sorted(keys)
    assert sequence(data.draw(st.permutations(keys)), seed, epoch) == order
    kept = [key for key in keys if data.draw(st.booleans())]
    assert sequence(kept, seed, epoch) == [key for key in order if key in set(kept)]


def test_order_is_the_same_on_every_machine_and_for_ever():
    # Frozen: a checkpoint of an older release points into this order.
    keys = as_array([(row, turn, n) for row in range(3) for turn in range(2) for n in range(2)])
    assert shuffled_order(keys, 17, 0).tolist() == FROZEN_ORDER[0]
    assert shuffled_order(keys, 17, 1).tolist() == FROZEN_ORDER[1]


FROZEN_ORDER = [
    [1, 3, 5, 9, 7, 11, 10, 8, 6, 2, 4, 0],
    [9, 0, 8, 4, 7, 2, 6, 10, 5, 11, 3, 1],
]


def test_order_looks_shuffled():
    keys = np.stack([np.arange(2000), np.zeros(2000, int), np.zeros(2000, int)], axis=1)
    first, second = shuffled_order(keys, 0, 0), shuffled_order(keys, 0, 1)
    other_seed = shuffled_order(keys, 1, 0)
    # The correlation of independent random orders has a standard deviation of 1 / sqrt(2000) = 0.022.
    for a, b in ((first, np.arange(2000)), (first, second), (first, other_seed), (second, other_seed)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.11


@given(num_samples=st.integers(1, 50), weight=st.floats(0.01, 4.0), seed=st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_weights(num_samples, weight, seed):
    keys = np.stack([np.arange(num_samples)] * 3, axis=1)
    total: Counter[int] = Counter(dict.fromkeys(range(num_samples), 0))
    for epoch in range(12):
        chosen = weighted_selection(keys, weight, seed, epoch).tolist()
        assert len(chosen) == round(weight * num_samples)
        uses = Counter(dict.fromkeys(range(num_samples), 0))
        uses.update(chosen)
        passes = round(weight * num_samples) // num_samples
        assert set(uses.values()) <= {passes, passes + 1}
        total.update(chosen)
        # No sample is neglected: after any epoch the uses differ by one at most.
        assert max(total.values()) - min(total.values()) <= 1


def test_a_part_moves_on_from_epoch_to_epoch():
    keys = np.stack([np.arange(100)] * 3, axis=1)
    parts = [set(weighted_selection(keys, 0.25, 3, epoch).tolist()) for epoch in range(4)]
    assert set().union(*parts) == set(range(100))
    assert [len(part) for part in parts] == [25, 25, 25, 25]
    assert parts[0] != set(range(25))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight(weight):
    with pytest.raises(ValueError, match="weight"):
        weighted_selection(np.zeros((3, 3), np.int64), weight, 0, 0)


@given(
    lengths=st.lists(st.integers(1, 64), max_size=200), pack_tokens=st.integers(64, 200), look_ahead=st.integers(1, 9)
)
@settings(max_examples=80, deadline=None)
def test_packs_hold_every_sample_once_and_never_too_much(lengths, pack_tokens, look_ahead):
    plan = make_packs(lengths, pack_tokens, look_ahead)
    packs = [plan.pack(position).tolist() for position in range(plan.num_packs)]
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(packs)
    sums = [sum(lengths[index] for index in pack) for pack in packs]
    assert all(total <= pack_tokens for total in sums)
    # First fit: the first sample of a pack fitted into none of the packs that were open before it.
    for earlier, later in zip(sums, packs[1:], strict=False):
        assert earlier + lengths[later[0]] > pack_tokens
    # A sample stays near its place in the order: it joins one of `look_ahead` packs.
    firsts = [pack[0] for pack in packs]
    assert firsts == sorted(firsts)
    for position, pack in enumerate(packs):
        assert all(index < firsts[position + look_ahead] for index in pack if position + look_ahead < len(packs))


def test_packs_are_full():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 0.6, 20_000).astype(int) + 1, 4096)
    plan = make_packs(lengths, 4096)
    assert lengths.sum() / (plan.num_packs * 4096) > 0.97


def test_a_sample_that_fits_no_pack():
    with pytest.raises(SampleTooLongError, match="position 1 has 11 tokens, a pack takes 10"):
        make_packs([10, 11], 10)


@given(
    num_packs=st.integers(0, 40),
    worlds=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_workers_share_packs_exactly_when_their_number_changes(num_packs, worlds):
    position, seen = 0, []
    for number, (world_size, rounds) in enumerate(worlds):
        starts = list(round_positions(position, num_packs, world_size))
        if number < len(worlds) - 1:
            starts = starts[:rounds]
        for start in starts:
            taken = [worker_position(start, rank, world_size) for rank in range(world_size)]
            assert [pack % world_size for pack in taken] == list(range(world_size))
            seen += [pack for pack in taken if pack < num_packs]
            position = start + world_size
    assert sorted(seen) == list(range(num_packs))
