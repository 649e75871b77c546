"""What the log adds up to at one version: units, files, tombstones, fences. Pure: entries in, state out.

The state of a data set of 100,000 commits has 300,000 files. It comes out of a checkpoint as Arrow tables and stays in
them; only what the entries after the checkpoint changed is kept as Python objects beside them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage.errors import DamagedError
from storage.log import LogEntry, check_chain, entry_path
from storage.manifest_records import (
    COMMITTED,
    EXPIRED,
    FILES_SCHEMA,
    RETIRED_SCHEMA,
    TOMBSTONES_SCHEMA,
    UNITS_SCHEMA,
    ManifestFile,
    Retired,
    Tables,
    Tombstone,
    UnitFiles,
    UnitState,
)
from storage.store import check_path
from storage.types import FileEntry, SampleKey

__all__ = [
    "COMMITTED",
    "EXPIRED",
    "FILES_SCHEMA",
    "RETIRED_SCHEMA",
    "TOMBSTONES_SCHEMA",
    "UNITS_SCHEMA",
    "Manifest",
    "ManifestFile",
    "Retired",
    "Tables",
    "Tombstone",
    "UnitFiles",
    "UnitState",
]


@dataclass
class Manifest:
    """The folded log at one version. `apply` moves it one entry forward."""

    root: str  # digest of dataset.json: which data set this is
    version: int
    digest: str  # of the entry `version`; the root at version 0
    complete_at: int | None = None
    head: FileEntry | None = None
    fenced: dict[str, int] = field(default_factory=dict)  # writer id -> version of its fence
    base: Tables = field(default_factory=Tables)
    base_version: int = 0  # of `base`
    _files: dict[str, ManifestFile] = field(default_factory=dict)  # since the base
    _gone: set[str] = field(default_factory=set)  # files of the base that are retired
    _units: dict[int, UnitState] = field(default_factory=dict)  # new or changed since the base
    _tombstones: dict[SampleKey, Tombstone] = field(default_factory=dict)
    _retired: dict[str, Retired] = field(default_factory=dict)

    @classmethod
    def empty(cls, root: str) -> Manifest:
        """Version 0 of the data set whose dataset.json has the digest `root`."""
        return cls(root, 0, root)

    def copy(self) -> Manifest:
        """An independent manifest; the Arrow tables are shared."""
        return replace(
            self,
            fenced=dict(self.fenced),
            _files=dict(self._files),
            _gone=set(self._gone),
            _units=dict(self._units),
            _tombstones=dict(self._tombstones),
            _retired=dict(self._retired),
        )

    def unit(self, unit: int) -> UnitState | None:
        """The state of a unit, None while it is pending."""
        if unit in self._units:
            return self._units[unit]
        row = self.base.unit_rows.get(unit)
        return None if row is None else self.base.unit(row)

    def has_unit(self, unit: int) -> bool:
        return unit in self._units or unit in self.base.unit_rows

    def file(self, path: str) -> ManifestFile | None:
        """A visible file by its path."""
        if path in self._files:
            return self._files[path]
        row = None if path in self._gone else self.base.file_rows.get(path)
        return None if row is None else self.base.file(row)

    def unit_files(self, units: Collection[int]) -> list[ManifestFile]:
        """The visible files that hold at least one of these units."""
        rows = sorted({row for unit in units for row in self.base.unit_files.get(unit, ())})
        old = [file for file in map(self.base.file, rows) if file.path not in self._gone]
        wanted = set(units)
        return old + [file for file in self._files.values() if not wanted.isdisjoint(file.units)]

    def files(self, kind: str | None = None, rows: tuple[int, int] | None = None) -> Iterator[ManifestFile]:
        """Visible files (of one kind; that may hold a source row in `rows`, both ends included), oldest first."""
        table = self.files_table()
        if kind is not None:
            table = table.filter(pc.equal(table["kind"], kind))
        if rows is not None:
            low, high = pc.less_equal(table["first_row"], rows[1]), pc.greater_equal(table["last_row"], rows[0])
            table = table.filter(pc.or_(pc.less(table["first_row"], 0), pc.and_(low, high)))
        for value in table.to_pylist():
            yield ManifestFile(**{**value, "units": tuple(value["units"])})

    def files_table(self) -> pa.Table:
        """FILES_SCHEMA, one row for each visible file."""
        base = self.base.files
        if self._gone:
            base = base.filter(pc.invert(pc.is_in(base["path"], pa.array(sorted(self._gone), pa.string()))))
        return _extended(base, (file.__dict__ for file in self._files.values()))

    def units_table(self) -> pa.Table:
        """UNITS_SCHEMA, one row for each unit that is not pending."""
        base = self.base.units
        if self._units:
            base = base.filter(pc.invert(pc.is_in(base["unit"], pa.array(list(self._units), pa.int64()))))
        return _extended(base, (unit.__dict__ for unit in self._units.values()))

    def tombstones(self) -> dict[SampleKey, Tombstone]:
        """Every deleted sample by key."""
        found: dict[SampleKey, Tombstone] = {}
        for value in self.base.tombstones.to_pylist():
            key = SampleKey(value["row"], value["turn"], value["n"])
            found[key] = Tombstone(key, value["unit"], value["purged_at"])
        return found | self._tombstones

    def retired(self) -> dict[str, Retired]:
        """Every file that was visible once and is no more, by path."""
        rows = self.base.retired.to_pylist()
        found = {row["path"]: Retired(**{**row, "units": tuple(row["units"])}) for row in rows}
        return found | self._retired

    def retired_file(self, path: str) -> Retired | None:
        """The file at `path` if it was visible once and is no more."""
        if path in self._retired:
            return self._retired[path]
        row = pc.index(self.base.retired["path"], path).as_py()
        return None if row < 0 else Retired(**_with_units(self.base.retired.slice(row, 1)))

    def tainted(self) -> list[Retired]:
        """Retired files that hold bytes of a purged sample: readers of old snapshots lose them."""
        purged_at: dict[int, int] = {}
        for tombstone in self.tombstones().values():
            if tombstone.purged_at:
                purged_at[tombstone.unit] = max(tombstone.purged_at, purged_at.get(tombstone.unit, 0))
        return [
            retired
            for retired in self.retired().values()
            if retired.reason == "purged" or any(purged_at.get(unit, 0) >= retired.version for unit in retired.units)
        ]

    def tables(self) -> Tables:
        """The whole state as tables, for a checkpoint."""
        tombstones = ({**t.key._asdict(), "unit": t.unit, "purged_at": t.purged_at} for t in self.tombstones().values())
        return Tables(
            self.files_table().combine_chunks(),
            self.units_table().combine_chunks(),
            _extended(TOMBSTONES_SCHEMA.empty_table(), tombstones).combine_chunks(),
            _extended(self.base.retired, (file.__dict__ for file in self._retired.values())).combine_chunks(),
        )

    def rebased(self) -> Manifest:
        """The same state with everything in its tables."""
        return Manifest(
            self.root,
            self.version,
            self.digest,
            self.complete_at,
            self.head,
            dict(self.fenced),
            self.tables(),
            base_version=self.version,
        )

    def apply(self, entry: LogEntry) -> None:
        """Moves to the next version.

        Raises DamagedError naming the entry when it breaks the chain or the rules of the log (a unit visible twice, a
        fenced writer, a commit after `complete`, a path outside the data set): no writer of ours appends such a one.
        """
        check_chain(entry, self.version, self.digest)
        where = entry_path(entry.version)
        if entry.writer in self.fenced:
            raise DamagedError(f"{where}: writer {entry.writer} was fenced at version {self.fenced[entry.writer]}")
        try:
            getattr(self, f"_apply_{entry.kind}")(entry)
        except DamagedError as error:
            raise DamagedError(f"{where}: {error}") from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DamagedError(f"{where}: {type(error).__name__} in its body: {error}") from error
        self.version, self.digest = entry.version, entry.digest

    def _apply_commit(self, entry: LogEntry) -> None:
        if self.complete_at is not None:
            raise DamagedError(f"a commit after the data set was completed at version {self.complete_at}")
        info = json.dumps(entry.body["info"], sort_keys=True)
        for value in entry.body["units"]:
            unit = UnitFiles.from_json(value)
            if self.has_unit(unit.unit):
                raise DamagedError(f"unit {unit.unit} is visible already")
            if unit.writer in self.fenced:
                raise DamagedError(f"unit {unit.unit} is of writer {unit.writer}, fenced before")
            self._units[unit.unit] = UnitState(
                unit.unit,
                COMMITTED,
                entry.version,
                unit.num_samples,
                unit.num_rejects,
                unit.num_tokens,
                unit.raw_bytes,
                unit.writer,
                entry.time,
                info,
            )
            for file in unit.files:
                self._add(ManifestFile(**file.__dict__, units=(unit.unit,), version=entry.version))

    def _apply_complete(self, entry: LogEntry) -> None:
        if self.complete_at is not None:
            raise DamagedError(f"the data set was completed before, at version {self.complete_at}")
        self.complete_at = entry.version

    def _apply_expired(self, entry: LogEntry) -> None:
        for number in entry.body["units"]:
            unit = self.unit(number)
            if unit is None or unit.status != COMMITTED:
                raise DamagedError(f"expires unit {number}, which is {unit.status if unit else 'pending'}")
            self._units[number] = replace(unit, status=EXPIRED, version=entry.version)
        self._retire(entry, entry.body["removed"], "expired")

    def _apply_tombstone(self, entry: LogEntry) -> None:
        for row, turn, n, unit in entry.body["keys"]:
            key = SampleKey(row, turn, n)
            self._tombstones[key] = Tombstone(key, unit)

    def _apply_fence(self, entry: LogEntry) -> None:
        for writer in entry.body["writers"]:
            self.fenced.setdefault(writer, entry.version)

    def _apply_head(self, entry: LogEntry) -> None:
        if self.head is not None:
            raise DamagedError("a second verifier head")
        head = FileEntry.from_json(entry.body["file"])
        check_path(head.path)
        self.head = head

    def _apply_compact(self, entry: LogEntry) -> None:
        purged = [SampleKey(*key) for key in entry.body["purged"]]
        self._retire(entry, entry.body["removed"], "purged" if entry.body["purge"] else "compacted")
        for value in entry.body["added"]:
            units = tuple(value["units"])
            file = FileEntry.from_json({name: value[name] for name in _FILE_FIELDS})
            self._add(ManifestFile(**file.__dict__, units=units, version=entry.version, full_at=value["full_at"]))
        if purged:
            tombstones = self.tombstones()
            for key in purged:
                self._tombstones[key] = replace(tombstones[key], purged_at=entry.version)

    def _add(self, file: ManifestFile) -> None:
        check_path(file.path)
        if self.file(file.path) is not None:
            raise DamagedError(f"{file.path} is visible already")
        self._files[file.path] = file

    def _retire(self, entry: LogEntry, paths: Iterable[str], reason: str) -> None:
        for path in paths:
            file = self.file(path)
            if file is None:
                raise DamagedError(f"retires {path}, which is not visible")
            if self._files.pop(path, None) is None:
                self._gone.add(path)
            self._retired[path] = Retired(path, entry.version, reason, entry.time, file.units)


_FILE_FIELDS = [field.name for field in fields(FileEntry)]


def _with_units(row: pa.Table) -> dict[str, Any]:
    value: dict[str, Any] = row.to_pylist()[0]
    return {**value, "units": tuple(value["units"])}


def _extended(base: pa.Table, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    more = pa.Table.from_pylist(list(rows), schema=base.schema)
    return pa.concat_tables([base, more]) if more.num_rows else base
