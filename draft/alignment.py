"""From stored samples to the draft's training batch, and the loss over it.

A sample of T tokens x[0..T-1] has states in rows 0..T-2; g are the aux layers', y the final layer's, l the loss mask.
Row i of the batch, for i in 0..T-3, holds

    input token x[i+1] · aux states g[i] · target state y[i+1] (whose distribution is that of x[i+2]) · mask l[i+1]

because in serving the draft reads the token that was just sampled beside the states of the position before it.

Test-time-training step k moves input tokens, targets and mask up by k rows. The speculators library lets that run over
the border of two samples in one pack: row i of a sample of R rows would, for i + k >= R, be trained on row i + k - R
(less than k) of the next sample. So the first `ttt_steps - 1` rows of every sample are masked out, and then the loss
of a pack is the loss-token-weighted mean of its samples' own losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from draft.config import DraftConfig
from storage.types import StateSpec

if TYPE_CHECKING:
    from storage.reader import LoadedSample

PADDING_DOCUMENT = -1


@dataclass(frozen=True)
class StateColumns:
    """Where the draft's inputs and its target lie among a data set's stored layers."""

    aux: tuple[int, ...]
    target: int
    hidden_size: int

    @classmethod
    def for_draft(cls, config: DraftConfig, spec: StateSpec) -> StateColumns:
        """Raises ValueError naming the layers that the draft needs and the data set does not have."""
        needed = [*config.aux_layer_ids, config.verifier.num_hidden_layers]
        missing = [layer for layer in needed if layer not in spec.layer_ids]
        if missing:
            raise ValueError(
                f"the draft reads layers {config.aux_layer_ids} and learns from {needed[-1]}; the data set has "
                f"{list(spec.layer_ids)}, without {missing}"
            )
        if spec.hidden_size != config.hidden_size:
            raise ValueError(f"hidden_size is {config.hidden_size} in the draft and {spec.hidden_size} in the data set")
        columns = [spec.layer_ids.index(layer) for layer in needed]
        return cls(tuple(columns[:-1]), columns[-1], spec.hidden_size)


@dataclass(frozen=True)
class TrainingBatch:
    """One pack as the draft model reads it; R rows in all, A aux layers, hidden size H."""

    input_ids: torch.Tensor  # int64 [1, R]
    hidden_states: torch.Tensor  # [1, R, A * H], aux layers in the order of the draft's aux_layer_ids
    verifier_last_hidden_states: torch.Tensor  # [1, R, H], before the final norm
    loss_mask: torch.Tensor  # bool [1, R]
    position_ids: torch.Tensor  # int64 [1, R], from 1 in every sample
    document_ids: torch.Tensor  # int64 [1, R], the sample's number in the pack, -1 for padding

    @property
    def num_rows(self) -> int:
        """Rows that belong to samples."""
        return int((self.document_ids != PADDING_DOCUMENT).sum())

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    def to(self, device: torch.device | str) -> TrainingBatch:
        return replace(self, **{name: tensor.to(device) for name, tensor in self.inputs().items()})

    def inputs(self) -> dict[str, torch.Tensor]:
        """Keyword arguments of the draft model."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def make_batch(
    samples: Sequence[LoadedSample],
    columns: StateColumns,
    *,
    ttt_steps: int,
    pad_to: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> TrainingBatch:
    """Align and pack samples.

    Samples too short for one row (T < 3) give none. A batch of fewer than `ttt_steps` rows is padded to that many,
    which the library's shifts need; so a worker without samples in a ragged last round still takes part in collectives.

    Args:
        ttt_steps: test-time-training steps that the batch will be trained with.
        pad_to: rows to pad to, for compiled attention that wants one shape; default: no padding.
        dtype: of the states.

    Raises:
        ValueError: when the samples have more rows than `pad_to`.
    """
    rows = [_aligned(sample, columns, number, ttt_steps, dtype) for number, sample in enumerate(samples)]
    num_rows = sum(len(row["input_ids"]) for row in rows)
    if pad_to is not None and num_rows > pad_to:
        raise ValueError(f"the samples have {num_rows} rows, more than pad_to {pad_to}")
    num_padding = max(pad_to or ttt_steps, num_rows) - num_rows
    if num_padding:
        # All states of the padding are zero, which RMSNorm with its epsilon takes; mask and document keep it apart.
        rows.append(_padding(num_padding, columns, dtype))
    return TrainingBatch(**{name: torch.cat([row[name] for row in rows]).unsqueeze(0) for name in rows[0]})


def _aligned(
    sample: LoadedSample, columns: StateColumns, number: int, ttt_steps: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    num_rows = max(sample.num_tokens - 2, 0)
    token_ids = torch.tensor(sample.token_ids, dtype=torch.long)
    states_TLH = sample.states_torch()
    loss_mask = torch.tensor(sample.loss_mask[1 : num_rows + 1])
    loss_mask[: ttt_steps - 1] = False
    return {
        "input_ids": token_ids[1 : num_rows + 1],
        "hidden_states": states_TLH[:num_rows, list(columns.aux)].flatten(1).to(dtype),
        "verifier_last_hidden_states": states_TLH[1 : num_rows + 1, columns.target].to(dtype),
        "loss_mask": loss_mask,
        "position_ids": torch.arange(1, num_rows + 1),
        "document_ids": torch.full((num_rows,), number),
    }


def _padding(num_rows: int, columns: StateColumns, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.zeros(num_rows, dtype=torch.long),
        "hidden_states": torch.zeros(num_rows, len(columns.aux) * columns.hidden_size, dtype=dtype),
        "verifier_last_hidden_states": torch.zeros(num_rows, columns.hidden_size, dtype=dtype),
        "loss_mask": torch.zeros(num_rows, dtype=torch.bool),
        "position_ids": torch.arange(1, num_rows + 1),
        "document_ids": torch.full((num_rows,), PADDING_DOCUMENT),
    }
