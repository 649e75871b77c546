"""What a capture client and the worker process say to each other: plain data, which is all that vLLM's RPC takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from storage.types import FileEntry, Receipt, SampleKey, ShardTarget, StateSpec

# The entry of SamplingParams.extra_args that marks a request for capture: [unit, attempt, row, turn, n].
REQUEST_ARG = "headrace_capture"


class UnitAttempt(NamedTuple):
    """One try of a unit: what rows are kept by. A request of an earlier try that is still in the engine belongs to
    nobody."""

    unit: int
    attempt: int

    def __str__(self) -> str:
        return f"unit {self.unit} (attempt {self.attempt})"


class CaptureError(RuntimeError):
    """A unit's states cannot be stored (a full disk, a dead engine, an internal error); the unit must be done again."""


@dataclass(frozen=True)
class CaptureFault:
    """One sample's states are not right, and therefore not stored.

    `reason` is a stable code: `bad_rows` (NaN, Inf or all-zero rows), `missing_rows` (fewer rows than tokens - 1),
    `wrong_tokens` (rows of other tokens than the answer's), `not_captured` (no forward pass of the request was seen),
    `does_not_fit` (more rows than capture may keep in host memory; it was not tried).
    """

    key: SampleKey
    reason: str
    detail: str


def token_digest(token_ids: Sequence[int] | np.ndarray) -> str:
    """xxh3_128 of the ids as little-endian int32: equal digests mean the rows were computed from these tokens."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())


def encode_request(unit: UnitAttempt, key: SampleKey) -> list[int]:
    return [*unit, *key]


def decode_request(extra_args: Mapping[str, Any] | None) -> tuple[UnitAttempt, SampleKey] | None:
    """Unit and key of a request that asked for capture, None for any other request."""
    value = (extra_args or {}).get(REQUEST_ARG)
    if value is None:
        return None
    unit, attempt, row, turn, n = (int(part) for part in value)
    return UnitAttempt(unit, attempt), SampleKey(row, turn, n)


def encode_target(target: ShardTarget) -> dict[str, Any]:
    return asdict(target)


def decode_target(data: Mapping[str, Any]) -> ShardTarget:
    return ShardTarget(**{**data, "spec": decode_spec(data["spec"])})


def encode_spec(spec: StateSpec) -> dict[str, Any]:
    return {"layer_ids": list(spec.layer_ids), "hidden_size": spec.hidden_size, "dtype": spec.dtype}


def decode_spec(data: Mapping[str, Any]) -> StateSpec:
    return StateSpec(tuple(data["layer_ids"]), data["hidden_size"], data["dtype"])


def encode_receipt(receipt: Receipt) -> dict[str, Any]:
    return {**asdict(receipt), "key": list(receipt.key)}


def decode_receipt(data: Mapping[str, Any]) -> Receipt:
    return Receipt(**{**data, "key": SampleKey(*data["key"])})


def encode_files(files: Sequence[FileEntry]) -> list[dict[str, Any]]:
    return [asdict(entry) for entry in files]


def decode_files(data: Sequence[Mapping[str, Any]]) -> list[FileEntry]:
    return [FileEntry(**entry) for entry in data]
