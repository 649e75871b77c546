"""What protects stored states: a checksum per sample, checked at every read, and a digest per file for the manifest."""

from __future__ import annotations

import hashlib
from pathlib import Path

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


def file_digest(path: Path) -> str:
    """sha256 (hex) of a file's bytes, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
