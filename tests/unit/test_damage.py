"""Whatever happens to any file of a data set: verify names it, and no read ever gives a wrong value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from storage_helpers import create, files_below, keys_of, num_rows, states, write_real

from storage import Dataset, SampleKey, checkpoint, sample_index
from storage.checkpoint import checkpoint_path, decode_checkpoint, encode_checkpoint
from storage.dataset import DATASET_FILE, _seal
from storage.errors import SchemaError
from storage.log import entry_path, make_entry
from storage.query import query
from storage.reader import SampleReader
from storage.sample_index import SampleIndex, index_path
from storage.sample_table import update_index
from storage.snapshot import Snapshot
from storage.types import FileEntry, Receipt
from storage.verify import verify
from storage.verify_deep import receipts_of

HEAD = b"head" * 100
# What a refused read raises: damage and newer schemas are ValueErrors, what is missing is an OSError.
REFUSED = (ValueError, OSError)


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["row"], row["turn"], row["n"]))


class Whole:
    """A sound data set, and everything that can be read from it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        dataset = Dataset.open(root)
        self.snapshots = [dataset.snapshot(version) for version in range(dataset.snapshot().version + 1)]
        self.samples = [in_order(snapshot.samples().to_pylist()) for snapshot in self.snapshots]
        self.rejects = in_order(self.snapshots[-1].rejects().to_pylist())
        self.holders: dict[str, list[Receipt]] = {}
        for _, receipt in receipts_of(self.snapshots[-1].samples()):
            self.holders.setdefault(receipt.shard, []).append(receipt)

    def check_reads(self, copy: Path, scratch: Path) -> int:
        """Reads everything from a damaged copy: right, or refused. Returns how many of the reads were refused."""

        last, samples = self.samples[-1], {sample["row"]: sample for sample in self.samples[-1]}
        opened: list[Snapshot] = []
        reader: list[SampleReader] = []

        def newest() -> None:
            opened.append(Dataset.open(copy).snapshot())

        def table() -> None:
            assert in_order(opened[0].samples().to_pylist()) == last

        def sql() -> None:
            assert in_order(query(opened[0], "SELECT * FROM samples").to_pylist()) == last

        def narrow() -> None:
            found = query(opened[0], "SELECT row, shard, checksum FROM samples ORDER BY row").to_pylist()
            assert found == [{name: sample[name] for name in ("row", "shard", "checksum")} for sample in last]

        def key() -> None:
            sql = "SELECT * FROM samples WHERE row = 5 AND turn = 0 AND n = 0"
            assert query(opened[0], sql).to_pylist() == [samples[5]]

        def rejects() -> None:
            assert in_order(opened[0].rejects().to_pylist()) == self.rejects

        def head() -> None:
            assert opened[0].fetch_head(scratch).read_bytes() == HEAD

        def older() -> None:
            for version in (2, 7):
                snapshot = Dataset.open(copy).snapshot(version)
                assert in_order(snapshot.samples().to_pylist()) == self.samples[version]

        def locations() -> None:
            reader.append(SampleReader(opened[0]))
            assert [key.row for key in reader[0].keys()] == list(samples)  # noqa: SIM118

        def sample(row: int) -> None:
            wanted = SampleKey(row, 0, 0)
            read = reader[0].read(wanted)
            assert read.token_ids.tolist() == samples[row]["token_ids"]
            np.testing.assert_array_equal(read.states_TLH, states(wanted, num_rows(wanted)))

        refused = 0
        reads = [newest, older, table, sql, narrow, key, rejects, head, locations]
        for read in [*reads, *(partial(sample, row) for row in samples)]:
            try:
                read()
            except REFUSED:
                refused += 1
            if not opened:
                break  # nothing can be read
            if read is locations and not reader:
                break
        return refused


def told(copy: Path) -> tuple[set[str], set[str | None]]:
    """Files and samples that a deep verify names as wrong."""
    try:
        report = verify(copy, deep=True)
    except FileNotFoundError as error:
        return {DATASET_FILE} if DATASET_FILE in str(error) else set(), set()
    except SchemaError as error:
        return {str(error).partition(": ")[0]}, set()
    names = {finding.path for finding in report.findings if finding.severity == "error" or finding.kind == "foreign"}
    return names, {error.sample for error in report.errors}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Both formats and codecs, rejects, a deleted sample, a head, an expired unit, checkpoints, an index; complete."""
    root = tmp_path_factory.mktemp("whole")
    (root / "head.bin").write_bytes(HEAD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "INTERVAL", 4)
        dataset = create(root / "data", 5)
        dataset.put_head(root / "head.bin")
        writer = dataset.writer("w")
        for unit in range(5):
            rejected = keys_of(dataset, unit)[:1] if unit < 2 else []
            options = {
                "shard_format": ("safetensors", "parquet")[unit % 2],
                "codec": ("planes-zstd", "none", "none", "planes-zstd", "none")[unit],
            }
            writer.commit([write_real(writer, unit, 0, rejected, target_bytes=1 << 16, **options)], {})
        dataset.delete([SampleKey(11, 0, 0)])
        dataset.expire([4])
        update_index(dataset.snapshot())
        dataset.complete()
    assert verify(root / "data", deep=True).is_sound
    return Whole(root / "data")


@pytest.fixture(scope="module")
def copy(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Damaged by one example after the other, and repaired after each."""
    directory = tmp_path_factory.mktemp("copy") / "data"
    shutil.copytree(whole.root, directory)
    return directory


@pytest.fixture
def changed(whole: Whole, copy: Path) -> Iterator[None]:
    yield
    assert {p.relative_to(copy) for p in files_below(copy)} == {
        p.relative_to(whole.root) for p in files_below(whole.root)
    }


def test_what_is_whole_is_read_in_full(whole: Whole, copy: Path, tmp_path: Path) -> None:
    assert len(whole.samples[-1]) == 9
    assert whole.check_reads(copy, tmp_path) == 0
    assert told(copy) == (set(), set())


DERIVED = "checkpoints"


@pytest.mark.usefixtures("changed")
@pytest.mark.parametrize("kind", ["flip", "truncate", "grow", "swap", "rename", "delete"])
def test_any_damage_to_any_file_is_named_and_never_read(
    whole: Whole, copy: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    scratch = tmp_path_factory.mktemp("fetched")
    retired = Dataset.open(copy).manifest().retired()  # for gc: no check and no reader of the newest version looks
    paths = [path for path in (p.relative_to(copy).as_posix() for p in files_below(copy)) if path not in retired]
    assert {path.partition("/")[0] for path in paths} >= {
        "dataset.json", "log", "checkpoints", "shards", "samples", "rejects", "head"
    }  # fmt: skip

    # Without shrinking: an example names its file, and each takes a tenth of a second.
    @settings(max_examples=60 if kind == "flip" else 25, deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(st.sampled_from(paths), st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.data())
    def damage(name: str, where: float, mask: int, data: st.DataObject) -> None:
        path = copy / name
        good = path.read_bytes()
        position = int(where * len(good))
        moved: list[tuple[Path, Path]] = []
        victims = {name}
        if kind == "flip":
            path.write_bytes(good[:position] + bytes([good[position] ^ mask]) + good[position + 1 :])
        elif kind == "truncate":
            path.write_bytes(good[:position])
        elif kind == "grow":
            path.write_bytes(good + bytes([mask]) * (1 + position))
        elif kind == "delete":
            path.unlink()
        elif kind == "rename":
            digit = next(i for i, c in enumerate(path.name) if c.isdigit()) if any(map(str.isdigit, path.name)) else 0
            other = path.with_name(path.name[:digit] + "7" + path.name[digit + 1 :])
            if other.exists():
                return
            moved = [(path, path.rename(other))]
            victims.add(other.relative_to(copy).as_posix())
        else:
            same = [p for p in paths if p.rpartition("/")[0] == name.rpartition("/")[0] and p != name]
            if not same:
                return
            second = copy / data.draw(st.sampled_from(same))
            if second.read_bytes() == good:
                return
            aside = path.rename(copy / "aside")
            second.rename(path)
            aside.rename(second)
            moved = [(path, second)]
            victims.add(second.relative_to(copy).as_posix())
        try:
            refused = whole.check_reads(copy, scratch)
            names, samples = told(copy)
        finally:
            if kind == "swap" and moved:
                aside = path.rename(copy / "aside")
                second.rename(path)
                aside.rename(second)
            elif moved:
                moved[0][1].rename(path)
            else:
                path.write_bytes(good)
        if name == DATASET_FILE or name.startswith("units-"):
            victims |= {DATASET_FILE, entry_path(1)}  # another identity is found where the log refers to it
        if name.startswith(DERIVED) and kind == "delete":
            assert (names, refused) == (set(), 0)  # the log says it all
            return
        assert names & victims, (kind, name, names)
        if name.startswith(DERIVED):
            assert refused == 0  # passed over
        for receipt in whole.holders.get(name, []) if kind == "flip" else []:
            if receipt.offset <= position < receipt.offset + receipt.nbytes:
                codec = next(f.codec for f in whole.snapshots[-1].files() if f.path == name)
                # A few bits of a zstd frame say nothing about its content.
                assert str(receipt.key) in samples or codec != "none"

    damage()


def resealed_log(copy: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites log entry 3 (unit 1) and all after it, each with its right digest, without derived files."""
    dataset = Dataset.open(copy)
    entries = list(dataset.log.read_after(0, dataset.root_digest))
    shutil.rmtree(copy / DERIVED)
    previous = entries[1].digest
    for entry in entries[2:]:
        body = json.loads(json.dumps(entry.body))
        if entry.version == 3:
            change(body)
        new = make_entry(entry.version, entry.kind, entry.writer, previous, body)
        (copy / entry_path(new.version)).write_bytes(new.encode())
        previous = new.digest


@pytest.mark.parametrize("outside", ["../../secret", "/etc/passwd", "shards/../../secret", "shards\\..\\secret", ""])
@pytest.mark.parametrize("position", [0, 1])
def test_a_path_outside_is_named_and_never_read(whole: Whole, tmp_path: Path, outside: str, position: int) -> None:
    shutil.copytree(whole.root, tmp_path / "data")
    (tmp_path / "secret").write_bytes(b"secret")
    resealed_log(tmp_path / "data", lambda body: body["units"][0]["files"][position].update(path=outside))
    names, _ = told(tmp_path / "data")
    assert names == {entry_path(3)}
    assert whole.check_reads(tmp_path / "data", tmp_path / "fetched") > 0


def newer(copy: Path, what: str, patch: pytest.MonkeyPatch) -> str:
    """Gives one file of the data set the next schema version, as newer code would write it; returns its path."""
    if what == "dataset":
        content = json.loads((copy / DATASET_FILE).read_text())
        del content["digest"]
        (copy / DATASET_FILE).write_bytes(_seal({**content, "schema": content["schema"] + 1}))
        return DATASET_FILE
    if what == "log":
        import storage.log as module

        path = entry_path(9)
        entry = Dataset.open(copy).log.read(9)
        assert entry is not None
        with patch.context() as newer_code:
            newer_code.setattr(module, "SCHEMA", module.SCHEMA + 1)
            (copy / path).write_bytes(make_entry(9, entry.kind, "w", entry.previous, entry.body).encode())
        return path
    if what == "checkpoint":
        path = checkpoint_path(9)
        manifest = decode_checkpoint(path, (copy / path).read_bytes())
        with patch.context() as newer_code:
            newer_code.setattr(checkpoint, "SCHEMA", checkpoint.SCHEMA + 1)
            (copy / path).write_bytes(encode_checkpoint(manifest))
        return path
    old = next((copy / DERIVED).glob("*.samples"))
    index = SampleIndex.decode(old.relative_to(copy).as_posix(), old.read_bytes())
    with patch.context() as newer_code:
        newer_code.setattr(sample_index, "SCHEMA", sample_index.SCHEMA + 1)
        encoded = index.encode()
    path = index_path(index.version, encoded)
    old.unlink()
    (copy / path).write_bytes(encoded)
    return path


def test_a_log_of_an_older_schema_is_refused_by_name_and_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of schema 1 had compacted files without `full_at`."""
    import storage.log as module

    with monkeypatch.context() as older_code:
        older_code.setattr(module, "SCHEMA", 1)
        dataset = create(tmp_path, 1)
        added = {**FileEntry("shards/merged.safetensors", 1, "digest", "shard", 0).to_json(), "units": [0]}
        body = {"purge": False, "purged": [], "removed": [], "added": [added]}
        entry = make_entry(1, "compact", "w", dataset.root_digest, body)
        assert dataset.log.append(entry)
    with pytest.raises(SchemaError, match=rf"{entry_path(1)}: schema version 1, this code knows 2"):
        Dataset.open(tmp_path).snapshot()
    with pytest.raises(SchemaError, match=rf"{entry_path(1)}: schema version 1, this code knows 2"):
        verify(tmp_path)


@pytest.mark.parametrize("what", ["dataset", "log", "checkpoint", "index"])
def test_a_newer_schema_is_refused_by_name(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    shutil.copytree(whole.root, tmp_path / "data")
    path = newer(tmp_path / "data", what, monkeypatch)
    names, _ = told(tmp_path / "data")
    assert path in names
    assert whole.check_reads(tmp_path / "data", tmp_path / "fetched") > 0
