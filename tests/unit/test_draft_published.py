"""Configurations as drafts in the field have them: what is read out of each, and which ones are refused by name.

The fields are those that public training code and issue reports show (SpecForge, AngelSlim, TorchSpec, ModelOpt and the
EAGLE authors' drafts), not downloaded files; fields that no draft's arithmetic depends on are left out. Two cases are
put together: the sizes of the draft with a width of its own, and the older nested form.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draft_helpers import write_kimi_config
from typer.testing import CliRunner

from draft.compare import read_statement
from draft.config import DraftConfig
from draft.formats import from_engine
from draft.importing import load_draft_config
from draft.verifier import VerifierShape, read_verifier
from ray_jobs.commands.draft import app

FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "num_hidden_layers": 1,
}


def ids(*layers: int) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True}}


def shape(num_layers: int, **fields: Any) -> VerifierShape:
    """A verifier of which a draft's configuration repeats the sizes; everything else is unlike any draft's here."""
    unlike: dict[str, Any] = {
        "name_or_path": "org/verifier",
        "architectures": ("SomeForCausalLM",),
        "model_type": "some",
        "num_hidden_layers": num_layers,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 0.5,
        "max_position_embeddings": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3.0},
        "bos_token_id": 5,
        "eos_token_id": 6,
        "pad_token_id": 7,
    }
    return VerifierShape(**{**unlike, **fields})


KIMI_K25 = FLAT | {
    "attention_bias": False,
    "bos_token_id": 163584,
    "draft_vocab_size": 32000,
    "dtype": "bfloat16",
    **ids(2, 30, 58),
    "eos_token_id": 163585,
    "head_dim": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 163840,
}
DEEPSEEK_V3 = FLAT | {
    **ids(1, 29, 57),
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_size": 7168,
    "intermediate_size": 40960,
    "max_position_embeddings": 163840,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 129280,
    "draft_vocab_size": 32000,
}
LLAMA_31 = FLAT | {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "torch.bfloat16",
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
QWEN3_VL = FLAT | {
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 46, 90]},
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 262144,
    "target_model_type": "qwen3_moe",
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "vocab_size": 151936,
    "draft_vocab_size": 32000,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}
EAGLE_31 = FLAT | {
    "architectures": ["Eagle3LlamaForCausalLM"],
    "fc_norm": True,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "max_position_embeddings": 2048,
    "norm_output": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "draft_vocab_size": 32000,
}
NESTED_BY_AN_OLD_SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "norm_before_residual": False,
    "eagle_aux_hidden_state_layer_ids": [1, 46, 90],
    "speculators_config": {
        "algorithm": "eagle3",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "name_or_path": "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8",
        },
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0.dev42",
    "target_hidden_size": None,
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 24576,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "vocab_size": 151936,
    },
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

READ = {
    "kimi-k2.5": (
        KIMI_K25,
        61,
        {
            "aux_layer_ids": [2, 30, 58],
            "head_dim": 128,
            "draft_vocab_size": 32000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-06,
            "dtype": "bfloat16",
            "norm_before_residual": False,
            "pad_token_id": None,
        },
    ),
    # No rope, no head_dim: transformers' defaults, and not what this verifier has.
    "deepseek-v3": (
        DEEPSEEK_V3,
        61,
        {"aux_layer_ids": [1, 29, 57], "head_dim": 128, "rope_parameters": PLAIN_ROPE, "dtype": "float16"},
    ),
    # No ids: EAGLE-3's default. No max_position_embeddings: 2048.
    "llama-3.1": (
        LLAMA_31,
        32,
        {
            "aux_layer_ids": [2, 16, 29],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            "eos_token_id": [128001, 128008, 128009],
            "max_position_embeddings": 2048,
            "dtype": "bfloat16",
        },
    ),
    "qwen3-vl": (
        QWEN3_VL,
        94,
        {"aux_layer_ids": [3, 46, 90], "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0}},
    ),
    "eagle 3.1": (
        EAGLE_31,
        48,
        {"aux_layer_ids": [2, 24, 45], "fc_norm": True, "norm_output": True, "norm_before_fc": False},
    ),
    "speculators 0.1": (
        NESTED_BY_AN_OLD_SPECULATORS,
        94,
        {"aux_layer_ids": [1, 46, 90], "num_speculative_tokens": 5, "norm_before_residual": False, "head_dim": 64},
    ),
}


@pytest.mark.parametrize("name", READ)
def test_published_configurations_are_read_as_vllm_reads_them(name: str) -> None:
    published, num_layers, expected = READ[name]
    config = from_engine(published, shape(num_layers))
    assert {field: getattr(config, field) for field in expected} == expected
    decoder = published.get("transformer_layer_config", published)
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        assert getattr(config, field) == decoder[field]


def test_the_name_of_the_verifier_comes_from_a_nested_file() -> None:
    config = from_engine(NESTED_BY_AN_OLD_SPECULATORS, shape(94))
    assert config.verifier.name_or_path == "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8"


def nested(**layer: Any) -> dict[str, Any]:
    inner = NESTED_BY_AN_OLD_SPECULATORS["transformer_layer_config"]
    return NESTED_BY_AN_OLD_SPECULATORS | {"transformer_layer_config": {**inner, **layer}}  # type: ignore[dict-item]


REFUSED = {
    "MLA draft of Kimi-K3": (
        KIMI_K25
        | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "kv_lora_rank": 512}
        | {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        r"multi-head latent attention \(kv_lora_rank 512, q_lora_rank 1536\)",
    ),
    "experts, GPT-OSS": (
        FLAT | {"architectures": ["GptOssForCausalLMEagle3"], "model_type": "gpt_oss", "num_local_experts": 16},
        r"architectures \['GptOssForCausalLMEagle3'\].*experts \(num_local_experts 16\)",
    ),
    "Llama layers called kimi_k2": (KIMI_K25 | {"model_type": "kimi_k2"}, "model_type 'kimi_k2'"),
    "a width of its own, Llama 3.3 70B": (
        LLAMA_31 | {"hidden_size": 6144, "target_hidden_size": 8192},
        r"hidden_size 6144, target_hidden_size 8192",
    ),
    "sliding window": (
        KIMI_K25 | {"layer_types": ["sliding_attention"], "sliding_window": 512},
        "sliding windows",
    ),
    "only the last state": (
        KIMI_K25 | {"eagle_config": {"use_aux_hidden_state": False, "use_last_layernorm": True}},
        "use_aux_hidden_state false",
    ),
    "Qwen3 layers, nested": (nested(model_type="qwen3"), "model_type 'qwen3'"),
    "P-EAGLE": (
        NESTED_BY_AN_OLD_SPECULATORS | {"speculators_model_type": "peagle"},
        "speculators_model_type 'peagle' is no EAGLE-3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_kinds_of_drafts_are_refused_by_name(name: str, tmp_path: Path) -> None:
    published, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        from_engine(published, shape(94))
    (tmp_path / "config.json").write_text(json.dumps(published))
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        read_statement(tmp_path / "config.json")


def test_layer_ids_counted_the_way_of_sglang(tmp_path: Path) -> None:
    verifier = write_kimi_config(tmp_path / "kimi")
    draft = tmp_path / "draft"
    draft.mkdir()
    sizes = {"vocab_size": 163840}
    (draft / "config.json").write_text(json.dumps(DEEPSEEK_V3 | sizes))
    assert load_draft_config(draft, verifier).aux_layer_ids == [1, 29, 57]
    assert load_draft_config(draft, verifier, "sglang").aux_layer_ids == [2, 30, 58]
    top = {"eagle_aux_hidden_state_layer_ids": [2, 30, 58]}
    (draft / "config.json").write_text(json.dumps(DEEPSEEK_V3 | sizes | top))
    assert load_draft_config(draft, verifier, "sglang").aux_layer_ids == [2, 30, 58]


def test_check_shows_where_a_published_reference_differs_from_ours(tmp_path: Path) -> None:
    """The published Kimi-K2.5 draft has another epsilon and rope than the verifier that ours is derived from."""
    verifier = write_kimi_config(tmp_path / "kimi")
    DraftConfig.from_verifier(verifier).save(tmp_path / "draft_config.json")
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "config.json").write_text(json.dumps(KIMI_K25))
    result = CliRunner().invoke(
        app, ["check", str(tmp_path / "draft_config.json"), str(tmp_path / "reference"), "--json"]
    )
    assert result.exit_code == 1, result.output
    answer = json.loads(result.stdout)
    assert [item["field"] for item in answer["disagreements"]] == [
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
    ]


def test_a_complete_configuration_is_read_alike_with_and_without_transformers(
    tmp_path: Path, verifier_dir: Path
) -> None:
    """A file that leaves something out goes through transformers, which takes seconds to import."""
    kimi = write_kimi_config(tmp_path / "kimi")
    for number, directory in enumerate((verifier_dir, kimi)):
        data = json.loads((directory / "config.json").read_text())
        text = data.get("text_config", data)
        del text["hidden_act"]  # silu by default
        incomplete = tmp_path / str(number)
        incomplete.mkdir()
        (incomplete / "config.json").write_text(json.dumps(data))
        light, full = (vars(read_verifier(path)) for path in (directory, incomplete))
        assert {**light, "name_or_path": ""} == {**full, "name_or_path": ""}
