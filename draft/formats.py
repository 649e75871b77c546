"""The two configuration files that engines read, derived from a DraftConfig, and the way back."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from draft.config import DraftConfig
from draft.verifier import VerifierShape, normal_rope

Form = Literal["flat", "nested"]
Engine = Literal["vllm", "sglang"]
SGLANG_LAYER_SHIFT = 1
FLAT_ARCHITECTURE = "LlamaForCausalLMEagle3"

# What vLLM assumes where a file says nothing; the two forms differ on purpose there, so exports always write it out.
ABSENT_NORM_BEFORE_RESIDUAL: dict[Form, bool] = {"flat": False, "nested": True}


def read_json_object(path: Path) -> dict[str, Any]:
    """A configuration file. Raises FileNotFoundError, or ValueError where it holds no JSON object."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object")
    return data


def form_of(config: dict[str, Any]) -> Form:
    """Which form a config.json has: the speculators library marks its own."""
    return "nested" if "speculators_model_type" in config else "flat"


def _llama_fields(config: DraftConfig) -> dict[str, Any]:
    """The decoder's description as transformers' LlamaConfig has it, the same in both forms."""
    return {
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": config.mlp_bias,
        "model_type": "llama",
        "num_attention_heads": config.num_attention_heads,
        # Without it vLLM sizes fc for three layers unless eagle_config has the ids, which the nested form never has.
        "num_aux_hidden_states": len(config.aux_layer_ids),
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "pad_token_id": config.pad_token_id,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope_parameters),
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def to_flat(config: DraftConfig, *, engine: Engine = "vllm") -> dict[str, Any]:
    """config.json of the flat form.

    Layer ids stand at top level, where both runners of vLLM look first, and in `eagle_config`, where older versions and
    SGLang look. SGLang counts "after layer k" and adds one to what it reads there: for `engine="sglang"` the ids in
    `eagle_config` are one less. Rope stands in the transformers 5 spelling and in that of transformers 4, which would
    otherwise silently take its default theta.
    """
    shift = SGLANG_LAYER_SHIFT if engine == "sglang" else 0
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    flat = _llama_fields(config) | {
        "architectures": [FLAT_ARCHITECTURE],
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - shift for layer in config.aux_layer_ids],
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        },
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }
    return dict(sorted(flat.items()))


def to_nested(config: DraftConfig) -> dict[str, Any]:
    """config.json as `speculators` 0.9 saves an Eagle3DraftModel (also what `vllm serve DRAFT` alone accepts)."""
    nested = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": config.dtype,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "embed_requires_grad": False,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "speculators_config": {
            "algorithm": config.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_speculative_tokens,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "architectures": list(config.verifier.architectures),
                "name_or_path": config.verifier.name_or_path,
            },
        },
        "speculators_model_type": config.algorithm,
        "speculators_version": version("speculators"),
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": _llama_fields(config),
    }
    return dict(sorted(nested.items()))


def to_form(config: DraftConfig, form: Form, *, engine: Engine = "vllm") -> dict[str, Any]:
    """config.json of either form. Raises ValueError where SGLang could not serve the draft."""
    if form not in ("flat", "nested"):
        raise ValueError(f"form {form!r} is neither 'flat' nor 'nested'")
    if engine not in ("vllm", "sglang"):
        raise ValueError(f"engine {engine!r} is neither 'vllm' nor 'sglang'")
    if engine == "sglang":
        # Read from sgl-project/sglang's llama_eagle3.py: fc is sized for three layers, names it does not know are
        # dropped without a word, and the variants below do not exist there.
        reasons = {
            "form nested": form == "nested",
            "layer id 0": config.aux_layer_ids[0] == 0,
            f"{len(config.aux_layer_ids)} layers instead of 3": len(config.aux_layer_ids) != 3,
            "more than one decoder layer": config.num_hidden_layers > 1,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
            "attention_bias": config.attention_bias,
        }
        unknown = [reason for reason, applies in reasons.items() if applies]
        if unknown:
            raise ValueError(f"SGLang's EAGLE-3 draft does not know {', '.join(unknown)}: export for vllm")
    return to_flat(config, engine=engine) if form == "flat" else to_nested(config)


def engine_view(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json of either form by their DraftConfig names, as far as the file states them.

    Nothing is assumed: a field that the file does not state is absent from the result.
    """
    form = form_of(config)
    decoder = config.get("transformer_layer_config") if form == "nested" else config
    if not isinstance(decoder, dict):
        raise ValueError("transformer_layer_config must be an object")
    view = {name: decoder[name] for name in _DECODER_FIELDS if decoder.get(name) is not None}
    view |= {name: config[name] for name in _DRAFT_FIELDS if config.get(name) is not None}
    eagle = config.get("eagle_config") or {}
    if "norm_before_fc" in eagle:  # vLLM prefers this place
        view["norm_before_fc"] = eagle["norm_before_fc"]
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        view["aux_layer_ids"] = list(ids)
    if any(decoder.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")):
        view["rope_parameters"] = normal_rope(decoder)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype:
        view["dtype"] = str(dtype).removeprefix("torch.")
    if form == "nested":
        speculators = config.get("speculators_config") or {}
        methods = speculators.get("proposal_methods") or [{}]
        if methods[0].get("speculative_tokens"):
            view["num_speculative_tokens"] = methods[0]["speculative_tokens"]
        view["algorithm"] = speculators.get("algorithm", config["speculators_model_type"])
    return view


_DECODER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "vocab_size",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_DRAFT_FIELDS = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def from_engine(config: dict[str, Any], verifier: VerifierShape, verifier_name: str | None = None) -> DraftConfig:
    """The DraftConfig that a config.json of either form describes, read as vLLM reads it.

    `verifier` supplies what such files do not say (its number of layers) and stands for itself in the result; the name
    in a nested file wins over the path.
    """
    view = engine_view(config)
    form = form_of(config)
    view.setdefault("norm_before_residual", ABSENT_NORM_BEFORE_RESIDUAL[form])
    if form == "nested" and verifier_name is None:
        speculators = config.get("speculators_config") or {}
        verifier_name = (speculators.get("verifier") or {}).get("name_or_path")
    for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        if name not in view:
            raise ValueError(f"config.json does not state {name}")
    view.setdefault("num_key_value_heads", view["num_attention_heads"])
    view.setdefault("head_dim", view["hidden_size"] // view["num_attention_heads"])
    view.setdefault("draft_vocab_size", view["vocab_size"])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        view.setdefault(name, None)
    return DraftConfig.from_verifier(verifier, verifier_name=verifier_name, **view)
