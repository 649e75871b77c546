"""Lossless coding of one sample's hidden states, each sample by itself: codecs `none` and `planes-zstd`."""

from __future__ import annotations

import numpy as np

from storage.errors import DamagedError
from storage.types import StateSpec

CODECS = ("none", "planes-zstd")

__all__ = ["CODECS", "check_codec", "check_states", "decode", "encode"]


def encode(states_TLH: np.ndarray, spec: StateSpec, codec: str) -> memoryview:
    """The stored bytes of one sample: uint16 (bfloat16, float16) or uint32 (float32) bits [rows, layers, hidden].

    With codec `none` the result is a view of `states_TLH` where that is contiguous. Raises ValueError for an unknown
    codec, another shape or another numpy dtype.
    """
    check_codec(codec)
    check_states(states_TLH, spec)
    if codec == "none":
        return np.ascontiguousarray(states_TLH).data.cast("B") if states_TLH.size else memoryview(b"")
    from storage.codec import planes  # loads numba, which is half a second for a command that reads no states

    return planes.encode(states_TLH, spec)


def decode(
    data: bytes | bytearray | memoryview,
    rows: int,
    spec: StateSpec,
    codec: str,
    *,
    where: str = "sample",
    out: np.ndarray | None = None,
) -> np.ndarray:
    """The inverse of `encode`: bits [rows, layers, hidden], written to `out` (contiguous) when that is given.

    With codec `none` and no `out` the result is a view of `data`. `where` names the sample and its file in errors.
    Raises DamagedError when the bytes are no such sample, SchemaError for a frame of a version this code does not know.
    """
    check_codec(codec)
    shape = (rows, len(spec.layer_ids), spec.hidden_size)
    view = memoryview(data).cast("B")
    if codec == "none":
        if len(view) != rows * spec.row_bytes:
            raise DamagedError(f"{where}: {len(view)} bytes are stored, {rows} rows need {rows * spec.row_bytes}")
        states_TLH = np.frombuffer(view, spec.np_dtype).reshape(shape)
        if out is None:
            return states_TLH
        np.copyto(out, states_TLH)
        return out
    from storage.codec import planes

    # Before anything of that size is allocated: `rows` may come from a damaged file.
    header = planes.read_header(view, rows, spec, where)
    if out is None:
        out = planes.empty_array(shape, spec.np_dtype)
    elif out.shape != shape or out.dtype != spec.np_dtype or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, expected contiguous {spec.np_dtype} {list(shape)}")
    planes.decode(view, header, out, spec, where)
    return out


def check_codec(codec: str) -> None:
    """Raises ValueError for a codec that does not exist."""
    if codec not in CODECS:
        raise ValueError(f"codec {codec!r} is not one of {list(CODECS)}")


def check_states(states_TLH: np.ndarray, spec: StateSpec) -> None:
    """Raises ValueError unless the array has the numpy dtype and the [rows, layers, hidden] shape of `spec`."""
    layers, hidden = len(spec.layer_ids), spec.hidden_size
    if states_TLH.dtype != spec.np_dtype or states_TLH.ndim != 3 or states_TLH.shape[1:] != (layers, hidden):
        raise ValueError(
            f"states are {states_TLH.dtype} {list(states_TLH.shape)}, expected {spec.np_dtype} (the bits of "
            f"{spec.dtype}) [rows, {layers}, {hidden}]"
        )
