"""Narrow columns of many sample files in one, so that a query does not open 10,000 small Parquet files.

An index file is derived data beside the checkpoints: everything of the samples table but token ids, loss spans and
texts, for some sample files, which it names with their digests. A reader takes from it the rows of the files that its
snapshot shows and reads the other files themselves, so an index can be missing, stale or ahead and the answer is the
same. A damaged one, or one that was copied from another data set, is passed over with a warning that names it; one of a
newer schema is refused.

Rows are in order of key, in small row groups, so that one sample costs one row group whatever order prompts came in.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import xxhash

from storage.errors import DamagedError, SchemaError
from storage.store import Store
from storage.types import SAMPLES_SCHEMA

SCHEMA = 2
FOLDER = "checkpoints"
WIDE_COLUMNS = frozenset({"token_ids", "loss_spans", "text", "reasoning_text"})
NARROW_COLUMNS = [name for name in SAMPLES_SCHEMA.names if name not in WIDE_COLUMNS]
_NARROW_SCHEMA = pa.schema([SAMPLES_SCHEMA.field(name) for name in NARROW_COLUMNS])

_MAGIC = b"headrace samples index"
_HEAD_BYTES = 128
_NAME = re.compile(rf"{FOLDER}/(\d{{20}})-[0-9a-f]{{16}}\.samples")
_FILE = "index_file"  # which of the covered files a row comes from
_FILE_FIELD = pa.field(_FILE, pa.int32())
_META_KEY = b"headrace.index"
_ROW_GROUP_ROWS = 1 << 13

_log = logging.getLogger(__name__)


def index_path(version: int, encoded: bytes | pa.Buffer) -> str:
    """Where an index written at `version` lies: its name holds a digest, so a damaged one is never in the way."""
    return f"{FOLDER}/{version:020d}-{xxhash.xxh3_64_hexdigest(memoryview(encoded))}.samples"


def index_version(path: str) -> int | None:
    """The version that the name of an index tells, None for anything else."""
    match = _NAME.fullmatch(path)
    return int(match[1]) if match else None


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """One index file, decoded no further than asked for."""

    root: str  # digest of dataset.json: which data set it is of
    version: int  # of the data set, when it was written
    files: dict[str, str]  # path -> digest of the sample files that it covers
    num_rows: int
    _data: pa.Buffer  # Parquet

    @cached_property
    def _fragment(self) -> ds.ParquetFileFragment:
        # Keeps the parsed footer and skips row groups by their statistics.
        return ds.ParquetFileFormat().make_fragment(self._data)

    @classmethod
    def build(cls, root: str, version: int, tables: Iterable[tuple[str, str, pa.Table]]) -> SampleIndex:
        """From path, digest and narrow columns (all rows) of each sample file."""
        files: dict[str, str] = {}
        parts: list[pa.Table] = [_NARROW_SCHEMA.append(_FILE_FIELD).empty_table()]
        for path, digest, table in tables:
            part = table.select(NARROW_COLUMNS).cast(_NARROW_SCHEMA)
            parts.append(part.append_column(_FILE_FIELD, pa.array(np.full(len(part), len(files), np.int32))))
            files[path] = digest
        table = pa.concat_tables(parts).sort_by([(name, "ascending") for name in ("row", "turn", "n")])
        content = {"root": root, "version": version, "files": files}
        table = table.replace_schema_metadata({_META_KEY: json.dumps(content)})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", row_group_size=_ROW_GROUP_ROWS)
        return cls(root, version, files, table.num_rows, sink.getvalue())

    def encode(self) -> bytes:
        """One line (magic, schema version, xxh3_128 of it and the rest), then Parquet."""
        digest = _digest(b"%d" % SCHEMA, self._data)
        return b"%s %d %s\n" % (_MAGIC, SCHEMA, digest) + self._data.to_pybytes()

    @classmethod
    def decode(cls, path: str, data: bytes | pa.Buffer) -> SampleIndex:
        """Raises DamagedError or SchemaError naming the file."""
        data = pa.py_buffer(data)
        head = data[: min(_HEAD_BYTES, data.size)].to_pybytes().partition(b"\n")[0]
        magic, _, tail = head.rpartition(b" ")[0].rpartition(b" ")
        if magic != _MAGIC or not tail.isdigit():
            raise DamagedError(f"{path}: not an index of samples")
        rest = data[len(head) + 1 :]
        # Of the version too: a flipped bit must not read as "from a newer version".
        if _digest(tail, rest) != head.rpartition(b" ")[2]:
            raise DamagedError(f"{path}: its bytes do not match its digest")
        if int(tail) > SCHEMA:
            raise SchemaError(f"{path}: schema version {int(tail)}, this code knows {SCHEMA}: use a newer headrace")
        if int(tail) < SCHEMA:
            raise DamagedError(f"{path}: schema version {int(tail)} is no longer read, the current one is {SCHEMA}")
        metadata = pq.read_metadata(pa.BufferReader(rest))
        content = json.loads((metadata.metadata or {})[_META_KEY])
        if index_path(content["version"], data) != path:
            raise DamagedError(f"{path}: holds another index than its name says: the file was renamed or swapped")
        return cls(content["root"], content["version"], content["files"], metadata.num_rows, rest)

    def read(
        self, columns: Sequence[str], paths: Collection[str], where: ds.Expression | None = None
    ) -> Iterator[pa.Table]:
        """The rows of the covered files `paths` that match `where`, with these narrow columns, some at a time."""
        is_part = len(paths) < len(self.files)
        wanted = [*columns, _FILE] if is_part else list(columns)
        keep = np.array([path in paths for path in self.files], bool) if is_part else np.array([], bool)
        for batch in self._fragment.to_batches(columns=wanted, filter=where, batch_readahead=2):
            table = pa.Table.from_batches([batch])
            if is_part:
                table = table.filter(pa.array(keep[table[_FILE].to_numpy()])).select(list(columns))
            if table.num_rows:
                yield table.replace_schema_metadata(None)

    def tables(self, paths: Collection[str]) -> Iterator[tuple[str, str, pa.Table]]:
        """What `build` takes, of the covered files `paths`; all rows of the index are held meanwhile."""
        table = self._fragment.to_table()
        table = table.take(pa.array(np.argsort(table[_FILE].to_numpy(), kind="stable")))
        bounds = np.searchsorted(table[_FILE].to_numpy(), np.arange(len(self.files) + 1))
        for number, (path, digest) in enumerate(self.files.items()):
            if path in paths:
                yield path, digest, table.slice(bounds[number], bounds[number + 1] - bounds[number])


def without_repeats(indexes: Iterable[SampleIndex]) -> list[SampleIndex]:
    """The largest indexes that together cover every file that any of them covers."""
    covered: set[tuple[str, str]] = set()
    kept: list[SampleIndex] = []
    for index in sorted(indexes, key=lambda index: -len(index.files)):
        if not covered.issuperset(index.files.items()):
            covered.update(index.files.items())
            kept.append(index)
    return kept


def _digest(schema: bytes, rest: pa.Buffer) -> bytes:
    digest = xxhash.xxh3_128(schema + b"\n")
    digest.update(memoryview(rest))
    return digest.hexdigest().encode("ascii")


class IndexCache:
    """The usable index files of one store, each read and checked once."""

    def __init__(self, store: Store, root: str) -> None:
        self._store = store
        self._root = root
        self._known: dict[str, SampleIndex | None] = {}  # None: of no use
        self._lock = threading.Lock()

    def get(self) -> list[SampleIndex]:
        """Oldest first. One listing, and a read for each file that is new."""
        paths = sorted(info.path for info in self._store.list(FOLDER) if index_version(info.path) is not None)
        with self._lock:
            for path in paths:
                if path not in self._known:
                    self._known[path] = self._read(path)
            return [index for path in paths if (index := self._known[path]) is not None]

    def _read(self, path: str) -> SampleIndex | None:
        local = self._store.local_path(path)
        try:
            if local is None:
                data = pa.py_buffer(self._store.get(path))
            else:
                with pa.memory_map(os.fspath(local)) as file:
                    data = file.read_buffer()
            index = SampleIndex.decode(path, data)
            if index.root != self._root:
                raise DamagedError(f"{path}: belongs to another data set")
            return index
        except (DamagedError, FileNotFoundError) as error:
            _log.warning("%s: index passed over, sample files are read instead: %s", self._store.uri, error)
            return None
