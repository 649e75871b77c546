"""The check that only data can make: stored samples run through the draft.

Names, shapes and layer ids can all be in order while fc's columns stand in another layer order, d2t belongs to another
data set, or the ids are off by one. Each of them shows in accuracy, the share of loss tokens on which draft and
verifier agree. It is held against what training reported, and against controls on the same tokens that need no report:
the best constant guess, fc's columns in other orders, and neighbouring layers where the data set has them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from draft.config import DraftConfig
from draft.validate.result import CheckFailure, CheckSkipped
from draft.validate.subject import Subject
from draft.vocab import VocabMapping, mapping_from_targets

if TYPE_CHECKING:
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel

    from draft.alignment import StateColumns
    from storage import Snapshot
    from storage.reader import LoadedSample

MAX_SAMPLES = 48
MAX_TOKENS = 384  # of one sample; more samples say more than longer ones
ENOUGH_LOSS_TOKENS = 3000
FEWEST_LOSS_TOKENS = 200
GROUPS = 12  # of samples that run together; errors are estimated between groups
DEFAULT_STEPS = 3
MAX_ORDERS = 12
SIGMAS = 3.5
# Training reports an average over other samples, often while it still learned: only more than this share of the
# reported accuracy, beyond chance, counts as a drop.
RELATIVE_SLACK = 0.1


@dataclass(frozen=True)
class Score:
    """Correct and counted loss tokens per group of samples and step, [groups, steps]."""

    correct_GK: npt.NDArray[np.float64]
    total_GK: npt.NDArray[np.float64]

    @property
    def accuracy_K(self) -> npt.NDArray[np.float64]:
        return self.correct_GK.sum(0) / np.maximum(self.total_GK.sum(0), 1)

    def error(self, step: int) -> float:
        """Standard error of a step's accuracy: between groups, but no less than that of independent tokens."""
        total, rate = self.total_GK[:, step], float(self.accuracy_K[step])
        residual = self.correct_GK[:, step] - rate * total
        between = math.sqrt(float((residual**2).sum())) / max(float(total.sum()), 1)
        return max(between, math.sqrt(rate * (1 - rate) / max(float(total.sum()), 1)))


def beats(other: Score, own: Score) -> bool:
    """Whether another reading of the same tokens is better at step 0 by more than chance explains."""
    difference_G = other.correct_GK[:, 0] - own.correct_GK[:, 0]
    between = math.sqrt(float(((difference_G - difference_G.mean()) ** 2).sum()))
    rate = max(float(own.accuracy_K[0]), float(other.accuracy_K[0]))
    independent = math.sqrt(float(own.total_GK[:, 0].sum()) * rate * (1 - rate))
    return float(difference_G.sum()) > SIGMAS * max(between, independent, 1.0)


def check_dataset_accuracy(subject: Subject) -> str:
    """Stored samples run through the draft give the accuracy that training reported, and every control gives less."""
    if subject.dataset_uri is None:
        raise CheckSkipped("no data set was given", "give one with --dataset URI")
    from storage import Dataset

    snapshot = Dataset.open(subject.dataset_uri).snapshot()
    metrics = subject.record.notes.training_metrics if subject.record is not None else None
    steps = len(metrics.position_accuracy) if metrics is not None else DEFAULT_STEPS
    bench = _Bench.prepare(subject, snapshot, steps)
    own = bench.score(bench.columns, steps)
    num_tokens = int(own.total_GK[:, 0].sum())
    if num_tokens < FEWEST_LOSS_TOKENS:
        raise CheckSkipped(
            f"only {num_tokens} loss tokens in {bench.num_samples} samples of version {snapshot.version}",
            "give a data set with more samples",
        )
    measured = " / ".join(f"{rate:.3f}" for rate in own.accuracy_K)
    _compare_with_guess(bench, own, measured)
    _compare_with_orders(bench, own, measured)
    _compare_with_neighbours(bench, own, measured)
    said = f"accuracy {measured} on {num_tokens} loss tokens of {bench.num_samples} samples"
    if metrics is None:
        return f"{said}; above every control, nothing was reported to compare with"
    reported = " / ".join(f"{rate:.3f}" for rate in metrics.position_accuracy)
    for step, rate in enumerate(metrics.position_accuracy):
        spread = math.hypot(own.error(step), math.sqrt(rate * (1 - rate) / max(metrics.num_tokens, 1)))
        if own.accuracy_K[step] < rate * (1 - RELATIVE_SLACK) - SIGMAS * spread:
            raise CheckFailure(
                f"{said}, training reported {reported}",
                "the weights are not the ones that training measured, or the data set is unlike the trained one: "
                "compare d2t, norm_before_residual and rope with the training checkpoint",
            )
    return f"{said}, training reported {reported}; above every control"


@dataclass
class _Bench:
    """The draft as a model, and the samples to run it on."""

    model: Eagle3DraftModel
    groups: list[list[LoadedSample]]
    columns: StateColumns
    stored_layers: tuple[int, ...]
    config: DraftConfig
    mask_steps: int  # decides which rows count, so that every control sees the same tokens

    @classmethod
    def prepare(cls, subject: Subject, snapshot: Snapshot, mask_steps: int) -> _Bench:
        from draft.alignment import StateColumns

        config = subject.implied_config
        spec = snapshot.dataset.identity.states
        try:
            columns = StateColumns.for_draft(config, spec)
            model = _build_model(subject, config, snapshot)
        except ValueError as error:
            raise CheckFailure(
                f"the draft cannot have been trained on {subject.dataset_uri}: {error}",
                "give the data set that it was trained on; if this is it, the draft's configuration is wrong",
            ) from error
        samples = _choose_samples(snapshot)
        groups = [samples[start::GROUPS] for start in range(min(GROUPS, len(samples)))]
        return cls(model, groups, columns, spec.layer_ids, config, mask_steps)

    @property
    def num_samples(self) -> int:
        return sum(len(samples) for samples in self.groups)

    def score(self, columns: StateColumns, steps: int) -> Score:
        """Accuracy with the states of `columns`, group by group."""
        import torch

        from draft.alignment import make_batch
        from draft.objective import Objective, forward_batch

        correct, total = [], []
        with torch.inference_mode():
            for samples in self.groups:
                batch = make_batch(samples, columns, ttt_steps=self.mask_steps)
                output = forward_batch(self.model, batch, Objective(ttt_steps=steps))
                correct.append(output.correct_K.double().numpy())
                total.append(output.total_K.double().numpy())
        return Score(np.stack(correct), np.stack(total))

    def target_ids(self) -> npt.NDArray[np.int64]:
        """What the verifier would say for every counted loss token, as draft ids."""
        import torch

        from draft.alignment import make_batch

        ids: list[torch.Tensor] = []
        with torch.inference_mode():
            for samples in self.groups:
                batch = make_batch(samples, self.columns, ttt_steps=self.mask_steps)
                states_NH = batch.verifier_last_hidden_states[batch.loss_mask]
                ids.append(self.model.verifier_lm_head(self.model.verifier_norm(states_NH)).argmax(-1))
        return torch.cat(ids).numpy()


def _compare_with_guess(bench: _Bench, own: Score, measured: str) -> None:
    counts = np.bincount(bench.target_ids())
    guess = float(counts.max() / counts.sum())
    if own.accuracy_K[0] <= guess + SIGMAS * own.error(0):
        raise CheckFailure(
            f"accuracy {measured} is not above that of always guessing one token ({guess:.3f})",
            "look for a d2t of another data set (a well-formed one shows nowhere else), a permuted fc, wrong states",
        )


def _compare_with_orders(bench: _Bench, own: Score, measured: str) -> None:
    ids = bench.config.aux_layer_ids
    for order in _other_orders(len(ids)):
        columns = _with_aux(bench.columns, [bench.columns.aux[index] for index in order])
        other = bench.score(columns, 1)
        if beats(other, own):
            raise CheckFailure(
                f"accuracy {measured}, but {other.accuracy_K[0]:.3f} when fc reads the layers in the order "
                f"{[ids[index] for index in order]} instead of {ids}",
                "fc's column blocks stand in another order than the layer ids: permute them",
            )


def _compare_with_neighbours(bench: _Bench, own: Score, measured: str) -> None:
    for shift in (-1, 1):
        ids = [layer + shift for layer in bench.config.aux_layer_ids]
        for shifted in _neighbours(bench.config.aux_layer_ids, ids, bench.stored_layers):
            columns = _with_aux(bench.columns, [bench.stored_layers.index(layer) for layer in shifted])
            other = bench.score(columns, 1)
            if beats(other, own):
                raise CheckFailure(
                    f"accuracy {measured}, but {other.accuracy_K[0]:.3f} with layers {shifted} instead of "
                    f"{bench.config.aux_layer_ids}",
                    "the layer ids are off by one: state those that the draft was trained on, in the vLLM convention",
                )


def _neighbours(ids: list[int], shifted: list[int], stored: tuple[int, ...]) -> Iterator[list[int]]:
    """All ids moved together, then one at a time, as far as the data set has the layers."""
    candidates = [shifted, *([*ids[:i], shifted[i], *ids[i + 1 :]] for i in range(len(ids)))]
    return (candidate for candidate in candidates if set(candidate) <= set(stored))


def _other_orders(num_layers: int) -> list[tuple[int, ...]]:
    """Orders other than the stated one: all of them for three layers, swaps and the reversal first for more."""
    identity = tuple(range(num_layers))
    return sorted(
        (order for order in permutations(identity) if order != identity),
        key=lambda order: sum(a != b for a, b in zip(order, identity, strict=True)),
    )[:MAX_ORDERS]


def _with_aux(columns: StateColumns, aux: Sequence[int]) -> StateColumns:
    return replace(columns, aux=tuple(aux))


def _build_model(subject: Subject, config: DraftConfig, snapshot: Snapshot) -> Eagle3DraftModel:
    """The draft as the speculators library runs it, with the verifier head of the data set."""
    from draft.model import build_training_model, load_head

    with tempfile.TemporaryDirectory(prefix="headrace-head-") as directory:
        head = load_head(snapshot.fetch_head(Path(directory)))
        model = build_training_model(config, head, _mapping(subject, config))
    tensors = {name: subject.tensor(name) for name in subject.canonical_headers if name not in ("d2t", "t2d")}
    expected = config.tensor_shapes(embedding=True)
    misshapen = [name for name, tensor in tensors.items() if tuple(tensor.shape) != expected.get(name)]
    if misshapen:
        raise CheckSkipped(f"of another shape than config.json implies: {', '.join(misshapen)}", "see `shapes`")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    lacking = [name for name in missing if name in config.tensor_shapes() and name not in ("d2t", "t2d")]
    if lacking or unexpected:
        raise CheckSkipped("the weights are not complete", "see the check `names`")
    return model.eval()


def _mapping(subject: Subject, config: DraftConfig) -> VocabMapping | None:
    """The mapping as engines use it: from d2t alone."""
    if not config.uses_draft_vocab:
        return None
    d2t = subject.integers("d2t")
    return mapping_from_targets(np.arange(len(d2t)) + d2t, config.vocab_size)


def _choose_samples(snapshot: Snapshot) -> list[LoadedSample]:
    """Samples spread evenly over the snapshot, cut short, until they hold enough loss tokens."""
    from storage.reader import SampleReader

    reader = SampleReader(snapshot)
    if not len(reader):
        raise CheckSkipped(f"version {snapshot.version} of {snapshot.dataset.uri} has no samples")
    positions = np.unique(np.linspace(0, len(reader) - 1, MAX_SAMPLES).astype(int))
    chosen: list[LoadedSample] = []
    num_loss_tokens = 0
    # A stride through the positions: stopping early still leaves samples from all over the data set.
    for position in np.concatenate([positions[start::4] for start in range(4)]):
        sample = reader.read_at([int(position)])[0].truncated(MAX_TOKENS)
        if sample.num_tokens < 3 or not sample.loss_mask.any():
            continue
        chosen.append(sample)
        num_loss_tokens += int(sample.loss_mask.sum())
        if num_loss_tokens >= ENOUGH_LOSS_TOKENS and len(chosen) >= MAX_SAMPLES // 3:
            break
    if not chosen:
        raise CheckSkipped(f"no sample of {snapshot.dataset.uri} has a token that the loss counts")
    return chosen
