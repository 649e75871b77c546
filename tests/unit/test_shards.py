"""The contract of shards, the same for every format, codec and dtype; then what each format owes to its own readers."""

from __future__ import annotations

import json
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_samples import DTYPES, bits, kinds, model_like, seeds, specs

from storage.codec import CODECS, decode
from storage.digest import file_digest
from storage.shards import SHARD_FORMATS, encode_sample, open_shard_reader, open_shard_writer, states_checksum
from storage.shards.check import find_bad_rows
from storage.store_local import LocalStore
from storage.types import FileEntry, Receipt, SampleKey, ShardTarget, StateSpec

FORMATS = sorted(SHARD_FORMATS)
SPEC = StateSpec((2, 15), 48)


class UnmappedStore(LocalStore):
    """A local store whose files cannot be mapped, so that readers take ranges as from a bucket."""

    def local_path(self, path: str) -> Path | None:
        return None


def write(
    root: Path,
    samples: dict[SampleKey, np.ndarray],
    spec: StateSpec = SPEC,
    shard_format: str = "safetensors",
    codec: str = "planes-zstd",
    target_bytes: int = 1 << 30,
    attempt: int = 0,
) -> tuple[list[Receipt], list[FileEntry]]:
    target = ShardTarget(str(root), "w1", 12, attempt, spec, shard_format, codec, target_bytes)
    with open_shard_writer(target) as writer:
        receipts = [writer.add(key, states_TLH) for key, states_TLH in samples.items()]
        return receipts, writer.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shard_format", FORMATS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_contract(shard_format: str, codec: str, dtype: str, data: st.DataObject) -> None:
    spec = data.draw(specs(dtype))
    keys = data.draw(
        st.lists(st.builds(SampleKey, *(st.integers(0, (1 << 31) - 1),) * 3), min_size=1, max_size=8, unique=True)
    )
    rows = st.integers(0, 25)
    samples = {key: bits(spec, data.draw(rows), data.draw(kinds), data.draw(seeds)) for key in keys}
    target_bytes = data.draw(st.sampled_from([1, 5000, 20_000, 1 << 30]))
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        receipts, entries = write(root, samples, spec, shard_format, codec, target_bytes)

        # Receipts say what was given, in its order, and each sample lies within one shard.
        assert [receipt.key for receipt in receipts] == keys
        assert [receipt.rows for receipt in receipts] == [len(s) for s in samples.values()]
        assert [receipt.checksum for receipt in receipts] == [states_checksum(s) for s in samples.values()]
        assert [r.shard for r in receipts] == sorted(r.shard for r in receipts)
        assert sorted({receipt.shard for receipt in receipts}) == [entry.path for entry in entries]

        for entry in entries:
            stored = (root / entry.path).read_bytes()
            own = [receipt for receipt in receipts if receipt.shard == entry.path]
            # The entry says what is in the file.
            assert (entry.kind, entry.shard_format, entry.codec) == ("shard", shard_format, codec)
            assert entry.size == len(stored)
            assert entry.digest == f"blake3:{blake3(stored).hexdigest()}" == file_digest(root / entry.path)
            assert entry.num_samples == len(own)
            assert entry.rows == sum(receipt.rows for receipt in own)
            assert entry.raw_bytes == entry.rows * spec.row_bytes
            # Ranges lie in the file, in order and apart, and hold the encoded sample.
            bounds = [(receipt.offset, receipt.offset + receipt.nbytes) for receipt in own]
            flat = [0, *(bound for pair in bounds for bound in pair), entry.size]
            assert flat == sorted(flat)
            for receipt in own:
                part = stored[receipt.offset : receipt.offset + receipt.nbytes]
                np.testing.assert_array_equal(decode(part, receipt.rows, spec, codec), samples[receipt.key])
            # A shard of several samples stays below the target; Parquet writes the key columns on top.
            assert len(own) == 1 or bounds[-1][1] <= target_bytes + (1000 if shard_format == "parquet" else 0)

        # Every store, one at a time and many, in any order.
        for store in (LocalStore(root), UnmappedStore(root)):
            for entry in entries:
                reader = open_shard_reader(store, entry, spec)
                own = data.draw(st.permutations([r for r in receipts if r.shard == entry.path]))
                for receipt, states_TLH in zip(own, reader.read_many(own), strict=True):
                    np.testing.assert_array_equal(states_TLH, samples[receipt.key])
                    np.testing.assert_array_equal(reader.read(receipt), samples[receipt.key])
        assert not [path for path in (root / "staging").rglob("*") if path.is_file()]


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_shard_closes_at_the_target_size(tmp_path: Path, shard_format: str) -> None:
    """Samples of 9,600 bytes, 50,000 a shard: five fit, four beside the header that safetensors reserves."""
    samples = {SampleKey(i, 0, 0): model_like(SPEC, 50, i) for i in range(10)}
    _, entries = write(tmp_path, samples, shard_format=shard_format, codec="none", target_bytes=50_000)
    assert [entry.num_samples for entry in entries] == ([4, 4, 2] if shard_format == "safetensors" else [5, 5])
    paths = [f"shards/u00000012-a0-ww1-{i:05}.{SHARD_FORMATS[shard_format].suffix}" for i in range(len(entries))]
    assert [entry.path for entry in entries] == paths


def test_a_safetensors_shard_closes_when_its_header_is_full(tmp_path: Path) -> None:
    """Samples of no rows take header and nothing else: no target size would ever close the shard."""
    empty_TLH = np.empty((0, 2, 48), np.uint16)
    samples = {SampleKey(i, 0, 0): empty_TLH for i in range(1000)}
    receipts, entries = write(tmp_path, samples, codec="none")
    assert len(entries) == 2
    assert sum(entry.num_samples for entry in entries) == 1000
    for entry in entries:
        with safetensors.safe_open(tmp_path / entry.path, "np") as file:
            assert len(file.keys()) == entry.num_samples
    reader = open_shard_reader(LocalStore(tmp_path), entries[-1], SPEC)
    assert reader.read(receipts[-1]).shape == (0, 2, 48)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_no_sample_no_shard(tmp_path: Path, shard_format: str) -> None:
    assert write(tmp_path, {}, shard_format=shard_format) == ([], [])
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize("shard_format", FORMATS)
def test_memory_does_not_grow_with_the_shard(tmp_path: Path, shard_format: str) -> None:
    states_TLH = model_like(StateSpec((0, 1), 512), 256, 0)  # 0.5 MB
    target = ShardTarget(str(tmp_path), "w1", 0, 0, StateSpec((0, 1), 512), shard_format, "planes-zstd")
    with open_shard_writer(target) as writer:
        writer.add(SampleKey(0, 0, 0), states_TLH)
        tracemalloc.start()
        for i in range(1, 40):
            writer.add(SampleKey(i, 0, 0), states_TLH)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 6 * states_TLH.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_codec_none_is_read_by_any_safetensors_reader(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file

    spec = StateSpec((2, 15), 48, dtype)
    samples = {SampleKey(i, 1, 2): model_like(spec, 3 + i, i) for i in range(3)}
    _, (entry,) = write(tmp_path, samples, spec, codec="none")
    loaded = load_file(tmp_path / entry.path)
    assert list(loaded) == [key.name for key in samples]
    for key, states_TLH in samples.items():
        tensor = loaded[key.name]
        assert tensor.dtype == getattr(torch, dtype)
        np.testing.assert_array_equal(tensor.view(torch.uint8).numpy(), states_TLH.view(np.uint8))


def test_a_safetensors_shard_says_what_it_holds(tmp_path: Path) -> None:
    samples = {SampleKey(5, 0, 0): model_like(SPEC, 4, 0)}
    (receipt,), (entry,) = write(tmp_path, samples)
    with safetensors.safe_open(tmp_path / entry.path, "np") as file:
        assert file.metadata() == {
            "headrace.shard_version": "1",
            "headrace.codec": "planes-zstd",
            "headrace.dtype": "bfloat16",
            "headrace.layer_ids": "2,15",
            "headrace.hidden_size": "48",
        }
        frame = file.get_tensor("r5.t0.n0")
    assert frame.dtype == np.uint8
    assert frame.nbytes == receipt.nbytes
    header_bytes = int.from_bytes((tmp_path / entry.path).read_bytes()[:8], "little")
    assert (8 + header_bytes) % 64 == 0


@pytest.mark.parametrize("codec", CODECS)
def test_a_parquet_shard_is_read_by_any_parquet_reader(tmp_path: Path, codec: str) -> None:
    samples = {SampleKey(i, 1, i % 2): model_like(SPEC, 3 + i, i) for i in range(3)}
    receipts, (entry,) = write(tmp_path, samples, shard_format="parquet", codec=codec)
    file = pq.ParquetFile(tmp_path / entry.path)
    assert file.num_row_groups == 3
    assert file.schema_arrow.metadata[b"headrace.codec"] == codec.encode()
    for group, (receipt, states_TLH) in enumerate(zip(receipts, samples.values(), strict=True)):
        (row,) = file.read_row_group(group).to_pylist()
        assert SampleKey(row["row"], row["turn"], row["n"]) == receipt.key
        assert (row["rows"], row["checksum"]) == (receipt.rows, receipt.checksum)
        np.testing.assert_array_equal(decode(row["states"], row["rows"], SPEC, codec), states_TLH)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_codec_none_on_a_local_disk_is_mapped_not_copied(tmp_path: Path, shard_format: str) -> None:
    samples = {SampleKey(i, 0, 0): model_like(SPEC, 50, i) for i in range(2)}
    receipts, (entry,) = write(tmp_path, samples, shard_format=shard_format, codec="none")
    reader = open_shard_reader(LocalStore(tmp_path), entry, SPEC)
    first, again = reader.read(receipts[1]), reader.read(receipts[1])
    assert np.shares_memory(first, again)
    assert not first.flags.writeable
    assert not first.flags.owndata
    del reader, again
    np.testing.assert_array_equal(first, samples[SampleKey(1, 0, 0)])


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    target = ShardTarget(str(tmp_path), "w1", 3, 0, SPEC)
    for bad, message in (
        (replace(target, shard_format="arrow"), r"'arrow' is not one of \['parquet', 'safetensors'\]"),
        (replace(target, codec="lz4"), "'lz4'"),
        (replace(target, target_bytes=0), "target_bytes 0"),
    ):
        with pytest.raises(ValueError, match=message):
            open_shard_writer(bad)
    writer = open_shard_writer(target)
    key = SampleKey(0, 0, 0)
    receipt = writer.add(key, model_like(SPEC, 5, 0))
    with pytest.raises(ValueError, match="row 0 turn 0 n 0: is in the shards of unit 3 already"):
        writer.add(key, model_like(SPEC, 5, 0))
    with pytest.raises(ValueError, match=r"\[5, 2, 48\]"):
        writer.add(SampleKey(1, 0, 0), model_like(SPEC, 5, 0).view(np.int16))
    # Neither harmed what was there.
    (entry,) = writer.close()
    assert entry.num_samples == 1
    with pytest.raises(RuntimeError, match="closed"):
        writer.add(SampleKey(2, 0, 0), model_like(SPEC, 5, 0))
    with pytest.raises(RuntimeError, match="closed"):
        writer.close()
    reader = open_shard_reader(LocalStore(tmp_path), entry, SPEC)
    with pytest.raises(ValueError, match="is in elsewhere, not in shards/"):
        reader.read(replace(receipt, shard="elsewhere"))
    with pytest.raises(ValueError, match="kind 'samples'"):
        open_shard_reader(LocalStore(tmp_path), replace(entry, kind="samples"), SPEC)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_abort_leaves_nothing_behind(tmp_path: Path, shard_format: str) -> None:
    class Boom(Exception):
        pass

    target = ShardTarget(str(tmp_path), "w1", 3, 0, SPEC, shard_format, target_bytes=1)
    with pytest.raises(Boom), open_shard_writer(target) as writer:  # noqa: PT012
        for i in range(3):
            writer.add(SampleKey(i, 0, 0), model_like(SPEC, 5, i))
        raise Boom
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_abort_after_close_keeps_the_shards(tmp_path: Path) -> None:
    writer = open_shard_writer(ShardTarget(str(tmp_path), "w1", 3, 0, SPEC))
    writer.add(SampleKey(0, 0, 0), model_like(SPEC, 5, 0))
    (entry,) = writer.close()
    writer.abort()
    assert (tmp_path / entry.path).stat().st_size == entry.size


NOT_FINITE = {
    "bfloat16": [0x7F80, 0xFF80, 0x7F81, 0xFFFF],
    "float16": [0x7C00, 0xFC00, 0x7C01, 0xFFFF],
    "float32": [0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF],
}
LARGEST = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7FFFFF}


@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_rows_are_found_by_layer(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.shards.check._BLOCK_ELEMENTS", 300)  # blocks of 3 rows
    spec = StateSpec((2, 15), 48, dtype)
    good_TLH = model_like(spec, 20, 0)
    good_TLH[3, 0, :] = 0
    good_TLH[3, 0, 47] = 1  # the smallest subnormal is no zero
    good_TLH[4, 1, 5] = LARGEST[dtype]
    assert find_bad_rows(good_TLH, spec) == []
    for pattern in NOT_FINITE[dtype]:
        bad_TLH = good_TLH.copy()
        bad_TLH[7, 0, 47] = pattern
        bad_TLH[19, 0, 0] = pattern
        (found,) = find_bad_rows(bad_TLH, spec)
        assert (found.layer_id, found.kind, found.rows) == (2, "nan_or_inf", (7, 19))
    bad_TLH = good_TLH.copy()
    bad_TLH[0, 1] = 0
    bad_TLH[0, 1, ::2] = 1 << (8 * spec.np_dtype.itemsize - 1)  # negative zeros
    (found,) = find_bad_rows(bad_TLH, spec)
    assert str(found) == "layer 15: 1 rows all zero (row 0)"
    assert find_bad_rows(good_TLH[:0], spec) == []


def test_entries_are_json_able(tmp_path: Path) -> None:
    _, (entry,) = write(tmp_path, {SampleKey(0, 0, 0): model_like(SPEC, 5, 0)})
    assert FileEntry.from_json(json.loads(json.dumps(entry.to_json()))) == entry


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shard_format", FORMATS)
def test_samples_encoded_ahead_make_the_same_shard(tmp_path: Path, shard_format: str, codec: str) -> None:
    samples = {SampleKey(row, 0, 0): model_like(SPEC, 5 + row, row) for row in range(4)}
    receipts, entries = write(tmp_path / "a", samples, SPEC, shard_format, codec, 1 << 30)
    target = ShardTarget(str(tmp_path / "b"), "w1", 12, 0, SPEC, shard_format, codec, 1 << 30)
    with open_shard_writer(target) as writer:
        encoded = {key: encode_sample(states_TLH, SPEC, codec) for key, states_TLH in samples.items()}
        assert [writer.add_encoded(key, sample) for key, sample in encoded.items()] == receipts
        with pytest.raises(ValueError, match="is in the shards of unit 12 already"):
            writer.add_encoded(receipts[0].key, encoded[receipts[0].key])
        assert writer.close() == entries
    with pytest.raises(ValueError, match=r"expected uint16 .* \[rows, 2, 48\]"):
        encode_sample(np.zeros((3, 2, 47), np.uint16), SPEC, codec)
