"""The plan of one epoch over a weighted list of data sets: pure, and the same on every worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from storage.packing import Int64, PackPlan, make_packs, shuffled_order, weighted_selection


@dataclass(frozen=True, eq=False)
class SourceSizes:
    """What a plan needs to know of one data set: keys [N, 3] (row, turn, n), tokens of each sample [N], its weight."""

    keys: Int64
    num_tokens: Int64
    weight: float = 1.0


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """Every pack of one epoch. `packs` holds positions of the reading order; `sources` and `indices` say which sample
    of which source is there."""

    packs: PackPlan
    sources: Int64  # [M]
    indices: Int64  # [M]
    digest: str  # of the keys, lengths and packs in order: equal digests read the same


def plan_epoch(
    sources: Sequence[SourceSizes], seed: int, epoch: int, pack_tokens: int, max_sample_tokens: int | None
) -> EpochPlan:
    """Selects by weight, shuffles by key and packs; lengths above `max_sample_tokens` count as that many.

    Raises SampleTooLongError when a sample fits no pack.
    """
    keys, lengths, numbers, indices = [], [], [], []
    for number, source in enumerate(sources):
        chosen = np.sort(weighted_selection(source.keys, source.weight, seed, epoch, number))
        which = np.full(len(chosen), number, np.int64)
        # A sample used twice has two keys, and so two places: (source, row, turn, n, use).
        keys.append(np.column_stack([which, source.keys[chosen], _use_numbers(chosen)]))
        lengths.append(source.num_tokens[chosen])
        numbers.append(which)
        indices.append(chosen)
    all_keys = np.concatenate(keys)
    order = shuffled_order(all_keys, seed, epoch)
    tokens = np.concatenate(lengths)[order]
    if max_sample_tokens is not None:
        tokens = np.minimum(tokens, max_sample_tokens)
    packs = make_packs(tokens, pack_tokens)
    digest = xxhash.xxh3_128()
    for array in (all_keys[order], tokens, packs.samples, packs.bounds):
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return EpochPlan(packs, np.concatenate(numbers)[order], np.concatenate(indices)[order], digest.hexdigest())


def _use_numbers(ascending: Int64) -> Int64:
    """For each element how many equal ones come before it: [4, 4, 7] gives [0, 1, 0]."""
    first = np.searchsorted(ascending, ascending, "left")
    return np.arange(len(ascending), dtype=np.int64) - first
