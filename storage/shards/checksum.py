"""What protects stored states at every read: a checksum per sample."""

from __future__ import annotations

import numpy as np
import xxhash

from storage.errors import DamagedError


def states_checksum(states_TLH: np.ndarray) -> str:
    """xxh3_128 (hex) of the raw bits [rows, layers, hidden] in C order, before any encoding."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(states_TLH).data)


def check_states_checksum(states_TLH: np.ndarray, expected: str, where: str) -> None:
    """Raises DamagedError, naming `where`, when the bits are not those that were written."""
    actual = states_checksum(states_TLH)
    if actual != expected:
        raise DamagedError(f"{where}: the states have checksum {actual}, {expected} was written")
