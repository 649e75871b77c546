"""The rows that a manifest is made of, as dataclasses and as Arrow tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage.types import FileEntry, SampleKey

COMMITTED = "committed"
EXPIRED = "expired"

FILES_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("size", pa.int64()),
        ("digest", pa.string()),
        ("kind", pa.string()),
        ("num_samples", pa.int64()),
        ("rows", pa.int64()),
        ("raw_bytes", pa.int64()),
        ("shard_format", pa.string()),
        ("codec", pa.string()),
        ("first_row", pa.int64()),
        ("last_row", pa.int64()),
        ("units", pa.list_(pa.int64())),
        ("version", pa.int64()),
        ("full_at", pa.int64()),
    ]
)
UNITS_SCHEMA = pa.schema(
    [
        ("unit", pa.int64()),
        ("status", pa.string()),
        ("version", pa.int64()),
        ("num_samples", pa.int64()),
        ("num_rejects", pa.int64()),
        ("num_tokens", pa.int64()),
        ("raw_bytes", pa.int64()),
        ("writer", pa.string()),
        ("time", pa.float64()),
        ("info", pa.string()),
    ]
)
TOMBSTONES_SCHEMA = pa.schema(
    [("row", pa.int64()), ("turn", pa.int32()), ("n", pa.int32()), ("unit", pa.int64()), ("purged_at", pa.int64())]
)
RETIRED_SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("version", pa.int64()),
        ("reason", pa.string()),
        ("time", pa.float64()),
        ("units", pa.list_(pa.int64())),
    ]
)


@dataclass(frozen=True)
class ManifestFile(FileEntry):
    """A file of a snapshot, with the units it holds and the version of the log entry that made it visible."""

    units: tuple[int, ...] = ()
    version: int = 0
    full_at: int = 0  # a shard that compact closed: the target size at which nothing more fitted in

    @property
    def unit(self) -> int | None:
        """Its unit; None for a file that compact merged from several."""
        return self.units[0] if len(self.units) == 1 else None


@dataclass(frozen=True)
class UnitFiles:
    """The finished files of one unit, not visible yet. JSON-able: it travels from a replica to the committer."""

    unit: int
    attempt: int
    writer: str
    num_samples: int
    num_rejects: int
    num_tokens: int
    raw_bytes: int
    files: tuple[FileEntry, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"files": [file.to_json() for file in self.files]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> UnitFiles:
        return cls(**{**value, "files": tuple(FileEntry.from_json(file) for file in value["files"])})


@dataclass(frozen=True)
class UnitState:
    """A unit that is no longer pending."""

    unit: int
    status: str  # COMMITTED or EXPIRED
    version: int
    num_samples: int
    num_rejects: int
    num_tokens: int
    raw_bytes: int
    writer: str
    time: float
    info: str  # JSON: what the committer recorded about itself


@dataclass(frozen=True)
class Tombstone:
    """A deleted sample; `purged_at` is the version that no longer holds its bytes, 0 while they are still there."""

    key: SampleKey
    unit: int
    purged_at: int = 0


@dataclass(frozen=True)
class Retired:
    """A file that was visible once and is no more: still there until gc removes it."""

    path: str
    version: int
    reason: str  # "compacted", "purged" or "expired"
    time: float
    units: tuple[int, ...]


@dataclass
class Tables:
    """The state as Arrow tables: what a checkpoint holds."""

    files: pa.Table = field(default_factory=FILES_SCHEMA.empty_table)
    units: pa.Table = field(default_factory=UNITS_SCHEMA.empty_table)
    tombstones: pa.Table = field(default_factory=TOMBSTONES_SCHEMA.empty_table)
    retired: pa.Table = field(default_factory=RETIRED_SCHEMA.empty_table)

    @cached_property
    def file_rows(self) -> dict[str, int]:
        """Row of `files` by path."""
        return {path: row for row, path in enumerate(self.files["path"].to_pylist())}

    @cached_property
    def unit_rows(self) -> dict[int, int]:
        """Row of `units` by unit."""
        return {unit: row for row, unit in enumerate(self.units["unit"].to_pylist())}

    @cached_property
    def unit_files(self) -> dict[int, list[int]]:
        """Rows of `files` by unit."""
        units = self.files["units"].combine_chunks()
        rows: dict[int, list[int]] = {}
        for row, unit in zip(
            pc.list_parent_indices(units).to_pylist(), pc.list_flatten(units).to_pylist(), strict=True
        ):
            rows.setdefault(unit, []).append(row)
        return rows

    def file(self, row: int) -> ManifestFile:
        value = self.files.slice(row, 1).to_pylist()[0]
        return ManifestFile(**{**value, "units": tuple(value["units"])})

    def unit(self, row: int) -> UnitState:
        return UnitState(**self.units.slice(row, 1).to_pylist()[0])
