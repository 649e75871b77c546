"""The frame of codec `planes-zstd`: one sample's states as an incompressible and a compressed plane.

A 16-bit float has a byte that does not compress (sign and low mantissa bits) beside the byte with the exponent. In
hidden states that byte is predictable: each channel has its own scale, and so has each row. With one offset per channel
and one per row subtracted, all channels share one narrow distribution and a single Huffman table fits them all. zstd
serves as that Huffman coder, with parameters that keep it from looking for matches, of which there are none.

On SmolLM2 states this takes 2.65 bits for the exponent, where a table for each channel would take 2.53 without counting
the tables: a ratio of 1.50 where 1.52 is the bound. No byte is transposed.

A frame, all integers little-endian:

    header      64 bytes, see _HEADER; the last four are the xxh32 of the others
    low plane   u8 [rows, layers, hidden]: the sign and bits 0 to 6, raw
    exponents   for each run of rows_per_chunk rows, for each layer: u32 size, then a zstd frame of u8 [run, hidden]
    offsets     zstd frame of u8 [layers, hidden], each channel's offset less its offset in the layer before, then
                u8 [layers, rows], the offset of each row; all modulo 256, as every sum with them is
    tail        float32 only: u16 [rows, layers, hidden], the low halves, raw or (flag 1) one zstd frame; the high
                halves are coded as above
"""

from __future__ import annotations

import math
import struct
import threading
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash
import zstandard
from numpy.typing import DTypeLike

from storage.codec import kernels
from storage.errors import DamagedError, SchemaError
from storage.types import StateSpec

_MAGIC = b"HRPZ"
_VERSION = 1
# magic, version, dtype, flags, rows, layers, hidden, rows_per_chunk; bytes of low plane, exponents, offsets, tail
_HEADER = struct.Struct("<4sBBBxQIIIQQQQ")
_HEADER_BYTES = _HEADER.size + 4
_FLAG_TAIL_ZSTD = 1
_DTYPE_CODES = {"bfloat16": 1, "float16": 2, "float32": 3}
# Mantissa bits in the exponent byte: the exponent has 8 bits in bfloat16 and float32 but 5 in float16.
_SHIFTS = {"bfloat16": 0, "float16": 3, "float32": 0}

# Exponents of one layer that are compressed together: two zstd blocks, each with a Huffman table of its own.
_CHUNK_ELEMENTS = 256 * 1024


def empty_array(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """As numpy.empty, from Arrow's memory pool, which uses its pages again: fresh ones from the system cost half as
    much as the coding."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(pa.allocate_buffer(num_bytes), dtype).reshape(shape)


@dataclass(frozen=True)
class Header:
    """A checked frame header: where the planes are."""

    flags: int
    rows_per_chunk: int
    low_bytes: int
    exponent_bytes: int
    offsets_bytes: int
    tail_bytes: int


def encode(states_TLH: np.ndarray, spec: StateSpec) -> memoryview:
    """One sample's frame. `states_TLH` is checked by the caller."""
    rows, layers, hidden = states_TLH.shape
    shift = _SHIFTS[spec.dtype]
    rows_per_chunk = max(1, _CHUNK_ELEMENTS // hidden)
    if spec.dtype == "float32":
        high_TLH = (states_TLH >> 16).astype(np.uint16)
        tail, flags = _encode_tail(states_TLH)
    else:
        high_TLH, tail, flags = np.ascontiguousarray(states_TLH), b"", 0
    compressor = _compressor()
    channel_LH = np.empty((layers, hidden), np.uint8)
    row_LT = np.empty((layers, rows), np.uint8)
    for layer in range(layers if rows else 0):
        channel_LH[layer] = kernels.channel_offsets(high_TLH, layer, shift)

    # Everything is written to its place in the frame; what does not compress grows by less than a hundredth.
    num_frames = layers * -(-rows // rows_per_chunk)
    bound = _HEADER_BYTES + 2 * high_TLH.size + high_TLH.size // 64 + 1024 * (num_frames + 1) + len(tail)
    frame = _Appender(empty_array((bound + channel_LH.size + row_LT.size,), np.uint8), _HEADER_BYTES + high_TLH.size)
    low_TLH = frame.buffer[_HEADER_BYTES : frame.end].reshape(high_TLH.shape)
    chunk_TH = empty_array((min(rows, rows_per_chunk), hidden), np.uint8)
    for start in range(0, rows, rows_per_chunk):
        stop = min(rows, start + rows_per_chunk)
        exponent_TH = chunk_TH[: stop - start]
        for layer in range(layers):
            kernels.split(high_TLH[start:stop], layer, exponent_TH, low_TLH[start:stop])
            kernels.centre(exponent_TH, channel_LH[layer], shift, row_LT[layer, start:stop])
            packed = compressor.compress(exponent_TH.data)
            frame.append(len(packed).to_bytes(4, "little"))
            frame.append(packed)
    exponent_bytes = frame.end - _HEADER_BYTES - high_TLH.size

    channel_LH[1:] = np.diff(channel_LH, axis=0)
    offsets = compressor.compress(channel_LH.tobytes() + row_LT.tobytes()) if rows else b""
    frame.append(offsets)
    frame.append(tail)
    header = _HEADER.pack(
        _MAGIC, _VERSION, _DTYPE_CODES[spec.dtype], flags, rows, layers, hidden, rows_per_chunk,
        high_TLH.size, exponent_bytes, len(offsets), len(tail),
    )  # fmt: skip
    frame.buffer[:_HEADER_BYTES] = np.frombuffer(header + xxhash.xxh32(header).digest(), np.uint8)
    return frame.buffer[: frame.end].data


@dataclass
class _Appender:
    """A buffer that is filled from `end` on."""

    buffer: np.ndarray
    end: int

    def append(self, data: bytes) -> None:
        self.buffer[self.end : self.end + len(data)] = np.frombuffer(data, np.uint8)
        self.end += len(data)


def read_header(frame: memoryview, rows: int, spec: StateSpec, where: str) -> Header:
    """The header of a frame that must hold `rows` rows of `spec`, all sizes checked against the frame's length."""
    if len(frame) < _HEADER_BYTES:
        raise DamagedError(f"{where}: {len(frame)} bytes are stored, a planes-zstd frame has at least {_HEADER_BYTES}")
    head = frame[: _HEADER.size]
    magic, version, *fields = _HEADER.unpack(head)
    if magic != _MAGIC:
        raise DamagedError(f"{where}: the bytes are no planes-zstd frame (they begin with {magic!r})")
    if xxhash.xxh32(head).digest() != bytes(frame[_HEADER.size : _HEADER_BYTES]):
        raise DamagedError(f"{where}: the frame header does not match its checksum")
    if version != _VERSION:
        raise SchemaError(f"{where}: planes-zstd frame version {version} is not known, only {_VERSION}")
    dtype, flags, *shape, rows_per_chunk, low_bytes, exponent_bytes, offsets_bytes, tail_bytes = fields
    expected = [rows, len(spec.layer_ids), spec.hidden_size]
    if shape != expected or dtype != _DTYPE_CODES[spec.dtype]:
        names = {code: name for name, code in _DTYPE_CODES.items()}
        raise DamagedError(
            f"{where}: the frame holds {names.get(dtype, dtype)} {shape}, expected {spec.dtype} {expected}"
        )
    total = _HEADER_BYTES + low_bytes + exponent_bytes + offsets_bytes + tail_bytes
    if low_bytes != rows * len(spec.layer_ids) * spec.hidden_size or rows_per_chunk < 1 or total != len(frame):
        raise DamagedError(f"{where}: the frame's planes need {total} bytes, {len(frame)} are stored")
    return Header(flags, rows_per_chunk, low_bytes, exponent_bytes, offsets_bytes, tail_bytes)


def decode(frame: memoryview, header: Header, out_TLH: np.ndarray, spec: StateSpec, where: str) -> None:
    """Writes the frame's states to `out_TLH` [rows, layers, hidden], which is contiguous."""
    rows, layers, hidden = out_TLH.shape
    if not rows:
        return
    low_end = _HEADER_BYTES + header.low_bytes
    offsets_at = low_end + header.exponent_bytes
    tail_at = offsets_at + header.offsets_bytes
    low_TLH = np.frombuffer(frame[_HEADER_BYTES:low_end], np.uint8).reshape(out_TLH.shape)
    offsets = np.frombuffer(_decompress(frame[offsets_at:tail_at], layers * (hidden + rows), where), np.uint8)
    channel_LH = offsets[: layers * hidden].reshape(layers, hidden).cumsum(axis=0, dtype=np.uint8)
    row_LT = offsets[layers * hidden :].reshape(layers, rows)

    high_TLH = out_TLH if spec.dtype != "float32" else np.empty(out_TLH.shape, np.uint16)
    at = low_end
    for start in range(0, rows, header.rows_per_chunk):
        stop = min(rows, start + header.rows_per_chunk)
        for layer in range(layers):
            end = at + 4 + int.from_bytes(frame[at : at + 4], "little")
            if end > offsets_at:
                raise DamagedError(f"{where}: the plane of exponents ends inside a chunk")
            plane = np.frombuffer(_decompress(frame[at + 4 : end], (stop - start) * hidden, where), np.uint8)
            kernels.join(
                plane.reshape(-1, hidden), channel_LH[layer], row_LT[layer, start:stop], low_TLH[start:stop], layer,
                high_TLH[start:stop],
            )  # fmt: skip
            at = end
    if at != offsets_at:
        raise DamagedError(f"{where}: {offsets_at - at} bytes follow the last chunk of exponents")
    if spec.dtype == "float32":
        _decode_tail(frame[tail_at:], header.flags, high_TLH, out_TLH, where)


def _encode_tail(states_TLH: np.ndarray) -> tuple[bytes, int]:
    """The low halves of float32 bits: zeros when a bf16 model's states were widened, otherwise incompressible."""
    raw = states_TLH.astype(np.uint16).tobytes()
    packed = _compressor().compress(raw)
    return (packed, _FLAG_TAIL_ZSTD) if len(packed) < 0.98 * len(raw) else (raw, 0)


def _decode_tail(tail: memoryview, flags: int, high_TLH: np.ndarray, out_TLH: np.ndarray, where: str) -> None:
    raw = _decompress(tail, 2 * out_TLH.size, where) if flags & _FLAG_TAIL_ZSTD else tail
    if len(raw) != 2 * out_TLH.size:
        raise DamagedError(f"{where}: the plane of low halves has {len(raw)} bytes, expected {2 * out_TLH.size}")
    np.left_shift(high_TLH, 16, out=out_TLH, dtype=np.uint32)
    np.bitwise_or(out_TLH, np.frombuffer(raw, np.uint16).reshape(out_TLH.shape), out=out_TLH)


_ZSTD = pa.Codec("zstd")

# zstd contexts belong to one thread at a time and cost more to make than a small sample costs to code.
_contexts = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    compressor: zstandard.ZstdCompressor | None = getattr(_contexts, "compressor", None)
    if compressor is None:
        # Huffman coding, in effect: a hash of 64 entries and no match below 7 bytes. Level 1 with its usual tables is a
        # third as fast and 0.2 bits worse, because it finds short matches that cost more than the literals.
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, chain_log=6, search_log=1, min_match=7,
            write_content_size=1,
        )  # fmt: skip
        compressor = _contexts.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return compressor


def _decompress(packed: memoryview, size: int, where: str) -> pa.Buffer:
    """The `size` bytes of a zstd frame. A frame that claims another size is refused before memory is taken for it."""
    try:
        if zstandard.frame_content_size(packed) != size:
            raise DamagedError(f"{where}: a compressed plane does not hold the {size} bytes that it should")
        # Into memory of Arrow's pool, see `empty_array`.
        return _ZSTD.decompress(packed, size)
    except (zstandard.ZstdError, pa.ArrowException, OSError) as error:
        raise DamagedError(f"{where}: a compressed plane is damaged ({error})") from error
