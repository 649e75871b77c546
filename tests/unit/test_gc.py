"""gc removes what can never become visible, fences first, and touches nothing else."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_server import BUCKET, S3Server, s3_server
from storage_helpers import create, write_opaque, write_real

from storage import Dataset, FencedError, SampleKey, Snapshot, Store, checkpoint, sample_table
from storage.compact import compact
from storage.gc import DAY_S, collect
from storage.sample_table import update_index
from storage.verify import verify


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


def age(directory: Path, days: float = 2.0) -> None:
    """Makes every file below look untouched for so long."""
    moment = time.time() - days * DAY_S
    for path in directory.rglob("*"):
        if path.is_file():
            os.utime(path, (moment, moment))


def names(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def data_files(directory: Path) -> set[str]:
    return {name for name in names(directory) if not name.startswith("log/")}


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    write_opaque(dataset.writer("dead"), 0)
    age(tmp_path)
    before = names(tmp_path)
    found = collect(dataset)
    assert not found.applied
    assert {removal.reason for removal in found.removals} == {"orphan"}
    assert found.fenced == ["dead"]
    assert found.num_bytes == sum((tmp_path / removal.path).stat().st_size for removal in found.removals) > 0
    assert names(tmp_path) == before
    assert dataset.snapshot().version == 0


def test_orphans_of_a_dead_writer_go_after_its_fence(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    alive, sleeper = dataset.writer("alive"), dataset.writer("sleeper")
    alive.commit([write_opaque(alive, 0)], {})
    kept = data_files(tmp_path)
    files = write_opaque(sleeper, 1)
    staged = dataset.store.staging_file(sleeper.shard_target(2, 0).shard_path(0, "safetensors"))
    staged.write_bytes(b"half a shard")
    (tmp_path / "staging/put-1-aa").write_bytes(b"half an entry")
    age(tmp_path)
    seen: list[str] = []
    found = collect(dataset, apply=True, on_removed=lambda removal: seen.append(removal.path))
    assert found.applied
    assert found.fenced == ["sleeper"]
    assert len(seen) == len(found.removals) == len(files.files) + 2
    assert data_files(tmp_path) == kept
    assert dataset.manifest().fenced == {"sleeper": 2}
    with pytest.raises(FencedError, match="sleeper was fenced at version 2"):
        sleeper.commit([files], {})
    assert verify(tmp_path).findings == []
    # A later run makes the unit again.
    again = dataset.writer()
    again.commit([write_opaque(again, 1)], {})
    assert collect(dataset, apply=True).removals == []


def test_writers_at_work_are_left_alone(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    young, busy = dataset.writer("young"), dataset.writer("busy")
    of_young = write_opaque(young, 0)
    of_busy = write_opaque(busy, 1)
    age(tmp_path)
    write_opaque(young, 0, 1)  # an old file and a new one
    busy.commit([write_opaque(busy, 2)], {})  # old files only, and a commit just now
    for path in tmp_path.glob("*/u00000002-*"):
        os.utime(path, (0, 0))
    found = collect(dataset, apply=True)
    assert (found.fenced, found.removals, found.active) == ([], [], ["busy", "young"])
    assert dataset.writer().commit([of_young, of_busy], {}).accepted == [0, 1]


def test_old_attempts_at_visible_units_go_without_a_fence(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    writer = dataset.writer("busy")
    lost = write_opaque(writer, 0, 0)
    age(tmp_path)
    writer.commit([write_opaque(writer, 0, 1)], {})
    found = collect(dataset, apply=True)
    assert found.fenced == []
    assert {removal.path for removal in found.removals} == {file.path for file in lost.files}
    writer.commit([write_opaque(writer, 1)], {})  # still allowed to
    assert verify(tmp_path).findings == []


def test_expired_files_go_at_once_and_replaced_ones_after_their_time(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    writer = dataset.writer()
    for unit in range(3):
        writer.commit([write_real(writer, unit, target_bytes=4096)], {})
    old = {file.path for file in dataset.snapshot().files()}
    dataset.expire([2])
    compact(dataset, target_bytes=1 << 20)
    old_snapshot = dataset.snapshot(3)
    first = collect(dataset, apply=True)
    assert {removal.reason for removal in first.removals} == {"expired"}
    assert {file.unit for file in old_snapshot.files()} == {0, 1, 2}
    assert first.kept_for_readers == len(old) - len(first.removals)
    assert old_snapshot.samples(units=[0, 1]).num_rows == 6
    second = collect(dataset, apply=True, keep_superseded_s=0)
    assert {removal.reason for removal in second.removals} == {"compacted"}
    assert not old & names(tmp_path)
    assert verify(tmp_path, deep=True).findings == []
    with pytest.raises(ValueError, match=r"compacted at version 5 and removed by gc since: version 3 .* no longer"):
        Dataset.open(tmp_path).snapshot(3).samples(units=[0])


def test_an_unfinished_compaction_is_fenced(tmp_path: Path) -> None:
    """Its files are named after visible units, yet it could still publish them: a fence comes first."""
    dataset = create(tmp_path)
    writer = dataset.writer()
    writer.commit([write_opaque(writer, 0)], {})
    dead = dataset.writer("compact_dead")
    write_opaque(dead, 0, 5)
    age(tmp_path)
    found = collect(dataset, apply=True)
    assert found.fenced == ["compact_dead"]
    assert verify(tmp_path).findings == []


def test_an_upload_of_the_head_that_was_never_recorded_is_fenced(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    path = "head/u00000000-a0-wsomebody-00000.safetensors"
    local = dataset.store.staging_file(path)
    local.write_bytes(b"head")
    dataset.store.put_file(path, local)
    writer = dataset.writer()
    writer.commit([write_opaque(writer, 0)], {})
    age(tmp_path)
    found = collect(dataset, apply=True)
    assert found.fenced == ["somebody"]
    assert [removal.path for removal in found.removals] == [path]


def test_foreign_files_and_derived_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "INTERVAL", 2)
    dataset = create(tmp_path)
    writer = dataset.writer()
    for unit in range(4):
        writer.commit([write_opaque(writer, unit)], {})
    (tmp_path / "README").write_text("mine")
    (tmp_path / "shards/notes.txt").write_text("mine too")
    damaged = tmp_path / checkpoint.checkpoint_path(2)
    damaged.write_bytes(b"rubbish")
    age(tmp_path)
    found = collect(Dataset.open(tmp_path), apply=True)
    assert found.foreign == ["README", "shards/notes.txt"]
    assert [(removal.reason, removal.path) for removal in found.removals] == [
        ("checkpoint", checkpoint.checkpoint_path(2))
    ]
    assert (tmp_path / "README").exists()
    assert not damaged.exists()


def test_an_index_goes_with_the_sample_files_it_covers(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    writer = dataset.writer()
    writer.commit([write_real(writer, unit) for unit in range(4)], {})
    old, _ = update_index(dataset.snapshot()), compact(dataset, target_bytes=1 << 20)  # which writes an index too
    assert not any(removal.reason == "index" for removal in collect(dataset, keep_superseded_s=0).removals)
    collect(dataset, apply=True, keep_superseded_s=0)
    assert [removal.path for removal in collect(dataset, apply=True).removals] == old
    assert dataset.snapshot().samples().num_rows == 12


@given(st.integers(1, 2000), st.integers(1, 40))
def test_thinned_checkpoints_are_few_and_never_far_apart(num_intervals: int, every: int) -> None:
    """A log that grows by one checkpoint at a time, with a gc every so often."""
    interval = checkpoint.INTERVAL
    stored: list[int] = []
    for number in range(1, num_intervals + 1):
        stored.append(number * interval)
        if number % every == 0 or number == num_intervals:
            gone = checkpoint.superfluous(stored)
            stored = [version for version in stored if version not in gone]
    newest = num_intervals * interval
    assert stored[-1] == newest
    assert checkpoint.superfluous(stored) == []
    assert len(stored) <= 5 + 4 * math.log2(num_intervals)
    for older, newer in itertools.pairwise([0, *stored]):
        # A version just before `newer` is folded from `older`.
        assert newer - older <= max(interval, (newest - older) // 2)


def test_derived_files_are_thinned_out_and_every_version_still_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "INTERVAL", 1)
    monkeypatch.setattr(sample_table, "MERGED_INDEXES", 3)
    dataset = create(tmp_path, 24)
    writer = dataset.writer()
    for unit in range(24):
        writer.commit([write_opaque(writer, unit)], {})
    expected = [Dataset.open(tmp_path).snapshot(version).samples().to_pylist() for version in range(25)]
    before = {name for name in names(tmp_path) if name.startswith("checkpoints/")}
    read: list[str] = []
    get = type(dataset.store).get

    def counted(store: Store, path: str) -> bytes:
        read.append(path)
        return get(store, path)

    dataset = Dataset.open(tmp_path)
    monkeypatch.setattr(type(dataset.store), "get", counted)
    found = collect(dataset, apply=True)
    monkeypatch.setattr(type(dataset.store), "get", get)
    after = {name for name in names(tmp_path) if name.startswith("checkpoints/")}
    assert before - after == {removal.path for removal in found.removals}
    assert {removal.reason for removal in found.removals} == {"checkpoint", "index"}
    checkpoints = sorted(name for name in after if name.endswith(".arrow"))
    indexes = after - set(checkpoints)
    assert len(checkpoints) < 12 < 24 == sum(name.endswith(".arrow") for name in before)
    assert len(indexes) < 8
    # What was thinned out by its name was not read.
    assert len({path for path in read if path.endswith(".arrow")}) == len(checkpoints)
    assert collect(dataset, apply=True).removals == []
    for version in range(25):
        snapshot = Dataset.open(tmp_path).snapshot(version)
        assert snapshot.samples().to_pylist() == expected[version]
        assert sample_table.load_narrow(snapshot, ["row"])["row"].to_pylist() == [
            row["row"] for row in expected[version]
        ]
    assert verify(tmp_path).findings == []
    monkeypatch.setattr(Snapshot, "read_file", lambda *_: pytest.fail("a sample file was opened"))
    assert len(sample_table.load_narrow(Dataset.open(tmp_path).snapshot(), ["row"])) == 72


def test_a_commit_between_the_look_and_the_removal_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that commits just before its fence keeps its files."""
    dataset = create(tmp_path)
    writer = Dataset.open(tmp_path).writer("sleeper")
    files = write_opaque(writer, 0)
    age(tmp_path)
    fence = Dataset.fence

    def commit_first(self: Dataset, writers: list[str]) -> int:
        writer.commit([files], {})
        return fence(self, writers)

    monkeypatch.setattr(Dataset, "fence", commit_first)
    found = collect(dataset, apply=True)
    assert found.removals == []
    assert verify(tmp_path, deep=False).findings == []
    assert Dataset.open(tmp_path).snapshot().samples().num_rows == 3


def test_s3_orphans_and_abandoned_uploads(server: S3Server) -> None:
    boto3 = pytest.importorskip("boto3")
    dataset = create(server.new_uri())
    write_opaque(dataset.writer("dead"), 0)
    client = boto3.client("s3")
    prefix = dataset.uri.removeprefix(f"s3://{BUCKET}/")
    for key in ("shards/x", "shards/x", "shards/y"):
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{key}")
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}-other/shards/z")
    # The files are young; this server says of every upload that it began in 2010.
    assert {removal.reason for removal in collect(dataset).removals} == {"upload"}
    found = collect(dataset, apply=True, older_than_s=-1)
    assert sorted(removal.reason for removal in found.removals) == ["orphan", "orphan", "upload", "upload", "upload"]
    assert found.fenced == ["dead"]
    left = client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [upload["Key"] for upload in left] == [f"{prefix}-other/shards/z"]
    assert verify(dataset.uri).findings == []


def test_deleted_samples_are_no_garbage_until_purged(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    writer = dataset.writer()
    writer.commit([write_opaque(writer, 0)], {})
    dataset.delete([SampleKey(0, 0, 0)])
    age(tmp_path, days=30)
    assert collect(dataset, apply=True).removals == []
