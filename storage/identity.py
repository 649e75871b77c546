"""What a data set is, recorded once: nothing with another identity can be added to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from storage.types import StateSpec, UnitPlan

MODES = ("generate", "extract")


def canonical_json(value: Any) -> bytes:
    """The one serialisation that digests are taken of: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def units_digest(units: Sequence[UnitPlan]) -> str:
    """sha256 hex over the unit boundaries (little-endian int64 rows of UnitPlan's fields, in order)."""
    columns = [field.name for field in fields(UnitPlan)]
    table = np.array([[getattr(unit, name) for name in columns] for unit in units], dtype="<i8")
    return hashlib.sha256(table.tobytes()).hexdigest()


@dataclass(frozen=True)
class Identity:
    """Everything two runs must agree on to write into one data set.

    The free-form parts are JSON values: `verifier` (name, revision, weights_digest, quantization, kv_cache_dtype,
    num_layers, vocab_size, ...), `tokenizer` (digest, chat_template_digest), `sampling`, `prompts` (source digest and
    order) and `parent` (uri, version of the data set this one was derived from). `units_digest` is filled when the data
    set is created. What may differ between commits (engine version, tensor parallelism, node) goes into the commits.
    """

    mode: str
    verifier: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    states: StateSpec
    layer_convention: str = "vllm"
    codec: str = "planes-zstd"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    prompts: Mapping[str, Any] = field(default_factory=dict)
    units_digest: str = ""
    parent: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"identity: mode {self.mode!r} is not one of {list(MODES)}")
        for name in ("verifier", "tokenizer", "sampling", "prompts", "parent"):
            value = getattr(self, name)
            try:
                # A round trip through JSON makes tuples lists, so that a fresh identity equals a stored one.
                object.__setattr__(self, name, json.loads(canonical_json(value)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"identity: {name} {value!r} is not a JSON value: {error}") from error

    def with_units(self, units: Sequence[UnitPlan]) -> Identity:
        """The same identity with the digest of these unit boundaries."""
        return replace(self, units_digest=units_digest(units))

    def to_json(self) -> dict[str, Any]:
        """A JSON value; inverse of `from_json`."""
        value = asdict(self)
        value["states"]["layer_ids"] = list(self.states.layer_ids)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Identity:
        """Raises ValueError naming unknown and missing fields."""
        known = {field.name for field in fields(cls)}
        if set(value) != known:
            raise ValueError(
                f"identity: unknown fields {sorted(set(value) - known)}, missing {sorted(known - set(value))}"
            )
        states = value["states"]
        spec = StateSpec(tuple(states["layer_ids"]), states["hidden_size"], states["dtype"])
        return cls(**{**value, "states": spec})

    def differences(self, other: Identity) -> list[str]:
        """One line for each leaf that differs: `verifier.revision: 'a' here, 'b' there`. Empty when equal."""
        return list(_differences("", self.to_json(), other.to_json()))


_ABSENT = object()


def _differences(path: str, here: Any, there: Any) -> list[str]:
    if isinstance(here, dict) and isinstance(there, dict):
        names = sorted(here.keys() | there.keys())
        parts = [_differences(f"{path}.{n}" if path else n, here.get(n, _ABSENT), there.get(n, _ABSENT)) for n in names]
        return [line for part in parts for line in part]
    if here == there and type(here) is type(there):
        return []
    show = ["absent" if value is _ABSENT else repr(value) for value in (here, there)]
    return [f"{path}: {show[0]} here, {show[1]} there"]
