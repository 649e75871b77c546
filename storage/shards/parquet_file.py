"""Parquet shards: one row per sample, its key beside its stored bytes, for tools that read Parquet and nothing else.

Each sample is a row group of its own and `states` its last column, required, plain and uncompressed. So the stored
bytes are the last bytes that a row group writes, and a reader that knows the range needs no Parquet library.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.shards.format import ShardFile, shard_metadata
from storage.types import SampleKey, ShardTarget

_COLUMNS = [
    pa.field("row", pa.int64(), nullable=False),
    pa.field("turn", pa.int32(), nullable=False),
    pa.field("n", pa.int32(), nullable=False),
    pa.field("rows", pa.int32(), nullable=False),
    pa.field("checksum", pa.string(), nullable=False),
    pa.field("states", pa.binary(), nullable=False),
]
# A page's size is a signed 32-bit number, and a value lies within one page.
_MAX_SAMPLE_BYTES = (1 << 31) - 4096
# Row group numbers are signed 16-bit numbers in the format.
_MAX_ROW_GROUPS = (1 << 15) - 1


class ParquetFile(ShardFile):
    suffix = "parquet"

    def __init__(self, path: Path, target: ShardTarget, first_nbytes: int) -> None:
        schema = pa.schema(_COLUMNS, metadata=shard_metadata(target))
        self._path = path
        path.touch(exist_ok=False)
        self._sink = pa.OSFile(str(path), "wb")
        self._ends: list[int] = []
        self._writer = pq.ParquetWriter(
            self._sink,
            schema,
            compression="none",
            use_dictionary=False,
            write_statistics=[field.name for field in _COLUMNS if field.name != "states"],
            column_encoding={field.name: "PLAIN" for field in _COLUMNS},
            data_page_version="1.0",
        )

    def has_room(self, key: SampleKey, rows: int, nbytes: int) -> bool:
        return len(self._ends) < _MAX_ROW_GROUPS

    def append(self, key: SampleKey, data: memoryview, rows: int, checksum: Callable[[], str]) -> int:
        if len(data) > _MAX_SAMPLE_BYTES:
            raise ValueError(
                f"sample {key}: {len(data)} bytes of states do not fit a Parquet page (at most {_MAX_SAMPLE_BYTES}): "
                "use shard format safetensors, or shorter answers"
            )
        bounds = pa.py_buffer(np.array([0, len(data)], np.int32))
        states = pa.Array.from_buffers(pa.binary(), 1, [None, bounds, pa.py_buffer(data)])
        columns = [[key.row], [key.turn], [key.n], [rows], [checksum()]]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, _COLUMNS, strict=False)]
        self._writer.write_table(pa.Table.from_arrays([*arrays, states], schema=self._writer.schema))
        end = self._sink.tell()
        self._ends.append(end)
        return end - len(data)

    @property
    def size(self) -> int:
        return self._sink.tell()

    def finish(self) -> None:
        self._writer.close()
        self._sink.close()
        # The ranges in the receipts rest on how the library lays a row group out: look once at what it wrote.
        metadata = pq.read_metadata(self._path)
        for group, end in enumerate(self._ends):
            column = metadata.row_group(group).column(len(_COLUMNS) - 1)
            assert column.data_page_offset + column.total_compressed_size == end, (
                "states are not last in their row group"
            )

    def abort(self) -> None:
        # The library's writer would write its footer when it is collected.
        self._writer.is_open = False
        self._sink.close()
