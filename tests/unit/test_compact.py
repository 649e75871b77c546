"""compact changes files and nothing else; purge removes the bytes of deleted samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_helpers import SPEC, create, files_below, identity, keys_of, plan, states, write_real

from storage import Dataset, FencedError, SampleKey, Snapshot, UnitPlan
from storage.compact import compact
from storage.compact_plan import plan_groups
from storage.shards import open_shard_reader
from storage.shards.parquet_file import ParquetFile
from storage.shards.safetensors_file import SafetensorsFile
from storage.verify import verify
from storage.verify_deep import receipts_of

MOVED = ["shard", "offset", "nbytes"]  # what compaction may change in a sample's row


def content(snapshot: Snapshot) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Everything a reader sees but where it lies."""
    samples = snapshot.samples()
    columns = [name for name in samples.column_names if name not in MOVED]
    order = [(name, "ascending") for name in ("row", "turn", "n")]
    return samples.select(columns).sort_by(order).to_pylist(), snapshot.rejects().sort_by(order).to_pylist()


def check_states(snapshot: Snapshot) -> None:
    """Every visible sample's states are those that were written."""
    for _, receipt in receipts_of(snapshot.samples()):
        entry = snapshot.shard_entry(receipt.shard)
        got = open_shard_reader(snapshot.dataset.store, entry, SPEC).read(receipt)
        np.testing.assert_array_equal(got, states(receipt.key, receipt.rows))


def filled(directory: Path, num_units: int = 6, target_bytes: int = 1 << 14, **options: object) -> Dataset:
    dataset = create(directory, num_units)
    writer = dataset.writer()
    for unit in range(num_units):
        rejected = keys_of(dataset, unit)[:1] if unit % 2 else []
        writer.commit([write_real(writer, unit, 0, rejected, target_bytes=target_bytes, **options)], {})
    return dataset


@pytest.mark.parametrize(("shard_format", "codec"), [("safetensors", "planes-zstd"), ("parquet", "none")])
def test_small_files_are_merged(tmp_path: Path, shard_format: str, codec: str) -> None:
    dataset = filled(tmp_path, shard_format=shard_format, codec=codec)
    before = dataset.snapshot()
    expected, accounting = content(before), before.accounting()
    result = compact(dataset, target_bytes=1 << 20)
    after = dataset.snapshot()
    assert content(after) == expected
    assert after.accounting() == accounting
    check_states(after)
    by_kind = {kind: [f for f in after.files() if f.kind == kind] for kind in ("shard", "samples", "rejects")}
    assert {kind: len(files) for kind, files in by_kind.items()} == {"shard": 1, "samples": 1, "rejects": 1}
    shard = by_kind["shard"][0]
    assert (shard.units, shard.unit) == ((0, 1, 2, 3, 4, 5), None)
    assert (shard.shard_format, shard.codec) == (shard_format, codec)
    assert by_kind["rejects"][0].units == (1, 3, 5)
    assert (result.groups, result.units, result.files_before, result.files_after) == (1, 6, 15, 3)
    assert verify(tmp_path, deep=True).is_sound
    assert compact(dataset, target_bytes=1 << 20).groups == 0  # nothing left to gain
    assert dataset.snapshot().version == after.version


def test_readers_of_older_snapshots_go_on(tmp_path: Path) -> None:
    dataset = filled(tmp_path)
    old = dataset.snapshot()
    expected = content(old)
    compact(dataset, target_bytes=1 << 20)
    for snapshot in (old, Dataset.open(tmp_path).snapshot(old.version)):
        assert content(snapshot) == expected
        check_states(snapshot)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    dataset = filled(tmp_path)
    before = list(files_below(tmp_path))
    assert compact(dataset, target_bytes=1 << 20, dry_run=True).groups == 1
    assert list(files_below(tmp_path)) == before


def test_large_shards_stay_where_they_are(tmp_path: Path) -> None:
    dataset = filled(tmp_path)
    shards = {f.path for f in dataset.snapshot().files() if f.kind == "shard"}
    compact(dataset, target_bytes=100)
    snapshot = dataset.snapshot()
    assert {f.path for f in snapshot.files() if f.kind == "shard"} == shards
    assert sum(f.kind == "samples" for f in snapshot.files()) == 1
    check_states(snapshot)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_deletes_expiries_and_compactions_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("mixed")
    dataset = filled(root, 4)
    alive = set(range(4))
    deleted: set[SampleKey] = set()
    for _ in range(data.draw(st.integers(1, 5))):
        action = data.draw(st.sampled_from(["delete", "expire", "compact", "purge"]))
        if action == "delete":
            keys = [
                SampleKey(*k)
                for k in zip(*dataset.snapshot().samples().select([0, 1, 2]).to_pydict().values(), strict=True)
            ]
            if keys:
                chosen = data.draw(st.sets(st.sampled_from(keys), max_size=3))
                dataset.delete(chosen)
                deleted |= chosen
        elif action == "expire":
            if alive:
                unit = data.draw(st.sampled_from(sorted(alive)))
                dataset.expire([unit])
                alive.discard(unit)
        else:
            compact(dataset, target_bytes=data.draw(st.sampled_from([500, 1 << 20])), purge=action == "purge")
        snapshot = Dataset.open(root).snapshot()
        rejected = {keys_of(dataset, unit)[0] for unit in range(4) if unit % 2}
        expected = {key for unit in alive for key in keys_of(dataset, unit)} - deleted - rejected
        found = snapshot.samples(columns=["row"])["row"].to_pylist()
        assert sorted(found) == sorted(key.row for key in expected)
        assert snapshot.accounting().balances
        assert snapshot.accounting().samples == len(expected)
        check_states(snapshot)
        report = verify(root, deep=True)
        assert report.is_sound, report.errors


def limit_room(patch: pytest.MonkeyPatch, room: int) -> None:
    """So many samples close a shard far below its target, as the header of a real safetensors file does."""
    for kind in (SafetensorsFile, ParquetFile):
        append = kind.append

        def counted(self, *arguments, append=append):  # type: ignore[no-untyped-def]
            self.num_appended += 1
            return append(self, *arguments)

        patch.setattr(kind, "num_appended", 0, raising=False)
        patch.setattr(kind, "append", counted)
        patch.setattr(kind, "has_room", lambda self, *_: self.num_appended < room)


UNIT_SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(UNIT_SIZES, min_size=1, max_size=4),
    st.sampled_from([("safetensors", "planes-zstd"), ("safetensors", "none"), ("parquet", "none")]),
    st.sampled_from([5_000, 12_000, 1 << 16]),
    st.integers(1, 6),
    st.sampled_from([600, 8_000, 1 << 16]),
    st.booleans(),
    st.data(),
)
def test_a_second_run_finds_nothing_to_do(
    tmp_path_factory: pytest.TempPathFactory,
    commits: list[list[int]],
    stored: tuple[str, str],
    target_bytes: int,
    room: int,
    first_target_bytes: int,
    purge: bool,
    data: st.DataObject,
) -> None:
    """Whatever the sizes of units and shards, and however few samples the shard format has room for."""
    shard_format, codec = stored
    root = tmp_path_factory.mktemp("settled")
    rows = [count for commit in commits for count in commit]
    starts = [sum(rows[:unit]) for unit in range(len(rows))]
    units = [UnitPlan(u, s, n, n) for u, (s, n) in enumerate(zip(starts, rows, strict=True))]
    dataset = Dataset.create(root, identity(), units)
    with pytest.MonkeyPatch.context() as patch:
        limit_room(patch, room)
        writer, unit = dataset.writer(), 0
        for commit in commits:
            files = []
            for _ in commit:
                options = {"shard_format": shard_format, "codec": codec, "target_bytes": first_target_bytes}
                files.append(write_real(writer, unit, 0, [], **options))
                unit += 1
            writer.commit(files, {})
        keys = [SampleKey(row, 0, 0) for row in range(sum(rows))]
        deleted = data.draw(st.sets(st.sampled_from(keys), max_size=3))
        dataset.delete(deleted)
        expected = content(dataset.snapshot())
        compact(dataset, target_bytes, purge)
        after = dataset.snapshot()
        again = compact(dataset, target_bytes, purge)
    assert (again.groups, again.units, again.removed_files) == (0, 0, 0)
    assert dataset.snapshot().version == after.version
    assert content(after) == expected
    check_states(after)
    assert after.accounting().samples == len(keys) - len(deleted)
    assert sum(f.kind == "samples" for f in after.files()) == 1
    assert len(plan_groups(after, target_bytes, purge)) == 0
    assert verify(root, deep=True).is_sound
    assert all(f.full_at in (0, target_bytes) for f in Dataset.open(root).snapshot().files())


def test_a_larger_target_opens_full_shards_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_room(monkeypatch, 8)
    dataset = create(tmp_path, 2, 20)
    writer = dataset.writer()
    for unit in range(2):
        writer.commit([write_real(writer, unit)], {})

    def shards() -> list[tuple[int, int]]:
        return [(f.num_samples, f.full_at) for f in dataset.snapshot().files() if f.kind == "shard"]

    assert shards() == [(8, 0), (8, 0), (4, 0)] * 2
    for target_bytes in (1 << 20, 1 << 21):
        assert compact(dataset, target_bytes).groups == 1
        assert shards() == [(8, target_bytes)] * 4 + [(8, 0)]
        for other in (target_bytes, 1 << 19):
            assert compact(dataset, other).groups == 0
    check_states(dataset.snapshot())


def stored_bytes(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in files_below(directory))


def test_purge_removes_the_bytes_of_deleted_samples(tmp_path: Path) -> None:
    dataset = filled(tmp_path, codec="none")
    victim = SampleKey(5, 0, 0)
    secret = states(victim, 2).tobytes()
    old = dataset.snapshot()
    dataset.delete([victim])
    assert secret in stored_bytes(tmp_path)
    compact(dataset, target_bytes=1 << 20)
    assert secret in stored_bytes(tmp_path)  # merging alone keeps it
    result = compact(dataset, target_bytes=1 << 20, purge=True)
    assert result.purged_samples == 1
    # What the first, plain compaction replaced is kept for readers, but not when it held what was purged.
    assert secret not in stored_bytes(tmp_path)
    snapshot = dataset.snapshot()
    assert (snapshot.accounting().deleted, snapshot.accounting().samples) == (1, 14)
    assert snapshot.tombstones[victim].purged_at == snapshot.version
    check_states(snapshot)
    assert verify(tmp_path, deep=True).is_sound
    assert compact(dataset, target_bytes=1 << 20, purge=True).groups == 0
    with pytest.raises(ValueError, match="can no longer be read in full"):
        old.samples(units=[1])


def test_a_group_that_changes_meanwhile_is_left_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = filled(tmp_path)
    import storage.compact as module

    write = module._write_shards

    def expire_meanwhile(*args: object) -> object:
        Dataset.open(tmp_path).expire([2])
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_write_shards", expire_meanwhile)
    result = compact(dataset, target_bytes=1 << 20)
    assert result.skipped == ["units 0 to 5 changed while they were rewritten"]
    assert len(dataset.snapshot().files()) == 13 - 0  # unit 2's two files are gone, nothing else changed
    monkeypatch.undo()
    assert compact(dataset, target_bytes=1 << 20).skipped == []
    assert verify(tmp_path, deep=True).is_sound


def test_a_group_whose_files_gc_took_is_left_for_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = filled(tmp_path)
    import storage.compact as module

    write = module._write_shards

    def collect_meanwhile(*args: object) -> object:
        other = Dataset.open(tmp_path)
        other.expire([2])
        for path in other.manifest().retired():
            other.store.delete(path)
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_write_shards", collect_meanwhile)
    assert compact(dataset, target_bytes=1 << 20).skipped == ["units 0 to 5 changed while they were rewritten"]
    monkeypatch.undo()
    next(path for path in (tmp_path / "shards").iterdir() if path.name.startswith("u00000003")).unlink()
    with pytest.raises(FileNotFoundError, match="u00000003"):  # damage is no change
        compact(dataset, target_bytes=1 << 20)


def test_more_shards_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import storage.compact as module

    monkeypatch.setattr(module, "OPEN_SHARDS", 1)
    dataset = filled(tmp_path, target_bytes=1)  # one sample a shard
    assert compact(dataset, target_bytes=1 << 20).files_after == 3
    check_states(dataset.snapshot())


def test_rows_come_in_order_of_unit_from_merged_files(tmp_path: Path) -> None:
    dataset = create(tmp_path, 3)
    writer = dataset.writer()
    writer.commit([write_real(writer, unit) for unit in (0, 2)], {})
    compact(dataset, target_bytes=1 << 20)
    writer.commit([write_real(writer, 1)], {})  # between two that lie in one file
    table = dataset.snapshot().samples(["unit", "row"])
    assert table["unit"].to_pylist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert table["row"].to_pylist() == list(range(9))


def test_a_damaged_index_does_not_stop_a_purge(tmp_path: Path) -> None:
    from storage.sample_table import update_index

    dataset = filled(tmp_path)
    (index,) = update_index(dataset.snapshot())
    (tmp_path / index).write_bytes(b"damaged")
    dataset.delete([SampleKey(5, 0, 0)])
    assert compact(dataset, target_bytes=1 << 20, purge=True).purged_samples == 1
    assert not (tmp_path / index).exists()
    assert verify(tmp_path, deep=True).is_sound


def test_a_fenced_compaction_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = filled(tmp_path)
    import storage.compact as module

    write = module.write_table_file

    def fence_meanwhile(store: object, path: str, *args: object) -> object:
        Dataset.open(tmp_path).fence([path.split("-w")[1].split("-")[0]])
        return write(store, path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "write_table_file", fence_meanwhile)
    with pytest.raises(FencedError, match="writer compact_"):
        compact(dataset, target_bytes=1 << 20)
    assert len(dataset.snapshot().files()) == 15


def test_groups_hold_neighbouring_units_up_to_the_target(tmp_path: Path) -> None:
    dataset = filled(tmp_path, 6)
    snapshot = dataset.snapshot()
    sizes = {file.unit: file.size for file in snapshot.files() if file.kind == "shard"}
    target_bytes = int(max(sizes.values()) * 2.1)
    groups = plan_groups(snapshot, target_bytes, purge=False)
    assert plan_groups(snapshot, target_bytes, purge=False) == groups
    assert [unit.unit for unit in plan(6)] == [unit for group in groups for unit in group.units]
    held = [sum(sizes[unit] for unit in group.units) for group in groups]
    assert len(groups) > 1
    assert all(num_bytes <= 1.25 * target_bytes for num_bytes in held)
    for num_bytes, following in zip(held, groups[1:], strict=False):  # none had room for one unit more
        assert num_bytes + sizes[following.units[0]] > 1.25 * target_bytes
