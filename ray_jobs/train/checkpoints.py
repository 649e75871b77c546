"""A run's checkpoints: `<run>/checkpoints/step-00000100`, written by `draft.checkpoint`; the newest one counts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from draft.checkpoint import TrainingCheckpoint, is_complete, read_checkpoint

FOLDER = "checkpoints"
OPTIMIZER = "optimizer"
LOOP_VERSION = 1

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def checkpoint_path(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08d}"


def newest_checkpoint(run: Path) -> TrainingCheckpoint | None:
    """The complete checkpoint with the most steps, or None. Raises ValueError for an unknown version."""
    found = max(_complete(run), default=None)
    if found is None:
        return None
    checkpoint = read_checkpoint(found)
    if checkpoint.state.get("loop_version") != LOOP_VERSION:
        raise ValueError(f"{found}: loop_version {checkpoint.state.get('loop_version')!r} is not known here")
    return checkpoint


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and what a dead writer left half-written.

    A checkpoint loses its name before its files, so that no reader takes a half-removed one for a whole one.
    """
    for path in sorted(_complete(run))[:-keep]:
        path.rename(path.with_name(f".{path.name}.removed"))
    for path in (run / FOLDER).glob(".step-*"):
        shutil.rmtree(path)


def optimizer_tensors(optimizer: torch.optim.AdamW, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
    """AdamW's state as named tensors, so that it is stored without pickle; empty before the first step."""
    return {f"{names[parameter]}.{key}": state[key] for parameter, state in optimizer.state.items() for key in _MOMENTS}


def load_optimizer_tensors(
    optimizer: torch.optim.AdamW, names: Mapping[torch.Tensor, str], tensors: Mapping[str, torch.Tensor]
) -> None:
    """The inverse of `optimizer_tensors`. Raises ValueError when the parameters are not those of the checkpoint."""
    expected = {f"{name}.{key}" for name in names.values() for key in _MOMENTS}
    if expected != tensors.keys():
        raise ValueError(f"the optimizer state is of other parameters: {sorted(expected ^ tensors.keys())[:6]}")
    for parameter, name in names.items():
        state = {key: tensors[f"{name}.{key}"] for key in _MOMENTS}
        optimizer.state[parameter] = {
            key: tensor if key == "step" else tensor.to(parameter.device) for key, tensor in state.items()
        }


def _complete(run: Path) -> Iterator[Path]:
    return (path for path in (run / FOLDER).glob("step-*") if is_complete(path))
