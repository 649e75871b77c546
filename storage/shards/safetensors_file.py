"""safetensors shards: one tensor per sample, named after its key, streamed to disk once.

The format has its header in front: 8 bytes of length, JSON, then the tensors without gaps. Space for the header is
reserved when the file is made and filled in at the end; JSON may end in blanks, so what is left over is blank. With
codec `none` a tensor is BF16, F16 or F32 [rows, layers, hidden], which any safetensors reader (and a memory map) takes
as it is; with another codec it is U8 [nbytes].
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from storage.shards.format import ShardFile, shard_metadata
from storage.types import SampleKey, ShardTarget

_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# The first tensor starts at a multiple of this; the sizes of rows keep at least the alignment of the element.
_ALIGNMENT = 64
# Space for the header: 4 KiB hold some 40 samples, 64 KiB some 700, after which the shard closes below its target size.
_MIN_HEADER_BYTES = 4096
_MAX_HEADER_BYTES = 65536
# About what one sample takes of it: "r1000000.t0.n0":{"dtype":"BF16","shape":[2048,4,7168],"data_offsets":[...]},
_ENTRY_BYTES = 100


class SafetensorsFile(ShardFile):
    suffix = "safetensors"

    def __init__(self, path: Path, target: ShardTarget, first_nbytes: int) -> None:
        self._spec = target.spec
        self._codec = target.codec
        self._entries = [f'"__metadata__":{json.dumps(shard_metadata(target), separators=(",", ":"))}']
        self._used_bytes = len(self._entries[0]) + 2
        # Enough if all samples are like the first.
        expected = self._used_bytes + (2 + target.target_bytes // max(1, first_nbytes)) * _ENTRY_BYTES
        reserved = min(max(_MIN_HEADER_BYTES, expected), max(_MAX_HEADER_BYTES, self._used_bytes + _MIN_HEADER_BYTES))
        self._data_start = -(-(8 + reserved) // _ALIGNMENT) * _ALIGNMENT
        self._end = self._data_start
        # Unbuffered: samples are large, and after a failed write nothing is left to be flushed.
        self._file = path.open("xb", buffering=0)
        self._file.seek(self._data_start)

    def has_room(self, key: SampleKey, rows: int, nbytes: int) -> bool:
        entry = self._entry(key, rows, nbytes)
        return 8 + self._used_bytes + len(entry) + 1 <= self._data_start

    def append(self, key: SampleKey, data: memoryview, rows: int, checksum: Callable[[], str]) -> int:
        entry = self._entry(key, rows, len(data))
        offset = self._end
        self._write(data)
        self._end += len(data)
        self._entries.append(entry)
        self._used_bytes += len(entry) + 1
        return offset

    @property
    def size(self) -> int:
        return self._end

    def finish(self) -> None:
        header_bytes = self._data_start - 8
        header = ("{" + ",".join(self._entries) + "}").encode().ljust(header_bytes)
        assert len(header) == header_bytes
        self._file.seek(0)
        self._write(memoryview(header_bytes.to_bytes(8, "little") + header))
        self._file.close()

    def abort(self) -> None:
        self._file.close()

    def _write(self, data: memoryview) -> None:
        # One call writes at most 2 GiB on Linux, and less when the disk fills up.
        while len(data):
            data = data[self._file.write(data) :]

    def _entry(self, key: SampleKey, rows: int, nbytes: int) -> str:
        start = self._end - self._data_start
        if self._codec == "none":
            dtype, shape = _DTYPE_NAMES[self._spec.dtype], [rows, len(self._spec.layer_ids), self._spec.hidden_size]
        else:
            dtype, shape = "U8", [nbytes]
        value = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + nbytes]}
        return f'"{key.name}":{json.dumps(value, separators=(",", ":"))}'
