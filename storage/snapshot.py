"""A snapshot: everything that was visible at one version, and nothing else."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.digest import FileDigest, bytes_digest, check_digest, file_digest, short
from storage.errors import DamagedError, RetiredError, SchemaError
from storage.manifest import COMMITTED, EXPIRED, Manifest, ManifestFile, Tombstone
from storage.prefetch import prefetched
from storage.types import REJECTS_SCHEMA, SAMPLES_SCHEMA, FileEntry, SampleKey

if TYPE_CHECKING:
    from storage.dataset import Dataset

_SCHEMAS = {"samples": SAMPLES_SCHEMA, "rejects": REJECTS_SCHEMA}
_SCHEMA_KEY = b"headrace.schema_version"
_KEY_COLUMNS = ["row", "turn", "n"]
_READ_THREADS = 8
_COPY_BYTES = 16 << 20


@dataclass(frozen=True)
class Accounting:
    """Where every expected sample is. `samples` are visible; `deleted` ones have a tombstone."""

    expected: int
    samples: int
    rejects: int
    expired: int
    pending: int
    deleted: int = 0

    @property
    def balances(self) -> bool:
        return self.expected == self.samples + self.rejects + self.expired + self.pending + self.deleted


class Snapshot:
    """One version of a data set. Immutable; threads may share it."""

    def __init__(self, dataset: Dataset, manifest: Manifest) -> None:
        self.dataset = dataset
        self.version = manifest.version
        self._manifest = manifest

    @property
    def is_complete(self) -> bool:
        return self._manifest.complete_at is not None

    @property
    def head(self) -> FileEntry | None:
        """The verifier head's file, None when none was stored."""
        return self._manifest.head

    @cached_property
    def tombstones(self) -> dict[SampleKey, Tombstone]:
        """Deleted samples by key."""
        return self._manifest.tombstones()

    @cached_property
    def expired_units(self) -> frozenset[int]:
        """Units that were consumed and whose files may be gone."""
        table = self._manifest.units_table()
        return frozenset(table.filter(pc.equal(table["status"], EXPIRED))["unit"].to_pylist())

    def files(self) -> list[ManifestFile]:
        """Every visible data file, in the order in which they became visible."""
        return list(self._manifest.files())

    def files_table(self) -> pa.Table:
        """The same as `files`, as an Arrow table (storage.manifest.FILES_SCHEMA); no Python object for each file."""
        return self._manifest.files_table()

    def shard_entry(self, path: str) -> ManifestFile:
        """The shard at `path`. Raises DamagedError when the manifest has no such shard: a samples file named it."""
        entry = self._manifest.file(path)
        if entry is None or entry.kind != "shard":
            raise DamagedError(f"{path}: not a shard of version {self.version} of {self.dataset.uri}")
        return entry

    def has_file(self, path: str) -> bool:
        """Whether the file is visible at this version."""
        return self._manifest.file(path) is not None

    def unit_states(self) -> dict[int, str]:
        """ "committed" or "expired" for each unit that is not pending."""
        table = self._manifest.units_table()
        return dict(zip(table["unit"].to_pylist(), table["status"].to_pylist(), strict=True))

    def pending_units(self) -> list[int]:
        """Units that are still to be generated, ascending."""
        return [unit for unit in self.dataset.units_table["unit"].to_pylist() if not self._manifest.has_unit(unit)]

    def units_table(self) -> pa.Table:
        """One row for each planned unit: the plan's columns, then status ("pending" too), version, counts and info."""
        table = self.dataset.units_table.join(self._manifest.units_table(), "unit").sort_by("unit")
        status = pc.fill_null(table["status"], "pending")
        time = pc.cast(pc.multiply(table["time"], 1e6), pa.int64(), safe=False).cast(pa.timestamp("us", tz="UTC"))
        table = table.set_column(table.schema.get_field_index("status"), "status", status)
        return table.set_column(table.schema.get_field_index("time"), "time", time)

    def accounting(self) -> Accounting:
        """Counts of expected samples by where they are; `balances` holds at every version."""
        units = self._manifest.units_table()
        committed = units.filter(pc.equal(units["status"], COMMITTED))
        expired = units.filter(pc.equal(units["status"], EXPIRED))
        expected = _sum(self.dataset.units_table["expected_samples"])
        counted = {name: _sum(committed[name]) for name in ("num_samples", "num_rejects")}
        num_expired = _sum(expired["num_samples"]) + _sum(expired["num_rejects"])
        kept = set(committed["unit"].to_pylist()) if self.tombstones else set()
        deleted = sum(tombstone.unit in kept for tombstone in self.tombstones.values())
        planned = self.dataset.units_table
        done = pc.is_in(planned["unit"], value_set=units["unit"].combine_chunks())
        return Accounting(
            expected=expected,
            samples=counted["num_samples"] - deleted,
            rejects=counted["num_rejects"],
            expired=num_expired,
            pending=_sum(planned.filter(pc.invert(done))["expected_samples"]),
            deleted=deleted,
        )

    def samples(
        self,
        columns: Sequence[str] | None = None,
        units: Collection[int] | None = None,
        keys: Collection[SampleKey] | None = None,
    ) -> pa.Table:
        """The samples table (SAMPLES_SCHEMA, or some of its columns), without deleted and expired samples.

        `units` and `keys` restrict it; only files that can hold them are opened. Rows come in order of unit, then key.
        Each file is read whole, for its digest, every time. Raises DamagedError naming the file.
        """
        return self._read("samples", columns, units, keys)

    def rejects(
        self,
        columns: Sequence[str] | None = None,
        units: Collection[int] | None = None,
        keys: Collection[SampleKey] | None = None,
    ) -> pa.Table:
        """The rejects table (REJECTS_SCHEMA), without those of expired units; see `samples`."""
        return self._read("rejects", columns, units, keys)

    def iter_samples(
        self,
        columns: Sequence[str] | None = None,
        units: Collection[int] | None = None,
        keys: Collection[SampleKey] | None = None,
    ) -> Iterator[pa.Table]:
        """The same rows as `samples`, file by file as they are stored: memory holds those of a few files."""
        return self._parts("samples", columns, units, keys)

    def superseded_files(self) -> set[str]:
        """Files that older snapshots may still read: visible once, replaced, and not because of a purge."""
        tainted = {retired.path for retired in self._manifest.tainted()}
        return self._manifest.retired().keys() - tainted

    def fetch_head(self, directory: Path) -> Path:
        """Copies the verifier head into `directory`, its digest checked, and returns its path there.

        Raises ValueError when the data set has none, DamagedError when the stored bytes are not those recorded.
        """
        head = self._manifest.head
        if head is None:
            raise ValueError(f"{self.dataset.uri} has no verifier head")
        final = directory / f"head-{short(head.digest)}.safetensors"
        if final.exists() and final.stat().st_size == head.size and file_digest(final) == head.digest:
            return final
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f"{final.name}.{secrets.token_hex(4)}.part"
        try:
            digest = FileDigest()
            with temporary.open("xb") as copy:
                for block in self._blocks(head):
                    digest.update(block)
                    copy.write(block)
                copy.flush()
                os.fsync(copy.fileno())
            check_digest(digest.text(), head.digest, head.path)
            temporary.replace(final)
        finally:
            temporary.unlink(missing_ok=True)
        return final

    def _blocks(self, entry: FileEntry) -> Iterator[bytes]:
        try:
            for start in range(0, entry.size, _COPY_BYTES):
                yield self.dataset.store.get_range(entry.path, start, min(_COPY_BYTES, entry.size - start))
        except FileNotFoundError:
            raise self.missing(entry) from None

    def _read(
        self,
        kind: str,
        columns: Sequence[str] | None,
        units: Collection[int] | None,
        keys: Collection[SampleKey] | None,
    ) -> pa.Table:
        names = _SCHEMAS[kind].names if columns is None else list(columns)
        read = list(dict.fromkeys([*names, "unit"]))
        empty = _SCHEMAS[kind].empty_table()
        parts = list(self._parts(kind, read, units, keys))
        return in_order_of_unit(pa.concat_tables([empty.select(read), *parts])).select(names)

    def _parts(
        self,
        kind: str,
        columns: Sequence[str] | None,
        units: Collection[int] | None,
        keys: Collection[SampleKey] | None,
    ) -> Iterator[pa.Table]:
        schema = _SCHEMAS[kind]
        names = schema.names if columns is None else list(columns)
        unknown = [name for name in names if name not in schema.names]
        if unknown:
            raise ValueError(f"columns {unknown} are not in the {kind} table; it has {schema.names}")
        wanted = _Wanted(self, None if units is None else set(units), None if keys is None else set(keys))
        span = (wanted.rows[0], wanted.rows[-1]) if wanted.rows else None
        entries = (
            self._manifest.files(kind, span) if units is None else iter(self._manifest.unit_files(wanted.units or ()))
        )
        files = sorted((f for f in entries if f.kind == kind and wanted.touches(f)), key=lambda f: f.units)
        read = [*names, *(name for name in [*_KEY_COLUMNS, "unit"] if name not in names)]
        parts = prefetched(
            lambda file: wanted.filter(file, self.read_file(file, read, wanted.rows)).select(names),
            files,
            depth=2 * _READ_THREADS if len(files) > 1 else 0,
            threads=min(_READ_THREADS, (os.cpu_count() or 1) + 2),
        )
        return (table for table in parts if table.num_rows)

    def read_file(
        self, entry: ManifestFile, columns: Sequence[str] | None = None, rows: Sequence[int] | None = None
    ) -> pa.Table:
        """One samples or rejects file as it is stored, deleted and expired samples included.

        `rows` restricts it to these source rows. Raises DamagedError or SchemaError naming the file.
        """
        schema = _SCHEMAS[entry.kind]
        names = schema.names if columns is None else list(columns)
        source = open_checked(self, entry)
        try:
            found = pq.read_schema(pa.BufferReader(source))
            version = (found.metadata or {}).get(_SCHEMA_KEY, b"").decode()
            known = (schema.metadata or {})[_SCHEMA_KEY].decode()
            if version != known:
                raise SchemaError(f"{entry.path}: schema version {version!r}, this code knows {known}")
            table = pq.read_table(
                pa.BufferReader(source),
                columns=names,
                filters=None if rows is None else [("row", "in", rows)],
                use_threads=False,
                page_checksum_verification=True,
            )
            return table.cast(pa.schema([schema.field(name) for name in names], metadata=schema.metadata))
        except (pa.ArrowException, OSError) as error:
            raise DamagedError(f"{entry.path}: not a {entry.kind} table: {error}") from error

    def missing(self, entry: FileEntry) -> DamagedError:
        """The error for a file that is not there: a RetiredError when this snapshot has outlived it."""
        retired = self.dataset.manifest().retired_file(entry.path)
        if retired is None:
            return DamagedError(f"{entry.path}: missing from {self.dataset.uri}")
        return RetiredError(
            f"{entry.path}: {retired.reason} at version {retired.version} and removed by gc since: "
            f"version {self.version} of {self.dataset.uri} can no longer be read in full"
        )


def in_order_of_unit(table: pa.Table) -> pa.Table:
    """The table sorted by unit; rows of one unit, which are in order of key in their one file, keep their order."""
    units = table["unit"].to_numpy()
    # Only files that compact merged can be out of order: prompts may be shuffled, and units committed late.
    return table if np.all(units[1:] >= units[:-1]) else table.take(pa.array(np.argsort(units, kind="stable")))


class _Wanted:
    """Which rows of the samples or rejects table a read wants."""

    def __init__(self, snapshot: Snapshot, units: set[int] | None, keys: set[SampleKey] | None) -> None:
        self.units = units
        self.keys = keys
        self._expired = snapshot.expired_units
        self.rows = None if keys is None else sorted({key.row for key in keys})
        self._deleted: dict[int, set[SampleKey]] = {}
        for tombstone in snapshot.tombstones.values():
            self._deleted.setdefault(tombstone.unit, set()).add(tombstone.key)

    def touches(self, entry: ManifestFile) -> bool:
        """Whether the file can hold a wanted row."""
        if self.units is not None and self.units.isdisjoint(entry.units):
            return False
        if self._expired and self._expired.issuperset(entry.units):
            return False
        if self.rows is None or entry.first_row < 0:
            return True
        return any(entry.first_row <= row <= entry.last_row for row in self.rows)

    def filter(self, entry: ManifestFile, table: pa.Table) -> pa.Table:
        """The wanted rows of the file."""
        hidden = self._expired.intersection(entry.units)
        if hidden:
            table = table.filter(pc.invert(pc.is_in(table["unit"], pa.array(sorted(hidden), pa.int64()))))
        if self.units is not None and not self.units.issuperset(entry.units):
            table = table.filter(pc.is_in(table["unit"], pa.array(sorted(self.units), pa.int64())))
        deleted: set[SampleKey] = set()
        if entry.kind == "samples":
            deleted = deleted.union(*(self._deleted.get(unit, ()) for unit in entry.units))
        if deleted or self.keys is not None:
            keys = [SampleKey(*key) for key in zip(*(table[name].to_pylist() for name in _KEY_COLUMNS), strict=True)]
            keep = [key not in deleted and (self.keys is None or key in self.keys) for key in keys]
            table = table.filter(pa.array(keep, pa.bool_()))
        return table


def open_checked(snapshot: Snapshot, entry: ManifestFile | FileEntry) -> pa.Buffer:
    """A file's bytes, their size and digest checked against the manifest; memory-mapped on a local disk.

    Raises DamagedError naming the file.
    """
    store = snapshot.dataset.store
    local = store.local_path(entry.path)
    try:
        if local is None:
            data = pa.py_buffer(store.get(entry.path))
        elif local.stat().st_size == 0:
            data = pa.py_buffer(b"")
        else:
            with pa.memory_map(os.fspath(local)) as file:
                data = file.read_buffer()
    except FileNotFoundError:
        raise snapshot.missing(entry) from None
    if data.size != entry.size:
        raise DamagedError(f"{entry.path}: {data.size} bytes, the manifest says {entry.size}")
    check_digest(bytes_digest(data), entry.digest, entry.path)
    return data


def _sum(column: Any) -> int:
    return int(pc.sum(column).as_py() or 0)
