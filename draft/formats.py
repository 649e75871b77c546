"""The two configuration files that engines read, derived from a DraftConfig, and the way back."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

from draft.config import DraftConfig
from draft.decoder import find_foreign_parts
from draft.verifier import DEFAULT_ROPE_THETA, VerifierShape, normal_rope

Form = Literal["flat", "nested"]
Engine = Literal["vllm", "sglang"]
SGLANG_LAYER_SHIFT = 1
FLAT_ARCHITECTURE = "LlamaForCausalLMEagle3"

# What vLLM assumes where a file says nothing; the two forms differ on purpose there, so exports always write it out.
ABSENT_NORM_BEFORE_RESIDUAL: dict[Form, bool] = {"flat": False, "nested": True}
# What transformers' LlamaConfig, which every reader of such a file goes through, takes for absent fields.
LLAMA_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA},
}


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

    Nothing is assumed: a field that the file does not state is absent from the result. Raises ValueError where a field
    has a value of another type than readers take.
    """
    form = form_of(config)
    decoder = config if form == "flat" else _object(config, "transformer_layer_config")
    if not decoder:
        raise ValueError("transformer_layer_config must be an object")
    view = {name: decoder[name] for name in _DECODER_FIELDS if decoder.get(name) is not None}
    view |= {name: config[name] for name in _DRAFT_FIELDS if config.get(name) is not None}
    eagle = _object(config, "eagle_config")
    if "norm_before_fc" in eagle:  # vLLM prefers this place
        view["norm_before_fc"] = eagle["norm_before_fc"]
    ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        view["aux_layer_ids"] = ids
    if any(decoder.get(key) for key in ("rope_parameters", "rope_scaling", "rope_theta")):
        view["rope_parameters"] = normal_rope(decoder)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype:
        view["dtype"] = str(dtype).removeprefix("torch.")
    if form == "nested":
        speculators = _object(config, "speculators_config")
        methods = speculators.get("proposal_methods")
        first = methods[0] if isinstance(methods, list) and methods else {}
        if isinstance(first, dict) and first.get("speculative_tokens"):
            view["num_speculative_tokens"] = first["speculative_tokens"]
        view["algorithm"] = speculators.get("algorithm", config["speculators_model_type"])
    _check_types(view)
    return view


def assumptions(config: dict[str, Any]) -> dict[str, Any]:
    """What vLLM 0.32 reads where a config.json of either form is silent, by DraftConfig names."""
    view = engine_view(config)
    assumed = LLAMA_DEFAULTS | {
        "norm_before_residual": ABSENT_NORM_BEFORE_RESIDUAL[form_of(config)],
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
    }
    heads, hidden, vocab = (view.get(name) for name in ("num_attention_heads", "hidden_size", "vocab_size"))
    if heads:
        assumed["num_key_value_heads"] = heads
        if hidden:
            assumed["head_dim"] = hidden // heads
    if vocab:
        assumed["draft_vocab_size"] = vocab
    return {name: value for name, value in assumed.items() if name not in view}


def _object(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of a configuration, {} where it is absent. Raises ValueError where it is something else."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, not {value!r}")
    return value


def _check_types(view: dict[str, Any]) -> None:
    """Raises ValueError naming the first field whose value no reader takes."""
    for name, value in view.items():
        if name in (*_DECODER_INTEGERS, "draft_vocab_size", "num_speculative_tokens"):
            right = _is_integer(value) and 0 < value < 2**31
        elif name in (*_DECODER_FLAGS, *_DRAFT_FLAGS):
            right = isinstance(value, bool)
        elif name == "rms_norm_eps":
            right = isinstance(value, int | float) and not isinstance(value, bool)
        elif name in ("aux_layer_ids", "eos_token_id") and isinstance(value, list):
            right = all(map(_is_integer, value))
        elif name in _TOKEN_IDS:
            right = _is_integer(value)
        elif name in ("hidden_act", "algorithm"):
            right = isinstance(value, str)
        else:
            right = name != "aux_layer_ids"
        if not right:
            raise ValueError(f"{name} cannot be {value!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_DECODER_INTEGERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_DECODER_FLAGS = ("attention_bias", "mlp_bias")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_DECODER_FIELDS = (*_DECODER_INTEGERS, *_DECODER_FLAGS, *_TOKEN_IDS, "hidden_act", "rms_norm_eps")
_DRAFT_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_DRAFT_FIELDS = ("draft_vocab_size", *_DRAFT_FLAGS)


def from_engine(config: dict[str, Any], verifier: VerifierShape, verifier_name: str | None = None) -> DraftConfig:
    """The DraftConfig that a config.json of either form describes, read as vLLM reads it.

    `verifier` supplies what such files do not say (its number of layers, and EAGLE-3's default layer ids) and stands
    for itself in the result; the name in a nested file wins over the path.

    Raises ValueError for another decoder than the Llama type and for fields that contradict each other.
    """
    foreign = find_foreign_parts(config)
    if foreign:
        raise ValueError(f"only drafts with plain Llama layers are supported, this one has {'; '.join(foreign)}")
    view = engine_view(config)
    for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        if name not in view:
            raise ValueError(f"config.json does not state {name}")
    if form_of(config) == "nested" and verifier_name is None:
        verifier_name = _object(_object(config, "speculators_config"), "verifier").get("name_or_path")
    fields: dict[str, Any] = {**dict.fromkeys(_TOKEN_IDS), **assumptions(config), **view}
    derived = DraftConfig.from_verifier(verifier, verifier_name=verifier_name, **fields)
    return derived.replace(draft_vocab_size=fields["draft_vocab_size"])  # as the file says, not cut to this verifier's
