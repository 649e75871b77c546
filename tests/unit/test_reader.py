"""Samples by key, by unit, one after another; damage; reading while the data set grows."""

from __future__ import annotations

import json
import threading
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_data import Content, build, commit_units, create

from storage.cache import BoundedCache
from storage.errors import DamagedError
from storage.follow import Follower
from storage.prefetch import prefetched
from storage.reader import LoadedSample, SampleNotFoundError, SampleReader
from storage.store import Store
from storage.types import SampleKey, StateSpec

LENGTHS = [2, 3, 9, 30, 17, 5, 40, 2, 11, 23]


def check(content: Content, sample: LoadedSample) -> None:
    key = sample.key
    assert sample.token_ids.dtype == np.int32
    assert sample.token_ids.tolist() == content.token_ids[key]
    assert sample.loss_mask.dtype == np.bool_
    assert sample.loss_mask.tolist() == content.loss_masks[key]
    np.testing.assert_array_equal(sample.states_TLH, content.states[key])
    assert sample.states_TLH.dtype == content.states[key].dtype


@pytest.mark.parametrize("shard_format", ["safetensors", "parquet"])
@pytest.mark.parametrize("codec", ["none", "planes-zstd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_way_to_read_gives_what_was_written(tmp_path, dtype, codec, shard_format):
    spec = StateSpec((0, 3, 5), 16, dtype)
    content = build(
        tmp_path, LENGTHS, spec=spec, order=[2, 0, 1], codec=codec, shard_format=shard_format, rejected={3: "too_long"}
    )
    reader = SampleReader(content.dataset.snapshot())
    assert len(reader) == 9
    assert set(reader.keys()) == content.keys
    assert SampleKey(3, 0, 0) not in content.keys
    in_order = list(reader)
    assert [sample.key for sample in in_order] == list(reader.keys()) == sorted(content.keys)
    keys = [SampleKey(row, 0, 0) for row in (9, 0, 4, 4, 1)]
    for sample in [*in_order, *reader.iter_unit(1), *reader.read_many(keys), reader.read(SampleKey(6, 0, 0))]:
        check(content, sample)
    assert [sample.key for sample in reader.read_many(keys)] == keys
    assert [sample.key.row for sample in reader.iter_unit(1)] == [4, 5, 6, 7]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_as_a_tensor(tmp_path, dtype):
    content = build(tmp_path, [5, 9], spec=StateSpec((1, 2), 4, dtype))
    key = SampleKey(1, 0, 0)
    tensor = SampleReader(content.dataset.snapshot()).read(key).states_torch()
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.shape == (8, 2, 4)
    bits = torch.int16 if dtype != "float32" else torch.int32
    np.testing.assert_array_equal(tensor.view(bits).numpy().view(content.states[key].dtype), content.states[key])


def test_truncating_keeps_one_row_less_than_tokens(tmp_path):
    content = build(tmp_path, [12])
    sample = SampleReader(content.dataset.snapshot()).read(SampleKey(0, 0, 0))
    cut = sample.truncated(7)
    assert cut.token_ids.tolist() == sample.token_ids.tolist()[:7]
    assert cut.loss_mask.tolist() == sample.loss_mask.tolist()[:7]
    np.testing.assert_array_equal(cut.states_TLH, content.states[sample.key][:6])


def test_a_key_that_is_not_there_is_named(tmp_path):
    content = build(tmp_path, [4, 4, 4, 4, 4], complete=False, rejected={1: "empty"})
    content.dataset.delete([SampleKey(2, 0, 0)])
    reader = SampleReader(content.dataset.snapshot())
    for row in (1, 2, 99):
        with pytest.raises(SampleNotFoundError, match=f"sample row {row} turn 0 n 0 is not in version"):
            reader.read(SampleKey(row, 0, 0))
    content.dataset.expire([0])
    reader = SampleReader(content.dataset.snapshot())
    assert list(reader.keys()) == [SampleKey(4, 0, 0)]
    with pytest.raises(ValueError, match=r"unit 0 .* it is expired"):
        list(reader.iter_unit(0))


def test_an_older_version_still_reads(tmp_path):
    content = build(tmp_path, LENGTHS, complete=False)
    reader = SampleReader(content.dataset.snapshot(1))
    assert [sample.key.row for sample in reader] == [0, 1, 2, 3]
    content.dataset.delete([SampleKey(0, 0, 0)])
    assert SampleKey(0, 0, 0) in set(SampleReader(content.dataset.snapshot(3)).keys())


def test_a_shard_that_gc_removed_is_named_with_the_reason(tmp_path):
    content = build(tmp_path, LENGTHS, complete=False)
    reader = SampleReader(content.dataset.snapshot())
    content.dataset.expire([0])
    for path in content.dataset.manifest().retired():
        content.dataset.store.delete(path)
    with pytest.raises(DamagedError, match=r"shards/.*: expired at version .* can no longer be read in full"):
        reader.read(SampleKey(0, 0, 0))


@pytest.mark.parametrize("codec", ["none", "planes-zstd"])
def test_a_flipped_byte_names_file_and_sample(tmp_path, codec):
    content = build(tmp_path, LENGTHS, codec=codec)
    reader = SampleReader(content.dataset.snapshot())
    key = SampleKey(3, 0, 0)
    receipt = reader.locations.receipt(list(reader.keys()).index(key))
    path = tmp_path / receipt.shard
    data = bytearray(path.read_bytes())
    data[receipt.offset + receipt.nbytes // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(bytes(data))
    reader = SampleReader(content.dataset.snapshot())
    with pytest.raises(DamagedError) as raised:
        reader.read(key)
    assert receipt.shard in str(raised.value)
    assert str(key) in str(raised.value)
    check(content, reader.read(SampleKey(2, 0, 0)))


def test_a_sample_costs_its_own_bytes(tmp_path, monkeypatch):
    """Over a store without memory maps, a sample of 1 % of a shard is read with a few small ranges."""
    content = build(tmp_path, [40] * 40)
    reader = SampleReader(content.dataset.snapshot())
    monkeypatch.setattr(type(reader.snapshot.dataset.store), "local_path", lambda self, path: None)
    fetched: dict[str, int] = {}
    store: Store = reader.snapshot.dataset.store
    whole, ranges = store.get, store.get_ranges

    def get(path: str) -> bytes:
        data = whole(path)
        fetched[path] = fetched.get(path, 0) + len(data)
        return data

    def get_ranges(path: str, wanted) -> list[bytes]:
        parts = ranges(path, wanted)
        fetched[path] = fetched.get(path, 0) + sum(map(len, parts))
        return parts

    monkeypatch.setattr(store, "get", get)
    monkeypatch.setattr(store, "get_ranges", get_ranges)
    check(content, reader.read(SampleKey(17, 0, 0)))
    shards = {path: count for path, count in fetched.items() if path.startswith("shards/")}
    raw = content.states[SampleKey(17, 0, 0)].nbytes
    assert len(shards) == 1
    assert sum(shards.values()) < 2 * raw + 4096


def test_threads_share_a_reader(tmp_path):
    content = build(tmp_path, LENGTHS * 4, codec="planes-zstd")
    reader = SampleReader(content.dataset.snapshot(), open_shards=2, token_cache_bytes=1)
    indices = list(range(len(reader))) * 5
    for sample in prefetched(lambda index: reader.read_at([index])[0], indices, depth=16, threads=8):
        check(content, sample)


def test_cache_loads_once_and_stays_within_its_bound():
    loads: list[int] = []
    gate = threading.Event()

    def load(key: int) -> int:
        loads.append(key)
        if key == 0:
            gate.wait(5)
        return key * 10

    cache: BoundedCache[int, int] = BoundedCache(load, 3)
    threads = [threading.Thread(target=cache.get, args=(0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join()
    assert loads == [0]
    assert [cache.get(key) for key in (1, 2, 0, 3)] == [10, 20, 0, 30]
    assert len(cache) == 3
    cache.get(0)
    assert loads == [0, 1, 2, 3]  # 1 was the least recently used
    cache.get(1)
    assert loads[-1] == 1


def test_cache_does_not_keep_a_failure():
    answers = iter([ValueError("first"), 7])

    def load(key: str) -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cache: BoundedCache[str, int] = BoundedCache(load, 3)
    with pytest.raises(ValueError, match="first"):
        cache.get("x")
    assert cache.get("x") == 7


def test_prefetching_is_bounded_ordered_and_raises_at_its_turn():
    running = 0
    most = 0
    lock = threading.Lock()
    taken = 0

    def work(item: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, item - taken)
        if item == 50:
            raise KeyError(item)
        return item

    got = []
    results = prefetched(work, range(100), depth=5, threads=3)
    for result in islice(results, 50):
        got.append(result)
        with lock:
            taken = result + 1
    with pytest.raises(KeyError, match="50"):
        next(results)
    assert got == list(range(50))
    assert most <= 5
    assert running <= 56


def test_following_a_data_set_that_grows(tmp_path):
    content = create(tmp_path, LENGTHS)
    started = threading.Event()

    def write() -> None:
        started.wait(10)
        for unit in (2, 0, 1):
            commit_units(content, LENGTHS, [unit])
        content.dataset.complete()

    thread = threading.Thread(target=write)
    thread.start()
    follower = Follower(str(tmp_path), poll_s=0.01, idle_timeout_s=30)
    started.set()
    samples = list(follower)
    thread.join()
    assert follower.is_complete
    assert [sample.key.row for sample in samples] == [8, 9, 0, 1, 2, 3, 4, 5, 6, 7]
    for sample in samples:
        check(content, sample)


def test_following_stops_when_idle_and_goes_on_from_its_state(tmp_path):
    content = create(tmp_path, LENGTHS)
    commit_units(content, LENGTHS, [1])
    follower = Follower(str(tmp_path), poll_s=0.01, idle_timeout_s=0.0)
    first = [sample.key.row for sample in islice(follower, 3)]
    assert first == [4, 5, 6]
    assert not follower.is_complete
    state = json.loads(json.dumps(follower.state_dict()))
    # A commit that comes between does not overtake the unit that was begun.
    commit_units(content, LENGTHS, [0])
    again = Follower(str(tmp_path), poll_s=0.01, idle_timeout_s=0.0)
    again.load_state_dict(state)
    assert [sample.key.row for sample in again] == [7, 0, 1, 2, 3]
    assert not again.is_complete
    commit_units(content, LENGTHS, [2])
    content.dataset.complete()
    assert [sample.key.row for sample in again] == [8, 9]
    assert again.is_complete
    assert again.state_dict()["done"] == [[0, 3]]


def test_following_goes_on_after_the_last_sample_whatever_was_deleted_meanwhile(tmp_path):
    content = build(tmp_path, LENGTHS, complete=False)
    follower = Follower(str(tmp_path), poll_s=0.01, idle_timeout_s=0.0)
    assert [sample.key.row for sample in islice(follower, 2)] == [0, 1]
    state = json.loads(json.dumps(follower.state_dict()))
    assert state["partial"] == [0, 1, 0, 0]
    content.dataset.delete([SampleKey(0, 0, 0), SampleKey(1, 0, 0), SampleKey(5, 0, 0)])
    again = Follower(str(tmp_path), poll_s=0.01, idle_timeout_s=0.0)
    again.load_state_dict(state)
    assert [sample.key.row for sample in again] == [2, 3, 4, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="state_version 1, known: 2"):
        again.load_state_dict(state | {"state_version": 1})


def test_a_reader_of_some_units_refuses_the_others(tmp_path):
    content = build(tmp_path, LENGTHS)
    reader = SampleReader(content.dataset.snapshot(), units=[2, 0])
    assert [sample.key.row for sample in reader.iter_unit(2)] == [8, 9]
    with pytest.raises(ValueError, match=r"unit 1 is not one of the units \[0, 2\] that this reader is for"):
        list(reader.iter_unit(1))


def test_following_leaves_out_what_was_expired_or_deleted(tmp_path):
    content = build(tmp_path, LENGTHS, complete=False)
    content.dataset.expire([0])
    content.dataset.delete([SampleKey(5, 0, 0)])
    content.dataset.complete()
    follower = Follower(str(tmp_path), poll_s=0.01)
    assert [sample.key.row for sample in follower] == [4, 6, 7, 8, 9]


def test_following_looks_again_before_each_unit(tmp_path):
    content = build(tmp_path, LENGTHS, complete=False)
    follower = Follower(str(tmp_path), poll_s=0.01, idle_timeout_s=0.0)
    samples = iter(follower)
    assert [next(samples).key.row for _ in range(4)] == [0, 1, 2, 3]
    content.dataset.expire([1])
    for path in content.dataset.manifest().retired():
        content.dataset.store.delete(path)
    assert [sample.key.row for sample in samples] == [8, 9]


def test_the_library_needs_no_torch_to_read(tmp_path: Path):
    import subprocess
    import sys

    build(tmp_path, [4, 5])
    code = (
        "import sys; from storage.dataset import Dataset; from storage.reader import SampleReader; "
        f"assert len(list(SampleReader(Dataset.open({str(tmp_path)!r}).snapshot()))) == 2; "
        "heavy = {'torch', 'duckdb', 'ray', 'vllm'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
