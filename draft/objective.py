"""What the draft is trained to do: speculators' test-time-training loss, and the accuracies that come with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draft.alignment import TrainingBatch


@dataclass(frozen=True)
class Objective:
    """The loss of one pack.

    loss: a name that the speculators library knows ("kl_div", "ce", "tv", ...), or JSON with weights of several.
    ttt_steps: test-time-training steps: positions of a draft that are trained, each reading the one before.
    step_decay: step k counts step_decay ** k.
    """

    loss: str = "kl_div"
    ttt_steps: int = 3
    step_decay: float = 0.8


@dataclass(frozen=True)
class StepOutput:
    """One forward pass over a batch. Counts are sums, so that they add up over workers and steps."""

    loss: torch.Tensor  # scalar with gradient: mean over the batch's loss tokens, summed over the weighted steps
    num_loss_tokens: int
    correct_K: torch.Tensor  # [ttt_steps]; loss tokens for which steps 0..k were all right
    total_K: torch.Tensor  # [ttt_steps]; loss tokens that step k was tried on


def forward_batch(model: torch.nn.Module, batch: TrainingBatch, objective: Objective) -> StepOutput:
    """Run the draft (or its data-parallel wrapper) over one batch.

    "Right" means that the argmax of the draft's logits is that of the verifier's logits over the draft vocabulary.
    """
    from speculators.losses import resolve_loss_config

    on_cuda = batch.input_ids.is_cuda  # the library's fused losses are Triton kernels
    _, loss, metrics = model(
        **batch.inputs(),
        ttt_steps=objective.ttt_steps,
        ttt_step_loss_decay=objective.step_decay,
        loss_config=resolve_loss_config(objective.loss, "fused" if on_cuda else "eager"),
    )
    steps = range(objective.ttt_steps)
    return StepOutput(
        loss=loss,
        num_loss_tokens=batch.num_loss_tokens,
        correct_K=torch.stack([metrics[f"full_acc_{k}_sum"] for k in steps]).detach().float(),
        total_K=torch.stack([metrics[f"full_acc_{k}_total"] for k in steps]).detach().float(),
    )
