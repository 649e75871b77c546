"""Narrow columns of many sample files in one, so that a query does not open 10,000 small Parquet files.

An index file is derived data beside the checkpoints: everything of the samples table but token ids, loss spans and
texts, for the sample files (named with their digests) that no earlier index covers. A reader takes from it the rows of
the files that its snapshot shows and reads the other files themselves, so an index can be missing, stale or ahead and
the answer is the same. A damaged one is passed over with a warning that names it; one of a newer schema is refused.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import xxhash

from storage.errors import DamagedError, SchemaError
from storage.store import Store
from storage.types import SAMPLES_SCHEMA, FileEntry

SCHEMA = 1
FOLDER = "checkpoints"
WIDE_COLUMNS = frozenset({"token_ids", "loss_spans", "text", "reasoning_text"})
NARROW_COLUMNS = [name for name in SAMPLES_SCHEMA.names if name not in WIDE_COLUMNS]
_NARROW_SCHEMA = pa.schema([SAMPLES_SCHEMA.field(name) for name in NARROW_COLUMNS])

_MAGIC = b"headrace samples index"
_HEAD_BYTES = 128
_NAME = re.compile(rf"{FOLDER}/\d{{20}}-[0-9a-f]{{16}}\.samples")
_FILE = "index_file"  # which of the covered files a row comes from
_FILES_KEY = b"headrace.index_files"

_log = logging.getLogger(__name__)


def index_path(version: int, encoded: bytes) -> str:
    """Where an index written at `version` lies: its name holds a digest, so a damaged one is never in the way."""
    return f"{FOLDER}/{version:020d}-{xxhash.xxh3_64_hexdigest(encoded)}.samples"


@dataclass(frozen=True)
class SampleIndex:
    """One index file, decoded no further than asked for."""

    files: dict[str, str]  # path -> digest of the sample files that it covers
    _data: pa.Buffer  # Parquet

    @cached_property
    def _fragment(self) -> ds.Fragment:
        # Keeps the parsed footer and skips row groups by their statistics.
        return ds.ParquetFileFormat().make_fragment(self._data)

    @classmethod
    def build(cls, tables: Iterable[tuple[FileEntry, pa.Table]]) -> SampleIndex:
        """From sample files and the narrow columns of each, all rows, in the order given."""
        files: dict[str, str] = {}
        parts: list[pa.Table] = []
        for entry, table in tables:
            part = table.select(NARROW_COLUMNS).cast(_NARROW_SCHEMA)
            parts.append(part.append_column(_FILE, pa.array(np.full(len(part), len(files), np.int32))))
            files[entry.path] = entry.digest
        schema = _NARROW_SCHEMA.append(pa.field(_FILE, pa.int32()))
        table = pa.concat_tables(parts) if parts else schema.empty_table()
        table = table.replace_schema_metadata({_FILES_KEY: json.dumps(files)})
        sink = io.BytesIO()
        pq.write_table(table, sink, compression="zstd", row_group_size=1 << 15)
        return cls(files, pa.py_buffer(sink.getvalue()))

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
        if int(tail) != SCHEMA:
            raise SchemaError(f"{path}: schema version {int(tail)}, this code knows {SCHEMA}: use a newer headrace")
        metadata = pq.read_metadata(pa.BufferReader(rest)).metadata or {}
        return cls(json.loads(metadata[_FILES_KEY]), rest)

    def read(self, columns: Sequence[str], paths: set[str], where: ds.Expression | None = None) -> pa.Table:
        """The rows of the covered files `paths` that match `where`, with these narrow columns."""
        wanted = [*columns, _FILE] if len(paths) < len(self.files) else list(columns)
        table = self._fragment.to_table(columns=wanted, filter=where)
        if _FILE in wanted:
            keep = np.array([path in paths for path in self.files], bool)
            if not keep.all():
                table = table.filter(pa.array(keep[table[_FILE].to_numpy()]))
            table = table.select(list(columns))
        return table.replace_schema_metadata(None)


def _digest(schema: bytes, rest: pa.Buffer) -> bytes:
    digest = xxhash.xxh3_128(schema + b"\n")
    digest.update(memoryview(rest))
    return digest.hexdigest().encode("ascii")


class IndexCache:
    """The usable index files of one store, each read and checked once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, SampleIndex | None] = {}  # None: damaged
        self._lock = threading.Lock()

    def get(self) -> list[SampleIndex]:
        """Oldest first. One listing, and a read for each file that is new."""
        paths = sorted(info.path for info in self._store.list(FOLDER) if _NAME.fullmatch(info.path))
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
            return SampleIndex.decode(path, data)
        except (DamagedError, FileNotFoundError) as error:
            _log.warning("%s: index passed over, sample files are read instead: %s", self._store.uri, error)
            return None
