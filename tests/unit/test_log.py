"""Log entries, their chain, their rules, and the checkpoints that stand for a folded log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_helpers import create, plan, write_opaque

from storage import DamagedError, Dataset, SampleKey, SchemaError, StoreError, checkpoint
from storage.checkpoint import checkpoint_path, decode_checkpoint, encode_checkpoint, newest_checkpoint
from storage.errors import LostEntriesError
from storage.identity import canonical_json
from storage.log import Log, LogEntry, decode_entry, entry_path, make_entry
from storage.manifest import Manifest
from storage.store import ObjectInfo, open_store
from storage.store_local import LocalStore

ROOT = "ab" * 32

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.integers(1, 10**9))
def test_an_entry_survives_its_encoding(body: dict[str, object], version: int) -> None:
    entry = make_entry(version, "commit", "w", ROOT, body)
    assert decode_entry(entry_path(version), entry.encode()) == entry


ENTRY = make_entry(7, "commit", "w", ROOT, {"units": [1, 2], "text": "é\n", "digest": ROOT}).encode()


@given(st.integers(0, len(ENTRY) - 1), st.integers(0, 7))
def test_a_flip_of_any_bit_of_an_entry_is_refused(position: int, bit: int) -> None:
    encoded = bytearray(ENTRY)
    encoded[position] ^= 1 << bit
    with pytest.raises(DamagedError, match=r"log/00000000000000000007\.json"):
        decode_entry(entry_path(7), bytes(encoded))


@pytest.mark.parametrize("length", [0, 1, 50, -2, -1])
def test_a_cut_entry_is_refused(length: int) -> None:
    with pytest.raises(DamagedError, match=r"log/00000000000000000007\.json"):
        decode_entry(entry_path(7), make_entry(7, "fence", "w", ROOT, {"writers": []}).encode()[:length])


def sealed(value: dict[str, object]) -> bytes:
    """The bytes another version of this code would have written for an entry."""
    import hashlib

    return canonical_json({**value, "digest": hashlib.sha256(canonical_json(value)).hexdigest()}) + b"\n"


def test_another_schema_and_an_unknown_kind_are_refused_by_name() -> None:
    value = {k: v for k, v in json.loads(make_entry(1, "fence", "w", ROOT, {}).encode()).items() if k != "digest"}
    with pytest.raises(SchemaError, match=r"0001\.json: schema version 3, this code knows 2: use a newer headrace"):
        decode_entry(entry_path(1), sealed({**value, "schema": 3, "colour": "new"}))
    with pytest.raises(SchemaError, match=r"0001\.json: schema version 1, this code knows 2: use the headrace that"):
        decode_entry(entry_path(1), sealed({**value, "schema": 1}))
    with pytest.raises(SchemaError, match=r"0001\.json: kind 'merge' is not one of"):
        decode_entry(entry_path(1), sealed({**value, "kind": "merge"}))
    with pytest.raises(DamagedError, match="fields"):
        decode_entry(entry_path(1), sealed({**value, "colour": "new"}))


def test_a_renamed_entry_is_refused() -> None:
    with pytest.raises(DamagedError, match=r"0002\.json: holds version 1: the file was renamed or swapped"):
        decode_entry(entry_path(2), make_entry(1, "fence", "w", ROOT, {}).encode())


def chain(log: Log, length: int) -> list[LogEntry]:
    entries: list[LogEntry] = []
    for version in range(1, length + 1):
        entries.append(make_entry(version, "fence", "w", entries[-1].digest if entries else ROOT, {"writers": []}))
        assert log.append(entries[-1])
    return entries


def test_a_version_is_won_once_and_read_back_in_order(tmp_path: Path) -> None:
    log = Log(open_store(tmp_path))
    entries = chain(log, 5)
    assert not log.append(make_entry(3, "fence", "other", entries[1].digest, {"writers": []}))
    assert log.append(entries[2])  # the same entry again: its first try had an answer that was lost
    assert list(log.read_after(0, ROOT)) == entries
    assert list(log.read_after(2, entries[1].digest, until=4)) == entries[2:4]
    assert log.read(6) is None


def test_missing_and_replaced_entries_are_found(tmp_path: Path) -> None:
    log = Log(open_store(tmp_path))
    entries = chain(log, 5)
    third = tmp_path / entry_path(3)
    third.unlink()
    with pytest.raises(DamagedError, match=r"0003\.json: missing, although later log entries exist"):
        list(log.read_after(0, ROOT))
    third.write_bytes(make_entry(3, "fence", "w", entries[1].digest, {"writers": ["x"]}).encode())
    with pytest.raises(DamagedError, match=r"0004\.json: its predecessor's digest"):
        list(log.read_after(0, ROOT))
    with pytest.raises(DamagedError, match=r"0001\.json: its predecessor's digest"):
        list(log.read_after(0, "cd" * 32))


def appended(dataset: Dataset, kind: str, body: dict[str, object], writer: str = "other") -> None:
    """Appends what no writer of ours would."""
    manifest = dataset.manifest()
    assert dataset.log.append(make_entry(manifest.version + 1, kind, writer, manifest.digest, body))


def test_an_entry_that_breaks_the_rules_makes_the_open_fail_by_name(tmp_path: Path) -> None:
    def fresh(name: str) -> tuple[Dataset, dict[str, object]]:
        dataset = create(tmp_path / name)
        unit = write_opaque(dataset.writer("w"), 0).to_json()
        return dataset, {"units": [unit], "info": {}}

    dataset, body = fresh("twice")
    appended(dataset, "commit", body)
    appended(dataset, "commit", body)
    with pytest.raises(DamagedError, match=r"0002\.json: unit 0 is visible already"):
        Dataset.open(dataset.uri).snapshot()
    assert Dataset.open(dataset.uri).snapshot(1).accounting().samples == 3

    dataset, body = fresh("fenced")
    dataset.fence(["w"])
    appended(dataset, "commit", body)
    with pytest.raises(DamagedError, match=r"0002\.json: unit 0 is of writer w, fenced before"):
        Dataset.open(dataset.uri).snapshot()

    dataset, body = fresh("outside")
    for path in ("../../etc/passwd", "/etc/passwd", "shards/../../x"):
        body["units"][0]["files"][0]["path"] = path  # type: ignore[index]
        appended(dataset, "commit", body)
        with pytest.raises(DamagedError, match=r"0001\.json: .*does not name a file inside the data set") as caught:
            Dataset.open(dataset.uri).snapshot()
        assert repr(path) in str(caught.value)
        (tmp_path / "outside" / entry_path(1)).unlink()

    dataset, body = fresh("strange")
    appended(dataset, "commit", {"units": [{"unit": 1}], "info": {}})
    with pytest.raises(DamagedError, match=r"0001\.json: KeyError in its body"):
        Dataset.open(dataset.uri).snapshot()


def long_lived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: int = 4) -> Dataset:
    """A data set with every kind of entry and a checkpoint every four."""
    monkeypatch.setattr(checkpoint, "INTERVAL", interval)
    dataset = create(tmp_path / "data", num_units=12)
    writer = dataset.writer("w")
    for unit in range(10):
        writer.commit([write_opaque(writer, unit, rejected=[SampleKey(unit * 3, 0, 0)])], {"unit": unit})
        if unit == 3:
            dataset.delete([SampleKey(4, 0, 0), SampleKey(5, 0, 0)])
        if unit == 5:
            dataset.expire([0, 2])
        if unit == 7:
            dataset.fence(["dead"])
    return dataset


def state(manifest: Manifest) -> tuple[object, ...]:
    tables = manifest.tables()
    return (
        (manifest.version, manifest.digest, manifest.complete_at, manifest.head, manifest.fenced),
        sorted(tables.files.to_pylist(), key=str),
        sorted(tables.units.to_pylist(), key=str),
        sorted(tables.tombstones.to_pylist(), key=str),
        sorted(tables.retired.to_pylist(), key=str),
    )


def test_checkpoints_change_nothing_at_any_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = long_lived(tmp_path, monkeypatch)
    assert checkpoint.checkpoint_versions(dataset.store) == [4, 8, 12]
    assert len(list((tmp_path / "data/checkpoints").glob("*.samples"))) == 3
    with_checkpoints = [state(Dataset.open(dataset.uri).manifest(version)) for version in range(14)]
    assert Dataset.open(dataset.uri).manifest().base_version == 12
    (tmp_path / "data/checkpoints").rename(tmp_path / "away")
    assert [state(Dataset.open(dataset.uri).manifest(version)) for version in range(14)] == with_checkpoints
    assert state(dataset.manifest()) == with_checkpoints[-1]


def test_a_checkpoint_survives_its_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = long_lived(tmp_path, monkeypatch).manifest()
    path = checkpoint_path(manifest.version)
    assert state(decode_checkpoint(path, encode_checkpoint(manifest))) == state(manifest)
    with pytest.raises(DamagedError, match="renamed or swapped"):
        decode_checkpoint(checkpoint_path(1), encode_checkpoint(manifest))


def test_a_flip_of_any_bit_of_a_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = long_lived(tmp_path, monkeypatch).manifest()
    path, good = checkpoint_path(manifest.version), encode_checkpoint(manifest)

    @settings(max_examples=200, deadline=None)
    @given(st.integers(0, len(good) - 1), st.integers(0, 7))
    def flip(position: int, bit: int) -> None:
        data = bytearray(good)
        data[position] ^= 1 << bit
        with pytest.raises(DamagedError, match=path):
            decode_checkpoint(path, bytes(data))

    flip()


def test_a_damaged_checkpoint_is_passed_over_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = long_lived(tmp_path, monkeypatch)
    expected = state(dataset.manifest())
    newest = tmp_path / "data" / checkpoint_path(12)
    newest.write_bytes(newest.read_bytes()[:-1])
    reopened = Dataset.open(dataset.uri).manifest()
    assert reopened.base_version == 8
    assert state(reopened) == expected
    assert f"{checkpoint_path(12)}: its bytes do not match its digest" in caplog.text


def test_a_checkpoint_of_a_newer_schema_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = long_lived(tmp_path, monkeypatch)
    manifest = dataset.manifest(12)
    known = checkpoint.SCHEMA
    monkeypatch.setattr(checkpoint, "SCHEMA", known + 1)
    newer = encode_checkpoint(manifest)
    monkeypatch.setattr(checkpoint, "SCHEMA", known)
    (tmp_path / "data" / checkpoint_path(12)).write_bytes(newer)
    with pytest.raises(SchemaError, match=f"schema version {known + 1}, this code knows {known}"):
        Dataset.open(dataset.uri).snapshot()


class EarlyLookups(LocalStore):
    """NFS, whose client answers "not there" for the names it looked for too early until it opens their folder again."""

    def __init__(self, root: Path, early: set[str]) -> None:
        super().__init__(root)
        self.early = early
        self.reads: list[str] = []

    def get(self, path: str) -> bytes:
        self.reads.append(path)
        if path in self.early:
            raise FileNotFoundError(path)
        return super().get(path)

    def list(self, prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
        self.early = {path for path in self.early if path.rpartition("/")[0] != prefix}
        return super().list(prefix, start_after)


def test_an_entry_that_was_looked_for_too_early_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = long_lived(tmp_path, monkeypatch)
    store = EarlyLookups(tmp_path / "data", {entry_path(12)})
    found = newest_checkpoint(store, Log(store), dataset.root_digest)
    assert found is not None
    assert found.version == 12


def test_an_entry_that_is_lost_is_looked_for_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = long_lived(tmp_path, monkeypatch)
    store = EarlyLookups(tmp_path / "data", set())
    for version in (12, 13):
        (tmp_path / "data" / entry_path(version)).unlink()
    with pytest.raises(LostEntriesError, match=entry_path(12)):
        newest_checkpoint(store, Log(store), dataset.root_digest)
    assert store.reads.count(entry_path(12)) == 2


def test_a_commit_stands_when_its_checkpoint_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "INTERVAL", 2)
    dataset = create(tmp_path / "data", 4)
    writer = dataset.writer()
    (tmp_path / "data/checkpoints").write_bytes(b"a file where the folder should be")
    for unit in range(4):
        assert writer.commit([write_opaque(writer, unit)], {}).accepted == [unit]
    assert "no checkpoint at version 2" in caplog.text
    (tmp_path / "data/checkpoints").unlink()
    assert Dataset.open(dataset.uri).snapshot().accounting().samples == 12


def test_a_commit_stands_when_nothing_can_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "INTERVAL", 1)
    dataset = create(tmp_path / "data", 1)
    writer = dataset.writer()
    unit = write_opaque(writer, 0)
    dataset.manifest()

    def fails(*args: object) -> Iterator[ObjectInfo]:
        raise StoreError(5, "503", "checkpoints")

    monkeypatch.setattr(dataset.store, "list", fails)
    assert writer.commit([unit], {}).accepted == [0]
    assert "no checkpoint at version 1" in caplog.text


def test_units_of_the_helpers_are_consecutive() -> None:
    assert [(u.first, u.num_prompts) for u in plan(3)] == [(0, 3), (3, 3), (6, 3)]
