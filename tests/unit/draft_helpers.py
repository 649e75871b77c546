"""Small drafts for tests: sound checkpoints with random weights, exports of them, and ways to break an export."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from draft.checkpoint import MODEL_NAME, describe_file, write_checkpoint
from draft.config import DraftConfig
from draft.notes import FILE_NAME as RECORD_NAME
from draft.notes import DatasetNote, GenerationNotes, TrainingMetrics
from draft.vocab import mapping_from_targets

Tensors = dict[str, torch.Tensor]

NOTES = GenerationNotes(
    created="2026-01-02T03:04:05Z",
    headrace_version="0.1.0",
    datasets=[DatasetNote(uri="s3://bucket/set", identity_digest="ab" * 32, version=17)],
    recipe={"optim": {"lr": 1e-4}},
    step=70,
    coverage=0.97,
    training_metrics=TrainingMetrics(position_accuracy=[0.4, 0.2, 0.1], num_tokens=2048),
)

# The text part as Moonshot publishes Kimi-K2.5's; only what a draft could read.
KIMI_TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "pad_token_id": 163839,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def write_kimi_config(directory: Path, model_type: str = "kimi_k25") -> Path:
    """The configuration of a Kimi-K2.5-shaped verifier, without any weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": KIMI_TEXT_CONFIG,
        "vision_config": {"model_type": "kimi_k25_vision"},
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def small_config(verifier_dir: Path, **changes: Any) -> DraftConfig:
    return DraftConfig.from_verifier(verifier_dir, **{"draft_vocab_size": 4096, **changes})


def random_tensors(config: DraftConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Weights that look trained: no norm at 1.0, no constant matrix, a sound mapping with the special tokens in it."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, shape in config.tensor_shapes().items():
        if name in ("d2t", "t2d"):
            continue
        noise = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and "norm" in name
        tensors[name] = (1 + 0.1 * noise if is_norm else 0.02 * noise).to(dtype)
    if config.uses_draft_vocab:
        special = min(16, config.draft_vocab_size)
        others = np.random.default_rng(seed).choice(
            np.arange(special, config.vocab_size), config.draft_vocab_size - special, replace=False
        )
        mapping = mapping_from_targets(np.sort(np.concatenate([np.arange(special), others])), config.vocab_size)
        tensors["d2t"], tensors["t2d"] = torch.from_numpy(mapping.d2t), torch.from_numpy(mapping.t2d)
    return tensors


def make_checkpoint(
    directory: Path, config: DraftConfig, tensors: Mapping[str, torch.Tensor] | None = None, **options: Any
) -> Path:
    options = {"state": {"epoch": 1}, "notes": NOTES, **options}
    return write_checkpoint(directory, config, random_tensors(config) if tensors is None else tensors, **options)


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object], name: str = "config.json") -> None:
    path = directory / name
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Change the weights and record their new digest, so that the change itself is what a check has to find."""
    tensors = load_file(directory / MODEL_NAME)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / MODEL_NAME)
    seal(directory)


def seal(directory: Path) -> None:
    if (directory / RECORD_NAME).is_file():
        digest = describe_file(directory / MODEL_NAME)
        edit_config(directory, lambda record: record["files"].update({MODEL_NAME: digest}), RECORD_NAME)
