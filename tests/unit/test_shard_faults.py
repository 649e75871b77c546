"""Shards that are not what was written, disks that refuse: an error that names file and sample, and no leftovers."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_samples import model_like
from storage_helpers import disk_of

from storage.codec import CODECS
from storage.digest import file_digest
from storage.errors import DamagedError, StoreError
from storage.shards import SHARD_FORMATS, open_shard_reader, open_shard_writer
from storage.store_local import LocalStore
from storage.types import FileEntry, Receipt, SampleKey, ShardTarget, StateSpec

FORMATS = sorted(SHARD_FORMATS)
SPEC = StateSpec((2, 15), 16)
SAMPLES = {SampleKey(i, 0, 0): model_like(SPEC, 6 + i, i) for i in range(3)}


class UnmappedStore(LocalStore):
    """A local store whose files cannot be mapped, so that readers take ranges as from a bucket."""

    def local_path(self, path: str) -> Path | None:
        return None


def target(root: Path, shard_format: str, codec: str, attempt: int = 0, target_bytes: int = 1 << 30) -> ShardTarget:
    return ShardTarget(str(root), "w1", 4, attempt, SPEC, shard_format, codec, target_bytes)


def write(root: Path, shard_format: str, codec: str, attempt: int = 0) -> tuple[list[Receipt], FileEntry]:
    with open_shard_writer(target(root, shard_format, codec, attempt)) as writer:
        receipts = [writer.add(key, states_TLH) for key, states_TLH in SAMPLES.items()]
        (entry,) = writer.close()
    return receipts, entry


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def _poke(path: Path, position: int, value: int) -> None:
    # In place: ext4 syncs a file that is truncated and written anew, which takes milliseconds.
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([value]))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shard_format", FORMATS)
def test_any_flipped_byte_is_noticed(tmp_path: Path, shard_format: str, codec: str) -> None:
    """Every byte of the file, one at a time: the sample it belongs to is refused by name and no other one is touched.

    A byte outside every sample does not reach a reader that goes by receipts; the file's digest tells.
    """
    receipts, entry = write(tmp_path, shard_format, codec)
    path = tmp_path / entry.path
    stored = path.read_bytes()
    holders = {p: r for r in receipts for p in range(r.offset, r.offset + r.nbytes)}
    harmless = []
    for position in range(len(stored)):
        holder = holders.get(position)
        if holder is None and position % 13:
            continue  # mostly the blank rest of the header
        _poke(path, position, stored[position] ^ 1 << (position % 8))
        assert file_digest(path) != entry.digest
        reader = open_shard_reader(UnmappedStore(tmp_path), entry, SPEC)
        if holder is None:
            np.testing.assert_array_equal(reader.read(receipts[-1]), SAMPLES[receipts[-1].key])
        else:
            try:
                states_TLH = reader.read(holder)
            except DamagedError as error:
                if not str(error).startswith(f"{entry.path}: sample {holder.key}: "):
                    raise
            else:
                np.testing.assert_array_equal(states_TLH, SAMPLES[holder.key])
                harmless.append(position)
        _poke(path, position, stored[position])
    # Redundant bits of a zstd frame change nothing of a sample; there are few of them, and none in raw states.
    assert len(harmless) <= (0 if codec == "none" else len(holders) // 100)


@pytest.mark.parametrize("store_type", [LocalStore, UnmappedStore])
@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_truncated_or_grown_file_is_refused(tmp_path: Path, shard_format: str, store_type: type[LocalStore]) -> None:
    _, entry = write(tmp_path, shard_format, "none")
    path = tmp_path / entry.path
    stored = path.read_bytes()
    for length in (0, 1, len(stored) // 2, len(stored) - 1, len(stored) + 1):
        path.write_bytes((stored + b"\0")[:length])
        with pytest.raises(DamagedError, match=rf"{entry.path}: has {length} bytes, the manifest says {entry.size}"):
            open_shard_reader(store_type(tmp_path), entry, SPEC)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shard_format", FORMATS)
def test_missing_renamed_and_swapped_files_are_refused(tmp_path: Path, shard_format: str, codec: str) -> None:
    receipts, entry = write(tmp_path, shard_format, codec)
    # Another shard of the same size whose samples hold other states.
    with open_shard_writer(target(tmp_path, shard_format, "none", attempt=1)) as writer:
        others = {key: states_TLH ^ np.uint16(1) for key, states_TLH in SAMPLES.items()}
        other_receipts = [writer.add(key, states_TLH) for key, states_TLH in others.items()]
        (other,) = writer.close()
    store = LocalStore(tmp_path)
    path, other_path = tmp_path / entry.path, tmp_path / other.path
    if codec == "none":
        assert [r.offset for r in receipts] == [r.offset for r in other_receipts]
        aside = path.rename(tmp_path / "aside")
        other_path.rename(path)
        aside.rename(other_path)
        reader = open_shard_reader(store, entry, SPEC)
        for receipt in receipts:
            with pytest.raises(DamagedError, match=rf"{entry.path}: sample {receipt.key}: .*checksum"):
                reader.read(receipt)
        assert file_digest(path) == other.digest != entry.digest
    else:
        other_path.rename(path)
        with pytest.raises(DamagedError, match=entry.path):
            open_shard_reader(store, entry, SPEC)
        path.unlink()
    other_path.unlink(missing_ok=True)
    for store_type in (LocalStore, UnmappedStore):
        with pytest.raises(FileNotFoundError, match=Path(other.path).name):
            open_shard_reader(store_type(tmp_path), other, SPEC)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_receipt_of_another_sample_is_refused(tmp_path: Path, shard_format: str, codec: str) -> None:
    receipts, entry = write(tmp_path, shard_format, codec)
    reader = open_shard_reader(LocalStore(tmp_path), entry, SPEC)
    first, second, _ = receipts
    wrong = [
        replace(first, offset=second.offset, nbytes=second.nbytes),
        replace(first, offset=second.offset, nbytes=second.nbytes, rows=second.rows),
        replace(first, offset=first.offset + 2),
        replace(first, nbytes=first.nbytes - 2),
        replace(first, rows=first.rows + 1),
        replace(first, rows=1 << 40),
        replace(first, rows=-1),
        replace(first, offset=-first.nbytes),
        replace(first, nbytes=-1),
        replace(first, offset=entry.size - 1),
        replace(first, offset=1 << 60, nbytes=1 << 60),
        replace(first, checksum=second.checksum),
        replace(first, checksum=""),
    ]
    for receipt in wrong:
        with pytest.raises(DamagedError, match=rf"{entry.path}: sample {first.key}"):
            reader.read(receipt)


def test_a_manifest_that_points_outside_is_refused(tmp_path: Path) -> None:
    _, entry = write(tmp_path / "data", "safetensors", "none")
    outside = (tmp_path / "data" / entry.path).rename(tmp_path / "outside.safetensors")
    for path in ("../outside.safetensors", str(outside), "shards/../../outside.safetensors"):
        with pytest.raises(ValueError, match="does not name a file inside the data set"):
            open_shard_reader(LocalStore(tmp_path / "data"), replace(entry, path=path), SPEC)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shard_format", FORMATS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_a_full_disk_loses_nothing_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, shard_format: str, codec: str, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("full")
    receipts, entry = write(root, shard_format, codec)
    before = {path: path.read_bytes() for path in files(root)}
    with pytest.raises(StoreError) as caught, disk_of(data.draw(st.integers(0, entry.size - 1))):
        write(root, shard_format, codec, attempt=1)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
    assert "shards/u00000004-a1-ww1-00000" in str(caught.value)
    # The committed shard is untouched, nothing of the failed one is there, and the next attempt succeeds.
    assert {path: path.read_bytes() for path in files(root)} == before
    _, again = write(root, shard_format, codec, attempt=2)
    assert again.size == entry.size
    reader = open_shard_reader(LocalStore(root), entry, SPEC)
    np.testing.assert_array_equal(reader.read(receipts[0]), SAMPLES[receipts[0].key])


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_writer_whose_disk_was_full_writes_no_more(tmp_path: Path, shard_format: str) -> None:
    """The space may be back at the next sample, but the shard has a hole by then."""
    writer = open_shard_writer(target(tmp_path, shard_format, "none"))
    keys = list(SAMPLES)
    writer.add(keys[0], SAMPLES[keys[0]])
    with pytest.raises(StoreError, match=f"sample {keys[1]}"), disk_of(10):
        writer.add(keys[1], SAMPLES[keys[1]])
    with pytest.raises(RuntimeError, match="unit 4: the shard writer is failed"):
        writer.add(keys[2], SAMPLES[keys[2]])
    with pytest.raises(RuntimeError, match="failed"):
        writer.close()
    writer.abort()
    assert files(tmp_path) == []


def test_an_attempt_that_was_used_before_is_refused(tmp_path: Path) -> None:
    receipts, entry = write(tmp_path, "safetensors", "none")
    with pytest.raises(StoreError, match="another number"):
        write(tmp_path, "safetensors", "none")
    reader = open_shard_reader(LocalStore(tmp_path), entry, SPEC)
    np.testing.assert_array_equal(reader.read(receipts[0]), SAMPLES[receipts[0].key])
    assert files(tmp_path) == [tmp_path / entry.path]


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_failure_while_publishing_is_reported_by_close(tmp_path: Path, shard_format: str) -> None:
    """Publishing runs in a thread; the directory of the shards vanishes (here: is a file) in the meantime."""
    (tmp_path / "shards").write_bytes(b"")
    writer = open_shard_writer(target(tmp_path, shard_format, "none"))
    for key, states_TLH in SAMPLES.items():
        writer.add(key, states_TLH)
    with pytest.raises(StoreError, match="the shard could not be published"):
        writer.close()
    writer.abort()
    assert files(tmp_path) == [tmp_path / "shards"]
