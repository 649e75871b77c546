"""States for tests of codec and shards: hypothesis strategies and a maker of states like a model's."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from storage.types import STATE_DTYPES, StateSpec

DTYPES = sorted(STATE_DTYPES)


def specs(dtype: str) -> st.SearchStrategy[StateSpec]:
    """Small geometries: 1 to 4 layers, 1 to 70 channels."""
    return st.builds(
        lambda layers, hidden: StateSpec(tuple(range(layers)), hidden, dtype), st.integers(1, 4), st.integers(1, 70)
    )


def model_like(spec: StateSpec, rows: int, seed: int) -> np.ndarray:
    """Bits of states as a model gives them: every channel has its own scale, every row too, the first one is huge."""
    random = np.random.default_rng(seed)
    shape = (rows, len(spec.layer_ids), spec.hidden_size)
    channel_LH = np.exp2(random.normal(0, 1.2, shape[1:]))
    row_TL = np.exp2(random.normal(0, 0.3, (rows, shape[1], 1)))
    states_TLH = random.normal(0, 1, shape) * channel_LH * row_TL
    states_TLH[:1] *= 100
    single_TLH = np.clip(states_TLH, -60000, 60000).astype(np.float32)
    if spec.dtype == "float32":
        return single_TLH.view(np.uint32)
    if spec.dtype == "float16":
        return single_TLH.astype(np.float16).view(np.uint16)
    return (single_TLH.view(np.uint32) >> 16).astype(np.uint16)


def bits(spec: StateSpec, rows: int, kind: str, seed: int) -> np.ndarray:
    """States of some kind, the hostile ones included: any bit pattern is a state to the storage."""
    random = np.random.default_rng(seed)
    shape = (rows, len(spec.layer_ids), spec.hidden_size)
    if kind == "model":
        return model_like(spec, rows, seed)
    if kind == "noise":
        return random.integers(0, 1 << (8 * spec.np_dtype.itemsize), shape, dtype=spec.np_dtype)
    if kind == "constant":
        return np.full(shape, random.integers(0, 1 << 16), spec.np_dtype)
    if kind == "widened":  # a 16-bit model's states in wider floats: the low half is zero
        return random.integers(0, 1 << 16, shape).astype(spec.np_dtype) << (8 * (spec.np_dtype.itemsize - 2))
    raise ValueError(kind)


KINDS = ("model", "noise", "constant", "widened")
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 1 << 32)
