"""The passes of `planes-zstd` over the bits, compiled by numba: split 16-bit floats into two bytes each, centre the
bytes with the exponent, and the inverse of both.

Compiled because the codec runs beside the verifier's forward pass: as numpy calls the same passes took three times as
long. The inner loops run over contiguous channels with 8- and 16-bit integers only, which LLVM turns into vector
instructions; the global interpreter lock is released. The offsets are heuristics: any value decodes to the same states,
better ones compress better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types

# Rows, spread over the sample, that a channel's offset is taken from at most: more gains under 0.005 bits.
SAMPLED_ROWS = 512
# Exponent steps, either side, that count in the mean of a channel. Means of clipped values come within 0.02 bits of the
# best offsets there are at a fraction of the cost of medians; without clipping, the first token, whose norm is some
# hundred times that of the others, spoils them.
_CLIP = 6


# Contiguous arrays that a kernel only reads: numba takes a read-only array, such as a view of bytes, for no other kind.
_BYTES_N = types.Array(types.uint8, 1, "C", readonly=True)
_BYTES_TH = types.Array(types.uint8, 2, "C", readonly=True)
_BYTES_TLH = types.Array(types.uint8, 3, "C", readonly=True)
_BITS_TLH = types.Array(types.uint16, 3, "C", readonly=True)


def _compiled(*arguments: types.Type) -> Callable[[Callable[..., None]], Any]:
    """Compiles a kernel at import, and keeps its machine code where a directory for that can be written."""

    def compile_kernel(function: Callable[..., None]) -> Any:
        signature = types.void(*arguments)
        options = {"nogil": True, "error_model": "numpy"}
        try:
            return numba.njit(signature, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            # A read-only installation without a home directory: every process compiles for itself, about a second.
            return numba.njit(signature, **options)(function)

    return compile_kernel


@_compiled(_BITS_TLH, types.int64, types.uint8[:, ::1], types.uint8[:, :, ::1])
def split(x_TLH: np.ndarray, layer: int, exponent_TH: np.ndarray, low_TLH: np.ndarray) -> None:
    """One layer's float bits -> bits 7 to 14 (the byte with the exponent), and the sign with bits 0 to 6."""
    for t in range(exponent_TH.shape[0]):
        x_H, exponent_H, low_H = x_TLH[t, layer], exponent_TH[t], low_TLH[t, layer]
        for h in range(len(exponent_H)):
            x = x_H[h]
            exponent_H[h] = np.uint8(x >> np.uint16(7))
            low_H[h] = np.uint8((x & np.uint16(0x7F)) | ((x >> np.uint16(8)) & np.uint16(0x80)))


@_compiled(_BYTES_TH, _BYTES_N, _BYTES_N, _BYTES_TLH, types.int64, types.uint16[:, :, ::1])
def join(
    centred_TH: np.ndarray,
    channel_H: np.ndarray,
    row_T: np.ndarray,
    low_TLH: np.ndarray,
    layer: int,
    x_TLH: np.ndarray,
) -> None:
    """The inverse of `centre` and `split`: writes one layer of `x_TLH`. Sums with offsets are modulo 256."""
    for t in range(centred_TH.shape[0]):
        centred_H, low_H, x_H = centred_TH[t], low_TLH[t, layer], x_TLH[t, layer]
        row = row_T[t]
        for h in range(len(centred_H)):
            exponent = np.uint16(np.uint8(centred_H[h] + np.uint8(row + channel_H[h])))
            low = np.uint16(low_H[h])
            sign = np.uint16((low & np.uint16(0x80)) << np.uint16(8))
            x_H[h] = np.uint16(exponent << np.uint16(7)) | np.uint16(low & np.uint16(0x7F)) | sign


@_compiled(_BITS_TLH, types.int64, types.int64, types.uint8, types.uint8, types.uint16[::1])
def _clipped_sums(x_TLH: np.ndarray, layer: int, step: int, shift: int, base: int, sum_H: np.ndarray) -> None:
    """Per channel, the sum over every `step`-th row of clip(exponent - base, 0, 2 * _CLIP), in steps of 1 << shift."""
    top = np.uint8(base + 2 * _CLIP)
    for t in range(0, x_TLH.shape[0], step):
        x_H = x_TLH[t, layer]
        for h in range(len(sum_H)):
            exponent = np.uint8(np.uint8(x_H[h] >> np.uint16(7)) >> shift)
            sum_H[h] += np.uint16(np.uint8(min(max(exponent, np.uint8(base)), top)) - np.uint8(base))


@_compiled(types.uint8[:, ::1], _BYTES_N, types.uint8, types.uint8[::1])
def centre(exponent_TH: np.ndarray, channel_H: np.ndarray, shift: int, row_T: np.ndarray) -> None:
    """Subtracts from exponent bytes, in place, each channel's offset and each row's, which is chosen here: `row_T`.

    A row's offset is its mean distance from the rows' mean of that, in whole steps of 1 << shift.
    """
    rows, hidden = exponent_TH.shape
    mean_T = np.empty(rows, np.float64)
    total = 0.0
    for t in range(rows):
        exponent_H = exponent_TH[t]
        clipped = np.int32(0)
        for h in range(hidden):
            distance = np.int8(np.uint8(exponent_H[h] - channel_H[h])) >> np.int8(shift)
            clipped += np.int32(min(max(distance, np.int8(1 - _CLIP)), np.int8(_CLIP)))
        mean_T[t] = clipped / hidden
        total += mean_T[t]
    for t in range(rows):
        row = np.uint8(np.int64(np.rint(mean_T[t] - total / rows)) << shift)
        row_T[t] = row
        exponent_H = exponent_TH[t]
        for h in range(hidden):
            exponent_H[h] = np.uint8(exponent_H[h] - np.uint8(row + channel_H[h]))


def channel_offsets(x_TLH: np.ndarray, layer: int, shift: int) -> np.ndarray:
    """One offset (uint8 [hidden]) per channel of one layer of float bits, in steps of 1 << shift.

    Rounded down, not to the nearest: that leaves a distribution with a single mode, whose Huffman code comes closer to
    its entropy (0.015 bits on SmolLM2 states).
    """
    rows, _, hidden = x_TLH.shape
    exponent_TH = (x_TLH[:: -(-rows // 8), layer] >> 7).astype(np.uint8) >> shift
    counts = np.bincount(exponent_TH.ravel(), minlength=256).cumsum()
    median = int(np.searchsorted(counts, counts[-1] / 2))
    base = min(max(0, median - _CLIP), 255 - 2 * _CLIP)
    step = -(-rows // SAMPLED_ROWS)
    sum_H = np.zeros(hidden, np.uint16)
    _clipped_sums(x_TLH, layer, step, shift, base, sum_H)
    return ((sum_H // len(range(0, rows, step)) + base) << shift).astype(np.uint8)
