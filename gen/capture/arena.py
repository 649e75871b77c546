"""Host copies of the states whose keys and values are in vLLM's cache, so that prefix-cache hits need no forward pass.

The arena has one row for each slot of the KV cache. Every row that any request computes is written under the slot that
its keys and values go to; what a slot holds in one is therefore what it holds in the other, however blocks are evicted
and reused, and vLLM's own rules for a hit are those of the arena.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gen.capture.rows import RequestRows
from storage.types import StateSpec


class PrefixArena:
    """States and tokens by slot. Memory that was never written is not resident."""

    def __init__(self, num_slots: int, spec: StateSpec, max_bytes: int) -> None:
        """Raises ValueError when the KV cache has more slots than `max_bytes` has room for."""
        num_bytes = num_slots * spec.row_bytes
        if num_bytes > max_bytes:
            raise ValueError(
                f"capture.prefix_arena_gib {max_bytes / 2**30:g}: the states of the KV cache's {num_slots} tokens need "
                f"{num_bytes / 2**30:.1f} GiB of host memory; raise it, make the KV cache smaller, or leave it out and "
                "have cached prefixes computed again"
            )
        self._states_SLH: np.ndarray[Any, Any] = np.empty(
            (num_slots, len(spec.layer_ids), spec.hidden_size), spec.np_dtype
        )
        # A slot that was never written holds no token: it cannot pass for the right one.
        self._token_ids_S = np.full(num_slots, -1, np.int32)

    def write(self, slots_N: np.ndarray, states_NLH: np.ndarray, token_ids_N: np.ndarray) -> None:
        self._states_SLH[slots_N] = states_NLH
        self._token_ids_S[slots_N] = token_ids_N

    def read(self, slots_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """States [N, layers, hidden] and token ids of these slots."""
        return self._states_SLH[slots_N], self._token_ids_S[slots_N]


@dataclass(frozen=True)
class CachedPrefix:
    """The first rows of a request, which vLLM took from its cache."""

    rows: RequestRows
    slots_N: np.ndarray

    def announce(self) -> None:
        """Before the step's own rows: they begin behind these."""
        self.rows.skip_to(len(self.slots_N))

    def fill(self, arena: PrefixArena) -> None:
        """After the step's own rows: a request may hit what another one computes in the same step."""
        self.rows.fill(*arena.read(self.slots_N))


@dataclass(frozen=True)
class StepSlots:
    """Where a step's keys and values went."""

    slots_N: np.ndarray  # by row of the step
    prefixes: dict[str, np.ndarray]  # slots of the cached prefix, by the request that starts behind it
