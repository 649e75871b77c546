"""What training reads: every sample once, whatever the workers, the stops, the files and the order of commits."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_data import SPEC, Content, build, commit_units, create

from storage.epoch_plan import SourceSizes, plan_epoch
from storage.packing import SampleTooLongError, round_positions, worker_position
from storage.stream import Pack, Source, TrainingStream
from storage.types import SampleKey, StateSpec

LENGTHS = [2, 3, 9, 30, 17, 5, 40, 2, 11, 23, 8, 8, 8, 31, 12, 6, 7, 19]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Content:
    return build(tmp_path_factory.mktemp("data"), LENGTHS)


def stream(content: Content, **options) -> TrainingStream:
    arguments = {"seed": 5, "pack_tokens": 48} | options
    return TrainingStream([(content.dataset.uri, None, 1.0)], **arguments)


def shape(packs: list[Pack]) -> list[tuple[int, int, list[SampleKey]]]:
    return [(pack.epoch, pack.position, [sample.key for sample in pack.samples]) for pack in packs]


def keys(packs: list[Pack]) -> list[SampleKey]:
    return [sample.key for pack in packs for sample in pack.samples]


def test_an_epoch_holds_every_sample_once_with_its_states(content):
    packs = list(stream(content))
    assert sorted(keys(packs)) == sorted(content.keys)
    assert [pack.position for pack in packs] == list(range(len(packs)))
    for pack in packs:
        assert pack.num_tokens <= 48
        for sample in pack.samples:
            np.testing.assert_array_equal(sample.states_TLH, content.states[sample.key])
            assert sample.token_ids.tolist() == content.token_ids[sample.key]


def test_epochs_differ_and_repeat_exactly(content):
    first = shape(list(stream(content, epochs=3)))
    assert first == shape(list(stream(content, epochs=3, prefetch_packs=0)))
    by_epoch = [[key for epoch, _, pack in first if epoch == number for key in pack] for number in range(3)]
    assert by_epoch[0] != by_epoch[1] != by_epoch[2]
    assert shape(list(stream(content, seed=6))) != shape(list(stream(content)))


def test_the_order_knows_neither_files_nor_the_order_of_commits(content, tmp_path):
    other = build(tmp_path, LENGTHS, order=[4, 2, 0, 3, 1], codec="planes-zstd", target_bytes=600)
    assert shape(list(stream(other, epochs=2))) == shape(list(stream(content, epochs=2)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 40])
def test_workers_share_an_epoch(content, world_size):
    """More workers than packs, and than shards (5), included; all take the same number of steps."""
    single = list(stream(content))
    workers = [list(stream(content, rank=rank, world_size=world_size)) for rank in range(world_size)]
    steps = {len(packs) for packs in workers}
    assert steps == {-(-len(single) // world_size)}
    assert sorted(key for packs in workers for key in keys(packs)) == sorted(content.keys)
    by_position = {pack.position: pack for packs in workers for pack in packs if pack.samples}
    assert shape([by_position[pack.position] for pack in single]) == shape(single)
    for rank, packs in enumerate(workers):
        assert all(pack.position % world_size == rank for pack in packs)


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=60),
    weight=st.sampled_from([1.0, 0.4, 2.5]),
    worlds=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 6)), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_a_plan_is_read_once_however_often_the_number_of_workers_changes(lengths, weight, worlds, seed):
    """The property behind the stream, over three epochs, on metadata alone."""
    sizes = [SourceSizes(np.stack([np.arange(len(lengths))] * 3, axis=1), np.array(lengths), weight)]
    plans = [plan_epoch(sizes, seed, epoch, 32, None) for epoch in range(3)]
    read: list[list[int]] = [[], [], []]
    epoch = position = turn = 0
    while epoch < 3:
        world_size, rounds = worlds[turn % len(worlds)]
        turn += 1
        packs = plans[epoch].packs
        for start in list(round_positions(position, packs.num_packs, world_size))[:rounds]:
            for rank in range(world_size):
                pack = worker_position(start, rank, world_size)
                if pack < packs.num_packs:
                    read[epoch] += plans[epoch].indices[packs.pack(pack)].tolist()
            position = start + world_size
        if position >= packs.num_packs:
            epoch, position = epoch + 1, 0
    for number, indices in enumerate(read):
        assert len(indices) == round(weight * len(lengths))
        assert sorted(indices) == sorted(plans[number].indices.tolist())


@given(
    stops=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=5),
    pack_tokens=st.sampled_from([40, 64, 100]),
    prefetch_packs=st.sampled_from([0, 2]),
)
@settings(max_examples=15, deadline=None)
def test_stopping_and_going_on_with_another_number_of_workers(content, stops, pack_tokens, prefetch_packs):
    """The stream itself: state through JSON, two epochs, then to the end with three workers."""
    options = {"epochs": 2, "pack_tokens": pack_tokens, "prefetch_packs": prefetch_packs}
    state: dict | None = None
    seen: list[tuple[int, SampleKey]] = []
    for world_size, steps in [*stops, (3, 10_000)]:
        states = []
        for rank in range(world_size):
            worker = stream(content, rank=rank, world_size=world_size, **options)
            if state is not None:
                worker.load_state_dict(state)
            for pack in islice(worker, steps):
                seen += [(pack.epoch, sample.key) for sample in pack.samples]
                taken = json.loads(json.dumps(worker.state_dict()))
            states.append(taken if steps < 10_000 else worker.state_dict())
        assert all(other == states[0] for other in states)
        state = states[0]
        if state["epoch"] == 1 and state["position"] == worker.plan(1).packs.num_packs:
            break
    assert Counter(seen) == Counter((epoch, key) for epoch in range(2) for key in content.keys)


def test_a_state_belongs_to_the_pack_that_was_yielded_not_to_what_was_read_ahead(content):
    worker = stream(content, prefetch_packs=4, threads=4)
    iterator = iter(worker)
    next(iterator)
    assert (worker.state_dict()["epoch"], worker.state_dict()["position"]) == (0, 1)
    rest = stream(content)
    rest.load_state_dict(worker.state_dict())
    assert shape(list(rest)) == shape(list(iterator))


def test_a_state_pins_the_version(tmp_path):
    content = create(tmp_path, LENGTHS)
    commit_units(content, LENGTHS, [0, 1])
    worker = stream(content)
    first = [next(iter(worker))]
    state = worker.state_dict()
    commit_units(content, LENGTHS, [2, 3, 4])
    resumed = stream(content)
    assert resumed.sources[0].version == 2
    resumed.load_state_dict(state)
    assert resumed.sources[0].version == 1
    assert sorted(keys(first + list(resumed))) == [SampleKey(row, 0, 0) for row in range(8)]


def test_a_state_is_refused_with_other_settings(content, tmp_path):
    worker = stream(content)
    next(iter(worker))
    state = worker.state_dict()
    with pytest.raises(ValueError, match="seed: state has 5, this run 9"):
        stream(content, seed=9).load_state_dict(state)
    with pytest.raises(ValueError, match="pack_tokens: state has 48, this run 64"):
        stream(content, pack_tokens=64).load_state_dict(state)
    with pytest.raises(ValueError, match=r"weights: state has \[1.0\], this run \[0.5\]"):
        TrainingStream([(content.dataset.uri, None, 0.5)], seed=5, pack_tokens=48).load_state_dict(state)
    with pytest.raises(ValueError, match="state_version 99"):
        stream(content).load_state_dict(state | {"state_version": 99})
    other = build(tmp_path, [length + 1 for length in LENGTHS])
    with pytest.raises(ValueError, match="no longer holds the samples"):
        stream(other).load_state_dict(state)


def test_a_sample_that_is_too_long_is_refused_by_name_or_cut_and_counted(content):
    with pytest.raises(SampleTooLongError, match=r"2 samples .* pack_tokens 30 \(first: sample row 6 turn 0 n 0 of"):
        stream(content, pack_tokens=30)
    worker = stream(content, pack_tokens=30, max_sample_tokens=20)
    samples = [sample for pack in worker for sample in pack.samples]
    assert sorted(sample.key for sample in samples) == sorted(content.keys)
    for sample in samples:
        num_tokens = min(20, len(content.token_ids[sample.key]))
        assert sample.token_ids.tolist() == content.token_ids[sample.key][:num_tokens]
        assert sample.loss_mask.tolist() == content.loss_masks[sample.key][:num_tokens]
        np.testing.assert_array_equal(sample.states_TLH, content.states[sample.key][: num_tokens - 1])
    cut = [length - 20 for length in LENGTHS if length > 20]
    assert worker.counts.truncated_samples == len(cut) == 4
    assert worker.counts.truncated_tokens == sum(cut)
    assert worker.counts.samples == len(LENGTHS)
    assert worker.counts.tokens == sum(min(length, 20) for length in LENGTHS)


def test_empty_packs_are_counted(content):
    workers = [stream(content, rank=rank, world_size=40) for rank in range(40)]
    packs = [pack for worker in workers for pack in worker]
    num_packs = workers[0].plan(0).packs.num_packs
    assert sum(worker.counts.empty_packs for worker in workers) == 40 - num_packs
    assert sum(not pack.samples for pack in packs) == 40 - num_packs
    assert len(packs) == 40  # one for each worker


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Content:
    return build(tmp_path_factory.mktemp("second"), LENGTHS[:10], seed=1, codec="planes-zstd")


def test_a_weighted_list_of_data_sets(content, second):
    sources = [Source(content.dataset.uri, weight=0.5), Source(second.dataset.uri, weight=2.2)]
    worker = TrainingStream(sources, seed=1, pack_tokens=64, epochs=2)
    by_epoch: list[Counter] = [Counter(), Counter()]
    for pack in worker:
        for sample in pack.samples:
            which = [np.array_equal(sample.states_TLH, one.states.get(sample.key)) for one in (content, second)]
            assert which in ([True, False], [False, True])
            by_epoch[pack.epoch][which.index(True), sample.key] += 1
    for uses in by_epoch:
        assert sum(count for (source, _), count in uses.items() if source == 0) == 9
        assert sum(count for (source, _), count in uses.items() if source == 1) == 22
        assert {count for (source, _), count in uses.items() if source == 0} == {1}
        assert {count for (source, _), count in uses.items() if source == 1} == {2, 3}
    # The halves of two epochs are the whole.
    halves = [{key for source, key in uses if source == 0} for uses in by_epoch]
    assert halves[0] | halves[1] == content.keys
    assert halves[0].isdisjoint(halves[1])


@pytest.mark.parametrize(
    ("spec", "identity", "message"),
    [
        (StateSpec((1, 2, 5), 8), {}, r"states.layer_ids: .* has \[1, 2, 4\], .* has \[1, 2, 5\]"),
        (StateSpec((1, 2, 4), 16), {}, "states.hidden_size: .* has 8, .* has 16"),
        (StateSpec((1, 2, 4), 8, "float16"), {}, "states.dtype: .* has 'bfloat16', .* has 'float16'"),
        (SPEC, {"tokenizer": {"digest": "t1"}}, "tokenizer.digest: .* has 't0', .* has 't1'"),
        (SPEC, {"layer_convention": "sglang"}, "layer_convention: .* has 'vllm', .* has 'sglang'"),
        (SPEC, {"verifier": {"weights_digest": "w1"}}, "verifier.weights_digest: .* has None, .* has 'w1'"),
    ],
)
def test_data_sets_that_do_not_go_together_are_refused_by_field(content, tmp_path, spec, identity, message):
    other = build(tmp_path, LENGTHS[:4], spec=spec, identity=identity)
    with pytest.raises(ValueError, match=message):
        TrainingStream([(content.dataset.uri, None, 1.0), (other.dataset.uri, None, 1.0)], seed=0, pack_tokens=64)


def test_bad_arguments_are_named(content, tmp_path):
    with pytest.raises(ValueError, match=r"rank 2 must be .* below world_size 2"):
        stream(content, rank=2, world_size=2)
    with pytest.raises(ValueError, match=r"max_sample_tokens 49 must be .* at most pack_tokens 48"):
        stream(content, max_sample_tokens=49)
    with pytest.raises(ValueError, match="sources is empty"):
        TrainingStream([], seed=0, pack_tokens=10)
    with pytest.raises(FileNotFoundError, match="no data set at"):
        TrainingStream([(str(Path(tmp_path) / "nothing"), None, 1.0)], seed=0, pack_tokens=10)
    empty = create(tmp_path, LENGTHS)
    with pytest.raises(ValueError, match="no samples in"):
        stream(empty)


def test_a_damaged_sample_stops_the_stream_by_name(tmp_path):
    from storage.errors import DamagedError

    content = build(tmp_path, LENGTHS)
    worker = stream(content)
    receipt = worker.readers[0].locations.receipt(7)
    path = tmp_path / receipt.shard
    data = bytearray(path.read_bytes())
    data[receipt.offset] ^= 0x10
    path.chmod(0o644)
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedError, match=str(receipt.key)):
        list(stream(content))
