"""The trainable draft: speculators' Eagle3DraftModel, built from `draft_config.json` and the stored verifier head.

The library would open the verifier's checkpoint to fill embedding, final norm and lm_head. Here they come from the head
file that travels with a data set, so that training never needs the verifier's weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import safe_open

from draft.config import DraftConfig
from draft.tolerance import same
from draft.weights import EMBEDDING, VERIFIER_ONLY

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

    from draft.vocab import VocabMapping

Attention = Literal["sdpa", "simple_flex_attention"]

NORM = "norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class VerifierHead:
    """Embedding [V, H], gain of the final norm [H] and lm_head [V, H] of a verifier, and what the file says of it."""

    embedding_VH: torch.Tensor
    norm_H: torch.Tensor
    lm_head_VH: torch.Tensor
    description: dict[str, Any]  # rms_norm_eps and num_layers among others; empty where the file says nothing


def load_head(path: Path) -> VerifierHead:
    """Read a verifier head: safetensors with embed_tokens.weight, norm.weight (a plain factor) and lm_head.weight.

    Raises ValueError when a tensor is missing. A missing final norm is fatal on purpose: a draft trained on states that
    were not normed loses half of its acceptance while its loss goes down as usual.
    """
    with safe_open(path, framework="pt") as file:
        missing = sorted({EMBEDDING, NORM, LM_HEAD} - set(file.keys()))
        if missing:
            raise ValueError(
                f"verifier head {path} has no {', '.join(missing)}: store a whole head (embedding, final norm, lm_head)"
            )
        description = json.loads((file.metadata() or {}).get("config", "{}"))
        return VerifierHead(file.get_tensor(EMBEDDING), file.get_tensor(NORM), file.get_tensor(LM_HEAD), description)


def build_training_model(
    config: DraftConfig,
    head: Path | VerifierHead,
    vocab: VocabMapping | None,
    *,
    seed: int = 0,
    attention: Attention = "sdpa",
    train_lm_head: bool = False,
) -> Eagle3DraftModel:
    """A draft ready to train: float32, decoder and fc initialised from `seed`, the verifier's parts frozen in place.

    Args:
        head: file or loaded head of the verifier.
        vocab: the draft vocabulary; None where the draft proposes from the whole vocabulary.
        attention: "sdpa" runs anywhere; "simple_flex_attention" is the library's default for CUDA.
        train_lm_head: train the draft's lm_head too; it starts as the verifier's rows of the draft vocabulary.

    Raises:
        ValueError: when head, vocabulary and configuration do not belong together.
    """
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    head = load_head(head) if isinstance(head, Path) else head
    _check_head(config, head)
    keep_D = _kept_rows(config, vocab)

    speculator_config = Eagle3SpeculatorConfig(**config.to_nested())
    speculator_config.transformer_layer_config._attn_implementation = attention
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Eagle3DraftModel(speculator_config).float()
    if vocab is not None and config.uses_draft_vocab:
        model.load_vocab_mappings(torch.from_numpy(vocab.t2d), torch.from_numpy(vocab.d2t))
    with torch.no_grad():
        model.embed_tokens.weight.copy_(head.embedding_VH)
        model.verifier_norm.weight.copy_(head.norm_H)
        rows_DH = head.lm_head_VH[keep_D].float()
        model.verifier_lm_head.weight.copy_(rows_DH)
        model.lm_head.weight.copy_(rows_DH)
    for frozen in (model.embed_tokens, model.verifier_norm, model.verifier_lm_head):
        frozen.weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(train_lm_head)
    unset = [name for name, tensor in model.state_dict().items() if tensor.is_floating_point() and tensor.isnan().any()]
    if unset:
        raise ValueError(f"the draft has NaN in {', '.join(unset)}: the verifier head is damaged")
    return model


def checkpoint_tensors(model: Eagle3DraftModel) -> dict[str, torch.Tensor]:
    """What a training checkpoint stores of the model: everything but the verifier's parts, which the data set has."""
    skipped = {EMBEDDING, *VERIFIER_ONLY}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in skipped}


def load_checkpoint_tensors(model: Eagle3DraftModel, tensors: dict[str, torch.Tensor]) -> None:
    """The inverse of `checkpoint_tensors`. Raises ValueError for a vocabulary that is not the model's."""
    for name in ("d2t", "t2d"):
        mine = model.state_dict().get(name)
        if mine is not None and not torch.equal(mine.cpu(), tensors[name]):
            raise ValueError(f"the checkpoint's {name} is not this run's: it was trained for another draft vocabulary")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = sorted(set(missing) - {EMBEDDING, *VERIFIER_ONLY})
    if missing or unexpected:
        raise ValueError(f"checkpoint does not fit the draft: missing {missing}, unexpected {sorted(unexpected)}")


def _check_head(config: DraftConfig, head: VerifierHead) -> None:
    expected = {
        "embed_tokens.weight": (head.embedding_VH, (config.vocab_size, config.hidden_size)),
        "norm.weight": (head.norm_H, (config.hidden_size,)),
        "lm_head.weight": (head.lm_head_VH, (config.vocab_size, config.hidden_size)),
    }
    wrong = [
        f"{name} is {list(tensor.shape)}, the draft's configuration implies {list(shape)}"
        for name, (tensor, shape) in expected.items()
        if tuple(tensor.shape) != shape
    ]
    if wrong:
        raise ValueError(f"the verifier head does not fit the draft: {'; '.join(wrong)}")
    mine = {"rms_norm_eps": config.rms_norm_eps, "num_layers": config.verifier.num_hidden_layers}
    for name, value in mine.items():
        if not same(head.description.get(name, value), value):
            raise ValueError(
                f"{name} is {value} by the draft's configuration and {head.description[name]} by the verifier head: "
                "they belong to different verifiers"
            )


def _kept_rows(config: DraftConfig, vocab: VocabMapping | None) -> torch.Tensor:
    """Verifier ids of the draft's tokens, int64 [draft vocab]."""
    if not config.uses_draft_vocab:
        return torch.arange(config.vocab_size)
    if vocab is None:
        raise ValueError(
            f"a draft vocabulary of {config.draft_vocab_size} out of {config.vocab_size} needs a mapping: give vocab"
        )
    if len(vocab.d2t) != config.draft_vocab_size or len(vocab.t2d) != config.vocab_size:
        raise ValueError(
            f"vocab maps {len(vocab.d2t)} of {len(vocab.t2d)} tokens, the draft has {config.draft_vocab_size} of "
            f"{config.vocab_size}"
        )
    return torch.from_numpy(vocab.targets)
