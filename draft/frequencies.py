"""How often each token occurs among the tokens that the loss counts: what a draft vocabulary is chosen by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from storage.snapshot import Snapshot

# Units whose token ids are in memory at once.
UNITS_AT_ONCE = 64


def count_loss_tokens(snapshot: Snapshot, vocab_size: int) -> npt.NDArray[np.int64]:
    """How often every token id occurs inside the loss spans of a snapshot's samples, int64 [vocab_size].

    Prompt tokens are not counted: the draft never proposes them.

    Raises ValueError for a token id outside the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    units = sorted(snapshot.unit_states())
    for first in range(0, len(units), UNITS_AT_ONCE):
        table = snapshot.samples(columns=["token_ids", "loss_spans"], units=units[first : first + UNITS_AT_ONCE])
        for batch in table.to_batches():
            tokens = loss_tokens(batch)
            if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
                raise ValueError(
                    f"{snapshot.dataset.uri} has token id {int(tokens.max())}, the vocabulary has {vocab_size}: "
                    "this data set belongs to another verifier"
                )
            counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def count_weighted(snapshots: Sequence[tuple[Snapshot, float]], vocab_size: int) -> npt.NDArray[np.int64]:
    """Counts over several data sets, each times its weight in the training mix."""
    total = np.zeros(vocab_size, np.float64)
    for snapshot, weight in snapshots:
        total += weight * count_loss_tokens(snapshot, vocab_size)
    return np.ceil(total).astype(np.int64)  # a token that occurs at all stays ahead of one that never does


def loss_tokens(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """The token ids inside the loss spans of a batch with columns `token_ids` and `loss_spans`, int64 [N]."""
    ids, spans = batch.column("token_ids"), batch.column("loss_spans")
    flat_ids = ids.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    lengths = ids.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    span_counts = spans.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    flat_spans = spans.flatten()
    # Spans count from their sample's first token; samples lie one after another in `flat_ids`.
    base = np.repeat(np.cumsum(lengths) - lengths, span_counts)
    steps = np.zeros(len(flat_ids) + 1, np.int64)
    np.add.at(steps, flat_spans.field("start").to_numpy() + base, 1)
    np.add.at(steps, flat_spans.field("end").to_numpy() + base, -1)
    return flat_ids[np.cumsum(steps[:-1]) > 0]
