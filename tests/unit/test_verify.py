"""verify finds every kind of damage and names file and sample; what is no damage it reports as a notice."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from storage_helpers import SPEC, create, files_below, keys_of, num_rows, sample, states, write_opaque, write_real

from storage import DamagedError, Dataset, FileEntry, SampleKey, checkpoint
from storage.checkpoint import checkpoint_path, encode_checkpoint
from storage.compact import compact
from storage.digest import bytes_digest
from storage.errors import LostEntriesError
from storage.gc import collect
from storage.log import entry_path, make_entry
from storage.sample_table import load_narrow, update_index
from storage.types import parse_data_file_name
from storage.verify import Finding, verify


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four committed units in both formats and codecs; rejects, a tombstone, an expired unit, a head, checkpoints."""
    root = tmp_path_factory.mktemp("pristine")
    head = root / "head.bin"
    head.write_bytes(b"head" * 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "INTERVAL", 4)
        dataset = create(root / "data", 6)
        dataset.put_head(head)
        writer = dataset.writer("w")
        options = [
            ("safetensors", "planes-zstd"),
            ("parquet", "none"),
            ("safetensors", "none"),
            ("parquet", "planes-zstd"),
        ]
        for unit, (shard_format, codec) in enumerate(options):
            rejected = keys_of(dataset, unit)[:1] if unit < 2 else []
            writer.commit(
                [write_real(writer, unit, 0, rejected, shard_format=shard_format, codec=codec, target_bytes=1 << 16)],
                {},
            )
        dataset.delete([SampleKey(11, 0, 0)])
        writer.commit([write_real(writer, 4, target_bytes=1 << 16)], {})
        dataset.expire([4])
    for path in list((root / "data").rglob("u00000004-*")):
        path.unlink()
    return root / "data"


@pytest.fixture
def data(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "data")
    return tmp_path / "data"


def found(data: Path, deep: bool = True) -> list[tuple[str, str]]:
    return [(finding.kind, finding.path) for finding in verify(data, deep).errors]


def one(data: Path, pattern: str) -> Path:
    (path,) = data.glob(pattern)
    return path


def test_a_sound_data_set(data: Path) -> None:
    for deep in (False, True):
        report = verify(data, deep)
        assert report.findings == []
        assert report.is_sound
        assert report.version == 8
        assert report.num_files == len(Dataset.open(data).snapshot().files()) + 1
    assert report.num_samples == 10
    assert json.loads(json.dumps(report.to_json()))["is_sound"]


def test_verify_reports_progress(data: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    verify(data, True, lambda what, done, total: seen.update({what: (done, total)}))
    assert set(seen) == {"digests", "states"}
    assert all(done == total > 0 for done, total in seen.values())


@pytest.mark.parametrize("deep", [False, True])
def test_missing_and_truncated_files_are_found_without_reading_them(data: Path, deep: bool) -> None:
    missing, cut = one(data, "shards/u00000001-*"), one(data, "samples/u00000002-*")
    missing.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    relative = {path: path.relative_to(data).as_posix() for path in (missing, cut)}
    errors = verify(data, deep).errors
    assert {(e.kind, e.path, e.unit) for e in errors} >= {("missing", relative[missing], 1), ("size", relative[cut], 2)}
    assert {e.path for e in errors} == set(relative.values())


def test_every_missing_file_is_found(data: Path) -> None:
    for path in files_below(data):
        away = path.with_suffix(".away")
        path.rename(away)
        name = path.relative_to(data).as_posix()
        if name == "dataset.json":
            with pytest.raises(FileNotFoundError, match="no data set"):
                verify(data)
        elif path.parent.name == "checkpoints":
            assert found(data) == []  # derived: the log says it all
        elif path.parent.name == "log" and name == entry_path(8):
            pass  # the newest entry: nothing else knows of it
        else:
            errors = found(data, deep=False) + found(data)
            assert name in {error_path for _, error_path in errors}, name
        away.rename(path)


def test_swapped_and_renamed_files_are_found(data: Path) -> None:
    a, b = one(data, "shards/u00000000-*"), one(data, "shards/u00000002-*")
    a.rename(data / "x")
    b.rename(a)
    (data / "x").rename(b)
    assert {path for _, path in found(data)} == {p.relative_to(data).as_posix() for p in (a, b)}
    first, second = data / entry_path(2), data / entry_path(3)
    first.rename(data / "x")
    second.rename(first)
    (data / "x").rename(second)
    assert found(data) == [("log", entry_path(2))]


def test_damage_of_one_sample_is_named_although_digest_and_size_agree(tmp_path: Path) -> None:
    """A shard damaged before its digest was taken: only the sample's own checksum knows."""
    dataset = create(tmp_path / "data", 1)
    writer = dataset.writer("w")
    files = write_real(writer, 0, codec="none", target_bytes=1 << 16)
    shard = next(file for file in files.files if file.kind == "shard")
    (samples_file,) = (tmp_path / "data/samples").iterdir()
    import pyarrow.parquet as pq

    row = pq.read_table(samples_file).to_pylist()[1]
    path = tmp_path / "data" / shard.path
    content = bytearray(path.read_bytes())
    content[row["offset"] + 5] ^= 1
    path.write_bytes(content)
    damaged = replace(shard, digest=bytes_digest(content))
    writer.commit([replace(files, files=tuple(damaged if f is shard else f for f in files.files))], {})
    (error,) = verify(dataset.uri, deep=True).errors
    assert (error.kind, error.path, error.unit, error.sample) == ("states", shard.path, 0, "row 1 turn 0 n 0")


@pytest.mark.parametrize(
    ("value", "detail"),
    [(0x7F80, "NaN or infinity"), (0x7FC0, "NaN or infinity"), (0xFF80, "NaN or infinity"), (0, "zero")],
)
def test_states_that_capture_should_have_refused_are_found(tmp_path: Path, value: int, detail: str) -> None:
    from storage.shards import open_shard_writer

    dataset = create(tmp_path, 1)
    writer = dataset.writer()
    samples = []
    with open_shard_writer(writer.shard_target(0, 0, target_bytes=1 << 16)) as shards:
        for key in keys_of(dataset, 0):
            array = states(key, num_rows(key))
            if key.row == 1:
                array[1, 0, :] = value
            samples.append(sample(key, 0, shards.add(key, array)))
        entries = shards.close()
    writer.commit([writer.write_unit(0, 0, samples, [], entries)], {})
    (error,) = verify(tmp_path, deep=True).errors
    assert (error.kind, error.sample) == ("states", "row 1 turn 0 n 0")
    assert detail in error.detail


def recommitted(data: Path, change: Callable[[dict[str, object]], None]) -> Path:
    """Rewrites log entry 2 (unit 0) and everything after it, as a buggy writer would have."""
    dataset = Dataset.open(data)
    shutil.rmtree(data / "checkpoints")
    entries = list(dataset.log.read_after(0, dataset.root_digest))
    previous = entries[0].digest
    for entry in entries[1:]:
        body = json.loads(json.dumps(entry.body))
        if entry.version == 2:
            change(body)
        new = make_entry(entry.version, entry.kind, entry.writer, previous, body)
        (data / entry_path(new.version)).write_bytes(new.encode())
        previous = new.digest
    return data


def test_a_commit_that_does_not_account_for_its_unit_is_found(data: Path) -> None:
    def change(body: dict[str, object]) -> None:
        body["units"][0]["num_rejects"] = 0  # type: ignore[index]

    kinds = [(e.kind, e.unit) for e in verify(recommitted(data, change)).errors]
    assert ("accounting", 0) in kinds


def test_a_manifest_that_points_outside_is_refused_by_name(data: Path) -> None:
    def change(body: dict[str, object]) -> None:
        body["units"][0]["files"][0]["path"] = "../../../etc/passwd"  # type: ignore[index]

    (error,) = verify(recommitted(data, change)).errors
    assert error.path == entry_path(2)
    assert "'../../../etc/passwd'" in error.detail


def test_a_table_of_another_unit_is_found(tmp_path: Path) -> None:
    dataset = create(tmp_path, 2)
    writer = dataset.writer()
    first, second = write_real(writer, 0, target_bytes=1 << 16), write_real(writer, 1, target_bytes=1 << 16)

    def tables_of(files: tuple[FileEntry, ...]) -> list[FileEntry]:
        return [file for file in files if file.kind == "samples"]

    shards = [file for file in first.files if file.kind == "shard"]
    # Unit 0's commit names unit 1's samples file.
    mixed = replace(first, files=(*shards, *tables_of(second.files)))
    dataset.append("commit", lambda _: {"units": [mixed.to_json()], "info": {}})  # the writer refuses it
    errors = verify(tmp_path, deep=True).errors
    assert {error.kind for error in errors} == {"table", "accounting"}
    assert {error.sample for error in errors if error.sample} == {f"row {row} turn 0 n 0" for row in (3, 4, 5)}


def test_a_checkpoint_that_is_not_the_log_is_found(data: Path) -> None:
    manifest = Dataset.open(data).manifest(4)
    manifest.fenced["nobody"] = 1
    (data / checkpoint_path(4)).write_bytes(encode_checkpoint(manifest))
    assert found(data, deep=False) == []
    assert found(data) == [("checkpoint", checkpoint_path(4))]


def test_a_checkpoint_of_another_data_set_is_passed_over_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one with another dataset.json, and of a copy of this one that went on by itself."""
    monkeypatch.setattr(checkpoint, "INTERVAL", 2)
    for name in ("a", "b", "copy"):
        if name == "copy":
            shutil.copytree(tmp_path / "a", tmp_path / "copy")
            for path in (tmp_path / "copy/log").glob("*[23].json"):
                path.unlink()
            (tmp_path / "copy" / checkpoint_path(2)).unlink()
        dataset = create(tmp_path / name, 4)
        writer = dataset.writer(f"w{name}")
        for unit in dataset.snapshot().pending_units()[: 3 - dataset.snapshot().version]:
            writer.commit([write_real(writer, unit)], {})
    for name, problem in (("b", "belongs to another data set"), ("copy", "stands for another entry than log/")):
        target = tmp_path / "a" / checkpoint_path(2)
        shutil.copy(tmp_path / name / checkpoint_path(2), target)
        caplog.clear()
        reopened = Dataset.open(tmp_path / "a")
        assert reopened.manifest().base_version == 0
        assert {f.path.split("-w")[1][:2] for f in reopened.snapshot().files()} == {"wa"}
        assert f"{checkpoint_path(2)}: {problem}" in caplog.text
        report = verify(tmp_path / "a", deep=True)
        assert ("checkpoint", checkpoint_path(2)) in {(e.kind, e.path) for e in report.errors}
        removed = [(removal.reason, removal.path) for removal in collect(reopened, apply=True).removals]
        assert ("checkpoint", checkpoint_path(2)) in removed
        assert verify(tmp_path / "a", deep=True).is_sound


@pytest.mark.parametrize("evidence", ["checkpoint", "complete", "index"])
def test_lost_newest_entries_are_noticed_by_what_was_written_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evidence: str
) -> None:
    if evidence == "checkpoint":
        monkeypatch.setattr(checkpoint, "INTERVAL", 3)
    dataset = create(tmp_path, 3)
    writer = dataset.writer("w")
    for unit in range(3):
        writer.commit([write_real(writer, unit)], {})
    if evidence == "complete":
        dataset.complete()
    if evidence == "index":
        update_index(dataset.snapshot())
    last = dataset.snapshot().version
    for lost in ([last], [last, last - 1]):
        for version in lost:
            (tmp_path / entry_path(version)).unlink(missing_ok=True)
        for deep in (False, True):
            errors = verify(tmp_path, deep).errors
            assert [(error.kind, error.path) for error in errors] == [("log", entry_path(last))]
            assert "the log lost its newest entries" in errors[0].detail
        # What the entry made visible looks like garbage now.
        with pytest.raises(LostEntriesError, match=entry_path(last)):
            collect(Dataset.open(tmp_path), apply=True, older_than_s=-1)
    assert len(list((tmp_path / "shards").iterdir())) == 3


def test_an_index_of_another_data_set_is_passed_over_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = []
    for name in ("a", "b"):
        dataset = create(tmp_path / name, 3)
        writer = dataset.writer("w")
        for unit in range(2 if name == "a" else 3):
            writer.commit([write_real(writer, unit)], {})
        if name == "b":
            paths = update_index(dataset.snapshot())
    (tmp_path / "a/checkpoints").mkdir()
    shutil.copy(tmp_path / "b" / paths[0], tmp_path / "a" / paths[0])
    snapshot = Dataset.open(tmp_path / "a").snapshot()
    assert load_narrow(snapshot, ["row"])["row"].to_pylist() == list(range(6))
    assert f"{paths[0]}: belongs to another data set" in caplog.text
    assert found(tmp_path / "a") == [("index", paths[0])]
    assert [removal.path for removal in collect(snapshot.dataset, apply=True).removals] == paths
    assert found(tmp_path / "a") == []


class TestBesideOthers:
    """verify --deep takes hours; meanwhile units expire, files are merged and purged, and gc removes the old ones."""

    @staticmethod
    def meanwhile(data: Path) -> None:
        other = Dataset.open(data)
        other.expire([0])
        other.delete([SampleKey(5, 0, 0)])
        compact(other, target_bytes=1 << 20, purge=True)
        collect(other, apply=True, older_than_s=-1, keep_superseded_s=0)

    @staticmethod
    def steps(data: Path) -> list[str]:
        seen: list[str] = []
        verify(data, True, lambda what, done, total: seen.append(what))
        return seen

    def test_files_that_were_retired_meanwhile_are_no_damage(self, data: Path, tmp_path: Path) -> None:
        """At every step of the check."""
        steps = self.steps(data)
        assert steps.count("digests") > 8
        assert steps.count("states") > 3
        noticed = set()
        for at in range(len(steps)):
            copy = tmp_path / str(at)
            shutil.copytree(data, copy)
            count = 0

            def act(what: str, done: int, total: int, at: int = at, copy: Path = copy) -> None:
                nonlocal count
                if count == at:
                    self.meanwhile(copy)
                count += 1

            report = verify(copy, True, act)
            assert report.is_sound, (at, report.errors)
            assert {finding.kind for finding in report.findings} <= {"retired"}
            noticed.add(len(report.findings))
            assert verify(copy, True).is_sound
            shutil.rmtree(copy)
        assert max(noticed) > 5

    def test_files_retired_between_the_listing_and_the_look_are_no_damage(
        self, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import storage.verify as module

        take = module.take_inventory

        def then(*arguments: Any) -> Any:
            inventory = take(*arguments)
            self.meanwhile(data)
            inventory.visible.clear()
            return inventory

        monkeypatch.setattr(module, "take_inventory", then)
        report = verify(data)
        assert report.is_sound, report.errors
        assert {finding.kind for finding in report.findings} == {"retired"}

    @pytest.mark.parametrize("folder", ["shards", "samples", "head"])
    def test_a_file_that_vanishes_without_reason_is_missing(self, data: Path, folder: str) -> None:
        victim = next((data / folder).iterdir())
        name = victim.relative_to(data).as_posix()

        def act(what: str, done: int, total: int) -> None:
            victim.unlink(missing_ok=True)

        errors = verify(data, True, act).errors
        # Its digest may have been taken before it vanished.
        assert {error.path for error in errors} <= {name}
        victim.unlink(missing_ok=True)
        assert name in {error.path for error in verify(data, True).errors}


def test_leftovers_are_notices(data: Path) -> None:
    dataset = Dataset.open(data)
    dead = dataset.writer("dead")
    write_opaque(dead, 5)
    target = dead.shard_target(5, 1).shard_path(0, "safetensors")
    dataset.store.staging_file(target).write_bytes(b"half a shard")
    (data / "staging/put-1-aa").write_bytes(b"half an entry")
    (data / "shards/notes.txt").write_bytes(b"what is this")
    report = verify(data, deep=True)
    assert report.is_sound
    kinds = {(finding.kind, finding.path) for finding in report.findings}
    assert kinds == {
        ("orphan", "shards/u00000005-a0-wdead-00000.safetensors"),
        ("orphan", "samples/u00000005-a0-wdead-00000.parquet"),
        ("orphan", f"staging/{target}"),
        ("scrap", "staging/put-1-aa"),
        ("foreign", "shards/notes.txt"),
    }
    assert all(isinstance(finding, Finding) and finding.severity == "notice" for finding in report.findings)


def test_readers_refuse_damage_by_name(data: Path) -> None:
    snapshot = Dataset.open(data).snapshot()
    for kind, read in (("samples", snapshot.samples), ("rejects", snapshot.rejects)):
        path = one(data, f"{kind}/u00000000-*")
        good = path.read_bytes()
        for damage in (good[:-1], good[:100] + bytes([good[100] ^ 1]) + good[101:], b""):
            path.write_bytes(damage)
            with pytest.raises(DamagedError, match=f"^{kind}/u00000000"):
                read()
        path.unlink()
        with pytest.raises(DamagedError, match=f"^{kind}/u00000000.*: missing from"):
            read()
        path.write_bytes(good)
        assert read().num_rows > 0
    with pytest.raises(DamagedError, match="not a shard of version"):
        snapshot.shard_entry("shards/nowhere")


def test_the_helper_states_are_what_was_written(data: Path) -> None:
    from storage.shards import open_shard_reader
    from storage.verify_deep import receipts_of

    snapshot = Dataset.open(data).snapshot()
    for _, receipt in receipts_of(snapshot.samples()):
        entry = snapshot.shard_entry(receipt.shard)
        assert parse_data_file_name(entry.path) is not None
        got = open_shard_reader(snapshot.dataset.store, entry, SPEC).read(receipt)
        np.testing.assert_array_equal(got, states(receipt.key, receipt.rows))
