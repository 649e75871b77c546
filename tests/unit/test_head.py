"""The verifier head holds the right three tensors whatever wraps them, and wrong checkpoints are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gen.head import extract_head

VOCAB, HIDDEN = 12, 4
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def tensors(prefix: str, head_prefix: str, *, num_layers: int = 2) -> dict[str, torch.Tensor]:
    """A checkpoint of one tensor a layer, whose values tell where they come from."""
    found = {
        f"{prefix}embed_tokens.weight": torch.full((VOCAB, HIDDEN), 1.0, dtype=torch.bfloat16),
        f"{prefix}norm.weight": torch.full((HIDDEN,), 2.0, dtype=torch.bfloat16),
        f"{head_prefix}lm_head.weight": torch.full((VOCAB, HIDDEN), 3.0, dtype=torch.bfloat16),
    }
    for layer in range(num_layers):
        found[f"{prefix}layers.{layer}.input_layernorm.weight"] = torch.full((HIDDEN,), 9.0)
    return found


def write(directory: Path, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A checkpoint in two files with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    names = sorted(weights)
    weight_map = {name: f"model-{1 + i % 2}-of-2.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in names if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def described(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        config: dict[str, Any] = json.loads(file.metadata()["config"])
    assert config["format_version"] == 1
    return config


@pytest.mark.parametrize(
    ("prefix", "head_prefix"),
    [
        ("model.", ""),
        ("language_model.model.", "language_model."),  # Kimi-K2.5
        ("model.language_model.", ""),  # transformers 5 wrappers
        ("language_model.", "language_model."),
        ("", ""),
    ],
)
def test_wrappers(tmp_path: Path, prefix: str, head_prefix: str) -> None:
    weights = tensors(prefix, head_prefix)
    # A vision tower has norms and a next-token-prediction layer has copies of all three: none of them is the head's.
    weights["vision_tower.encoder.norm.weight"] = torch.zeros(HIDDEN)
    weights[f"{prefix}layers.2.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    weights[f"{prefix}layers.2.norm.weight"] = torch.zeros(HIDDEN)
    weights[f"{prefix}layers.2.shared_head.lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    path = extract_head(write(tmp_path / "verifier", weights), tmp_path / "out" / "head.safetensors")
    head = load_file(path)
    assert {name: tensor.unique().item() for name, tensor in head.items()} == {
        "embed_tokens.weight": 1.0,
        "norm.weight": 2.0,
        "lm_head.weight": 3.0,
    }
    assert all(tensor.dtype == torch.bfloat16 for tensor in head.values())
    config = described(path)
    assert config["tensors"]["norm.weight"] == f"{prefix}norm.weight"
    assert (config["tied"], config["rms_norm_eps"], config["vocab_size"]) == (False, 1e-5, VOCAB)
    assert sorted(p.name for p in path.parent.iterdir()) == ["head.safetensors"]


def test_configuration_inside_a_wrapper(tmp_path: Path) -> None:
    directory = write(tmp_path, tensors("language_model.model.", "language_model."))
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": CONFIG}))
    assert described(extract_head(directory, tmp_path / "head.safetensors"))["model_type"] == "llama"


def test_embedded_verifier(verifier_dir: Path, tmp_path: Path) -> None:
    head = load_file(extract_head(verifier_dir, tmp_path / "head.safetensors"))
    with safe_open(verifier_dir / "model.safetensors", framework="pt") as file:
        assert torch.equal(head["embed_tokens.weight"], file.get_tensor("model.embed_tokens.weight"))
        assert torch.equal(head["lm_head.weight"], file.get_tensor("model.embed_tokens.weight"))  # tied
        assert torch.equal(head["norm.weight"], file.get_tensor("model.norm.weight"))
    assert described(tmp_path / "head.safetensors")["tied"]


def test_file_is_the_same_every_time(tmp_path: Path) -> None:
    # A resumed job extracts the head again, and the data set compares digests.
    directory = write(tmp_path / "verifier", tensors("model.", ""))
    files = {extract_head(directory, tmp_path / "head.safetensors").read_bytes() for _ in range(20)}
    assert len(files) == 1


def test_tied_checkpoint_ignores_a_leftover_lm_head(tmp_path: Path) -> None:
    directory = write(tmp_path / "verifier", tensors("model.", ""), tie_word_embeddings=True)
    head = load_file(extract_head(directory, tmp_path / "head.safetensors"))
    assert head["lm_head.weight"].unique().item() == 1.0


def test_offset_norm_is_stored_as_the_plain_factor(tmp_path: Path) -> None:
    directory = write(tmp_path / "verifier", tensors("model.", ""), model_type="qwen3_next")
    path = extract_head(directory, tmp_path / "head.safetensors")
    assert load_file(path)["norm.weight"].unique().item() == 3.0
    assert described(path)["norm_offset_folded"]


def without(name: str) -> dict[str, torch.Tensor]:
    weights = tensors("model.", "")
    del weights[name]
    return weights


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        (without("model.norm.weight"), {}, r"no final norm model\.norm\.weight"),
        (
            without("lm_head.weight"),
            {},
            r"no tensor lm_head\.weight, and its config\.json does not say that it is tied",
        ),
        (without("model.embed_tokens.weight"), {}, r"no tensor embed_tokens\.weight"),
        (
            {**without("lm_head.weight"), "lm_head.weight_packed": torch.zeros(1)},
            {},
            r"lm_head\.weight_packed looks like a quantised",
        ),
        (
            {**tensors("model.", ""), "other.embed_tokens.weight": torch.zeros(1)},
            {},
            "several tensors embed_tokens.weight: model.*other",
        ),
        ({**tensors("model.", ""), "model.norm.bias": torch.zeros(HIDDEN)}, {}, "has a bias"),
        (tensors("model.", ""), {"vocab_size": 13}, r"has the shape \[12, 4\], config\.json makes it \[13, 4\]"),
        (tensors("model.", ""), {"rms_norm_eps": None}, "no rms_norm_eps"),
        (tensors("model.", ""), {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        (tensors("model.", ""), {"logits_scaling": 8.0}, "logits_scaling"),
    ],
)
def test_wrong_checkpoints_are_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor], changes: dict[str, Any], message: str
) -> None:
    directory = write(tmp_path / "verifier", weights, **changes)
    with pytest.raises(ValueError, match=message):
        extract_head(directory, tmp_path / "out" / "head.safetensors")
    assert not list(tmp_path.glob("out/*")), "nothing half-written stays behind"


def test_neutral_logit_scale_is_accepted(tmp_path: Path) -> None:
    directory = write(tmp_path / "verifier", tensors("model.", ""), logit_scale=1.0, final_logit_softcapping=None)
    assert extract_head(directory, tmp_path / "head.safetensors").is_file()
