"""The draft vocabulary: which tokens the draft can propose, and the maps between its ids and the verifier's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class VocabMapping:
    """Maps between draft ids and target (verifier) ids.

    d2t: int64 [draft_vocab], an *offset*: target id = draft id + d2t[draft id]. Targets ascend strictly.
    t2d: bool [vocab], true where the draft has the token. `t2d.nonzero()` lists the targets in draft order.
    coverage: share of the counted tokens that the draft can propose (1.0 where nothing was counted).
    """

    d2t: npt.NDArray[np.int64]
    t2d: npt.NDArray[np.bool_]
    coverage: float

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """Target id of each draft id, int64 [draft_vocab]."""
        return np.arange(len(self.d2t), dtype=np.int64) + self.d2t


def build_vocab(
    frequencies: npt.NDArray[np.int64], draft_vocab_size: int, special_ids: Iterable[int] = ()
) -> VocabMapping:
    """Choose the draft vocabulary: the special tokens, then the most frequent ones; ties go to the smaller id.

    `frequencies` is int64 [vocab], counted over the tokens that the loss counts (not over prompts). A mapping belongs
    to the data set it was counted on.
    """
    frequencies = np.asarray(frequencies)
    if frequencies.ndim != 1 or frequencies.dtype.kind not in "iu":
        raise ValueError(f"frequencies must be integers [vocab], got {frequencies.dtype} {frequencies.shape}")
    vocab_size = len(frequencies)
    if frequencies.size and int(frequencies.min()) < 0:
        raise ValueError("frequencies must not be negative")
    if not 0 < draft_vocab_size <= vocab_size:
        raise ValueError(f"draft_vocab_size {draft_vocab_size} must be within [1, {vocab_size}]")
    special = sorted(set(special_ids))
    outside = [token for token in special if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(f"special ids {outside} lie outside the vocabulary of {vocab_size}: another tokenizer's?")
    if len(special) > draft_vocab_size:
        raise ValueError(f"{len(special)} special tokens do not fit a draft vocabulary of {draft_vocab_size}")
    ranked = np.argsort(-frequencies.astype(np.int64), kind="stable")
    is_special = np.zeros(vocab_size, dtype=np.bool_)
    is_special[special] = True
    others = ranked[~is_special[ranked]][: draft_vocab_size - len(special)]
    t2d = is_special.copy()
    t2d[others] = True
    counted = int(frequencies.sum())
    coverage = float(frequencies[t2d].sum() / counted) if counted else 1.0
    return mapping_from_targets(np.flatnonzero(t2d), vocab_size, coverage)


def mapping_from_targets(targets: npt.NDArray[np.int64], vocab_size: int, coverage: float = 1.0) -> VocabMapping:
    """The mapping whose draft id i is targets[i]; targets must ascend strictly within the vocabulary."""
    targets = np.asarray(targets, dtype=np.int64)
    if targets.ndim != 1 or not len(targets):
        raise ValueError("targets must be a non-empty list of token ids")
    if np.any(np.diff(targets) <= 0) or targets[0] < 0 or targets[-1] >= vocab_size:
        raise ValueError(f"targets must ascend strictly within [0, {vocab_size - 1}]")
    t2d = np.zeros(vocab_size, dtype=np.bool_)
    t2d[targets] = True
    return VocabMapping(d2t=targets - np.arange(len(targets), dtype=np.int64), t2d=t2d, coverage=coverage)


def find_mapping_faults(d2t: npt.NDArray[np.int64], t2d: npt.NDArray[np.bool_] | None, vocab_size: int) -> list[str]:
    """What is wrong with a mapping that came out of a file; empty when it is sound."""
    faults: list[str] = []
    if d2t.ndim != 1 or d2t.dtype.kind not in "iu":
        return [f"d2t is {d2t.dtype} {list(d2t.shape)}, expected int64 [draft_vocab]"]
    targets = np.arange(len(d2t), dtype=np.int64) + d2t.astype(np.int64)
    outside = np.flatnonzero((targets < 0) | (targets >= vocab_size))
    if len(outside):
        draft_id = int(outside[0])
        faults.append(
            f"{len(outside)} draft ids map outside the vocabulary of {vocab_size}, the first is {draft_id} -> "
            f"{int(targets[draft_id])}; d2t holds offsets, not target ids"
        )
    falling = np.flatnonzero(np.diff(targets) <= 0)
    if len(falling):
        draft_id = int(falling[0])
        faults.append(
            f"targets do not ascend strictly at draft id {draft_id + 1} ({int(targets[draft_id])}, then "
            f"{int(targets[draft_id + 1])}): two draft tokens would collide or swap"
        )
    if t2d is not None and not faults:
        if t2d.shape != (vocab_size,):
            faults.append(f"t2d has shape {list(t2d.shape)}, the verifier's vocabulary is {vocab_size}")
        elif not np.array_equal(np.flatnonzero(t2d), targets):
            shared = len(np.intersect1d(np.flatnonzero(t2d), targets))
            faults.append(
                f"d2t and t2d name different tokens: {int(t2d.sum())} in t2d, {len(targets)} in d2t, {shared} in both"
            )
    return faults
