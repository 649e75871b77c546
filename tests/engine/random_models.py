"""Small random checkpoints, one per architecture family, for comparing captured states with Hugging Face.

Weights are scaled so that every layer changes the residual stream by about its own size: with the usual 0.02 a random
model's states hardly differ from layer to layer and an off-by-one layer would pass unseen.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB = 512
HIDDEN = 128
DEEP = 61  # decoder layers of the reference case

# Prefixes that transformers' save_pretrained writes for Kimi-K2.5 and those that vLLM reads.
_KIMI_RENAMES = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "model.mm_projector.": "mm_projector.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
}


@dataclass(frozen=True)
class RandomModel:
    """How to make one checkpoint, and which layers to capture of it."""

    name: str
    make: Callable[[Path], Any]  # writes a checkpoint, returns the Hugging Face model (float32, eval)
    layer_ids: tuple[int, ...]
    tensor_parallel_size: int = 1


def _scaled(model: Any, seed: int) -> Any:
    """Random weights: matrices of gain 1, embeddings of size 1, norms around 1. Float32 that bf16 can hold exactly.

    The experts of a layer differ from each other by a twentieth: rounding decides a router's near-ties, differently in
    two implementations, and with unlike experts one such token would spoil the comparison of all later layers.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=generator)
        if ".experts." in name:
            values = torch.randn(parameter.shape[1:], generator=generator) + 0.05 * values
        if parameter.ndim == 1:
            norm = name.endswith("norm.weight") or "layernorm" in name
            values = 1 + 0.05 * values if norm else 0.1 * values
        elif "embed_tokens" not in name:
            values *= parameter.shape[-1] ** -0.5
        parameter.data.copy_(values.bfloat16())
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            buffer.copy_((0.01 * torch.randn(buffer.shape, generator=generator)).bfloat16())
    return model.eval()


def _save(model: Any, directory: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)


def _causal_lm(directory: Path, config: Any, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    model = _scaled(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)
    _save(model, directory)
    return model


def _attention(num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _llama(directory: Path) -> Any:
    from transformers import LlamaConfig

    return _causal_lm(directory, LlamaConfig(**_attention(DEEP)), seed=1)


def _qwen3(directory: Path) -> Any:
    from transformers import Qwen3Config

    return _causal_lm(directory, Qwen3Config(**_attention(8)), seed=2)


def _qwen3_moe(directory: Path) -> Any:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **_attention(8), num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
    )
    return _causal_lm(directory, config, seed=3)


def _gpt_oss(directory: Path) -> Any:
    """Alternating sliding-window (16 tokens, far below the test's prompts) and full layers, attention sinks, MoE."""
    from transformers import GptOssConfig

    config = GptOssConfig(
        **_attention(8), num_local_experts=4, num_experts_per_tok=2, sliding_window=16, attn_implementation="eager"
    )
    return _causal_lm(directory, config, seed=4)


def _deepseek_config() -> Any:
    from transformers import DeepseekV3Config

    sizes = {**_attention(DEEP), "num_key_value_heads": 4}
    del sizes["head_dim"]
    return DeepseekV3Config(
        **sizes,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        rope_interleave=True,
        # As in DeepSeek-V3 and Kimi-K2. With the `default` type vLLM 0.32 rotates MLA queries wrongly on CPU.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


def _deepseek(directory: Path) -> Any:
    return _causal_lm(directory, _deepseek_config(), seed=6)


def _kimi(directory: Path) -> Any:
    """The multimodal wrapper around a DeepSeek-V3 text model, in the layout of Moonshot's own checkpoints."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    config = Kimi_K25Config(
        text_config=_deepseek_config().to_dict(),
        vision_config={
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "hidden_size": 64,
            "intermediate_size": 64,
        },
        projection_hidden_size=64,
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
        vision_start_token_id=VOCAB - 3,
        vision_end_token_id=VOCAB - 4,
        tie_word_embeddings=False,
        architectures=["KimiK25ForConditionalGeneration"],
    )
    model = _scaled(Kimi_K25ForConditionalGeneration(config), seed=7)
    _save(model, directory)
    _rename_weights(directory / "model.safetensors")
    _kimi_config(directory / "config.json")
    _kimi_processor(directory)
    return model


def _rename_weights(path: Path) -> None:
    tensors = load_file(path)
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in _KIMI_RENAMES.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        renamed[name] = tensor
    save_file(renamed, path, metadata={"format": "pt"})


def _kimi_config(path: Path) -> None:
    config = json.loads(path.read_text())
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["text_config"] |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_text(json.dumps(config))


def _kimi_processor(directory: Path) -> None:
    """A word tokenizer that knows the media token, and the processor settings without which vLLM refuses to load."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCAB - 1)} | {"<|media_pad|>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="w0",
        bos_token="w0",
        eos_token="w1",
        extra_special_tokens=["<|media_pad|>"],
    ).save_pretrained(directory)
    media = {
        "in_patch_limit": 64,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 8,
        "in_patch_limit_each_frame": 64,
        "in_patch_limit_video": 64,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
    }
    (directory / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}))


RANDOM_MODELS = {
    model.name: model
    for model in (
        RandomModel("llama", _llama, (2, 30, 58, 61), tensor_parallel_size=2),
        RandomModel("qwen3", _qwen3, (2, 4, 5, 8)),
        RandomModel("qwen3_moe", _qwen3_moe, (2, 4, 5, 8)),
        RandomModel("gpt_oss", _gpt_oss, (2, 4, 5, 8)),
        RandomModel("deepseek_v3", _deepseek, (2, 30, 58, 61)),
        RandomModel("kimi_k25", _kimi, (2, 30, 58, 61)),
    )
}
