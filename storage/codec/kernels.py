"""numpy kernels of `planes-zstd`: split 16-bit floats into two bytes each, and centre the bytes with the exponent.

Every operation runs over contiguous runs of a block that stays in the second-level cache, in a form that numpy
vectorises (minimum and maximum are six times slower against a scalar than against an array). The offsets are
heuristics: any value decodes to the same states, better ones compress better.
"""

from __future__ import annotations

import numpy as np

# Rows (spread over the sample) and channels that offsets are taken from at most: more gains under 0.005 bits.
SAMPLED_ROWS = 512
SAMPLED_CHANNELS = 1024
# Exponent steps, either side, that count in the mean of a channel and of a row. Means of clipped values come within
# 0.02 bits of the best offsets there are at a fraction of the cost of medians; without clipping, the first token,
# whose norm is some hundred times that of the others, spoils them.
_CLIP_CHANNEL = 6
_CLIP_ROW = 3
# Elements a block: two uint16 scratch arrays of it take a quarter of a 2 MiB cache.
_BLOCK_ELEMENTS = 128 * 1024


def split(x: np.ndarray, exponent: np.ndarray, low: np.ndarray) -> None:
    """uint16 float bits -> bits 7 to 14 (the byte with the exponent) and the sign with bits 0 to 6; all flat."""
    scratch = np.empty((2, min(len(x), _BLOCK_ELEMENTS)), np.uint16)
    for start in range(0, len(x), _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        first, second = scratch[:, : len(x) - start]
        np.right_shift(x[block], 7, out=first)
        np.copyto(exponent[block], first, casting="unsafe")
        np.bitwise_and(x[block], 0x807F, out=first)
        np.right_shift(first, 8, out=second)
        np.bitwise_or(first, second, out=first)
        np.copyto(low[block], first, casting="unsafe")


def join(exponent: np.ndarray, low: np.ndarray, x: np.ndarray) -> None:
    """The inverse of `split`: writes `x`."""
    scratch = np.empty((2, min(len(x), _BLOCK_ELEMENTS)), np.uint16)
    for start in range(0, len(x), _BLOCK_ELEMENTS):
        block = slice(start, start + _BLOCK_ELEMENTS)
        first, second = scratch[:, : len(x) - start]
        # A signed byte widened to 16 bits has its sign at bit 15, where the float's sign belongs.
        np.copyto(first.view(np.int16), low[block].view(np.int8))
        np.bitwise_and(first, 0x807F, out=first)
        np.copyto(second, exponent[block])
        np.left_shift(second, 7, out=second)
        np.bitwise_or(first, second, out=x[block])


def channel_offsets(exponent_TH: np.ndarray, shift: int) -> np.ndarray:
    """One offset (uint8 [hidden]) per channel of one layer's exponent bytes, in steps of 1 << shift."""
    steps_TH = exponent_TH >> shift if shift else exponent_TH
    base = max(0, _median(steps_TH) - _CLIP_CHANNEL)
    mean_H = _clipped_means(steps_TH, base, 2 * _CLIP_CHANNEL, axis=0)
    return ((_round_in_phase(mean_H) + base) << shift).astype(np.uint8)


def row_offsets(centred_TH: np.ndarray, shift: int) -> np.ndarray:
    """One offset (uint8 [rows], modulo 256) per row of channel-centred exponent bytes, in steps of 1 << shift."""
    steps_TH = centred_TH[:, :SAMPLED_CHANNELS].view(np.int8)
    mean_T = _clipped_means(steps_TH >> shift if shift else steps_TH, -_CLIP_ROW, 2 * _CLIP_ROW, axis=1)
    return ((_round_in_phase(mean_T) - _CLIP_ROW) << shift).astype(np.uint8)


def _clipped_means(values: np.ndarray, lowest: int, width: int, axis: int) -> np.ndarray:
    """Means over one axis of clip(values, lowest, lowest + width) - lowest; a last odd row or column may be left out.

    `values` is an int8 or uint8 matrix. Halves are added as bytes while such sums fit a byte: numpy's own sum of bytes
    widens each one first. `lowest` is taken off at the end, which modulo 256 is the same.
    """
    row = np.empty(values.shape[1], values.dtype)
    row.fill(lowest)
    clipped = np.maximum(values, row)
    row.fill(min(lowest + width, np.iinfo(values.dtype).max))
    total = np.minimum(clipped, row, out=clipped).view(np.uint8)
    terms = 1
    while total.shape[axis] > 1 and 2 * terms * width <= 255:
        half = total.shape[axis] // 2
        if axis == 0:
            total = np.add(total[:half], total[half : 2 * half], out=total[:half])
        else:
            total = np.add(total[:, :half], total[:, half : 2 * half], out=total[:, :half])
        terms *= 2
    total = total - np.uint8(terms * lowest % 256)
    return total.sum(axis=axis, dtype=np.uint32) / (terms * total.shape[axis])


def _round_in_phase(mean: np.ndarray) -> np.ndarray:
    """Means rounded relative to their own mean, so that what is left has the same centre everywhere."""
    centre = float(mean.mean())
    return np.rint(mean - centre).astype(np.int64) + round(centre)


def _median(steps_TH: np.ndarray) -> int:
    """The median exponent, by counting a few rows."""
    counts = np.bincount(steps_TH[:: -(-len(steps_TH) // 8)].ravel(), minlength=256).cumsum()
    return int(np.searchsorted(counts, counts[-1] / 2))
