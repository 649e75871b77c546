"""Checks of the weights' values."""

from __future__ import annotations

import torch

from draft.validate.result import CheckFailure, CheckSkipped
from draft.validate.subject import Subject

TRAIN_AGAIN = "export another checkpoint: this one's training went wrong"


def _values(subject: Subject, name: str) -> torch.Tensor:
    """A tensor; 8-bit floats, which torch cannot compare, widened."""
    tensor = subject.tensor(name)
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def check_finite(subject: Subject) -> str:
    """No NaN and no infinity anywhere."""
    names = [name for name in subject.canonical_headers if name not in ("d2t", "t2d")]
    bad: list[str] = []
    for name in names:
        count = int((~torch.isfinite(_values(subject, name))).sum())
        if count:
            bad.append(f"{name} ({count} values)")
    if bad:
        raise CheckFailure(f"not finite: {', '.join(bad)}", TRAIN_AGAIN)
    return f"all values of {len(names)} tensors are finite"


def check_norms(subject: Subject) -> str:
    """The norms were trained: not every one of them is still at its initial 1.0."""
    norms = [name for name in subject.canonical_headers if name.endswith("norm.weight") or name.startswith("fc_norm.")]
    if not norms:
        raise CheckSkipped("there are no norms", "see the check `names`")
    zero = [name for name in norms if not bool(torch.any(_values(subject, name)))]
    if zero:
        raise CheckFailure(f"all zeros: {', '.join(zero)}", TRAIN_AGAIN)
    if all(bool(torch.all(_values(subject, name) == 1)) for name in norms):
        raise CheckFailure(
            f"all {len(norms)} norms are exactly 1.0: never loaded, or trained in bf16, where small steps round away",
            "train with norms in fp32",
        )
    return f"{len(norms)} norms have moved"


def check_matrices(subject: Subject) -> str:
    """lm_head, fc and the projections are not constant: rows differ."""
    matrices = [name for name, header in subject.canonical_headers.items() if len(header.shape) == 2]
    if not matrices:
        raise CheckSkipped("there are no matrices", "see the check `names`")
    flat: list[str] = []
    for name in matrices:
        tensor = _values(subject, name)
        if bool(torch.all(tensor == tensor[:1])):
            flat.append(name)
    if flat:
        raise CheckFailure(f"constant, every row is the same: {', '.join(flat)}", TRAIN_AGAIN)
    return f"rows differ in all {len(matrices)} matrices"
