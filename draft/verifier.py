"""What a draft needs to know of its verifier, read from the verifier's own configuration (never from its weights)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft.jsonfile import is_there, read_json_object

# Keys of a rope description that a Llama-type draft and both of its runtimes (transformers in training, vLLM in
# serving) understand alike. `partial_rotary_factor` is left out on purpose: transformers' Llama rotates the whole head
# whatever it says, vLLM rotates the part, so a draft that carried it would be served with other positions than it was
# trained with. `mrope_section` is left out because a draft reads text positions only.
ROPE_KEYS = (
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "attention_factor",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "long_factor",
    "short_factor",
)
ROPE_NUMBERS = {*ROPE_KEYS} - {"rope_type", "truncate", "long_factor", "short_factor"}
DEFAULT_ROPE_THETA = 10000.0  # what transformers' LlamaConfig assumes where a file says nothing


# What is read of a verifier's configuration; one name of each group is enough.
WANTED_FIELDS = (
    ("hidden_size",),
    ("intermediate_size",),
    ("num_attention_heads",),
    ("num_key_value_heads",),
    ("num_hidden_layers",),
    ("head_dim", "v_head_dim"),
    ("vocab_size",),
    ("hidden_act",),
    ("rms_norm_eps",),
    ("max_position_embeddings",),
    ("rope_parameters", "rope_theta"),
    ("bos_token_id",),
    ("eos_token_id",),
    ("pad_token_id",),
)


@dataclass(frozen=True)
class VerifierShape:
    """The numbers of a verifier's language model that its draft has to share.

    `head_dim` is the width of one value head. For multi-head latent attention (DeepSeek-V3, Kimi) that is
    `v_head_dim`: neither hidden_size / num_attention_heads (Kimi: 112) nor transformers' `head_dim` attribute, which
    for these models is the rotary part only (64).
    """

    name_or_path: str
    architectures: tuple[str, ...]
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None


def read_verifier(directory: Path | str) -> VerifierShape:
    """Describe the verifier in `directory` from its config.json, multimodal wrappers included.

    Raises FileNotFoundError where there is no config.json and ValueError where it cannot be read as a model's.
    """
    directory = Path(directory)
    config_file = directory / "config.json"
    if not is_there(config_file):
        raise FileNotFoundError(f"verifier {directory} has no config.json: give the directory of a Hugging Face model")
    raw = read_json_object(config_file)
    try:
        text = _text_config(directory, raw)
    except (ValueError, TypeError, AttributeError, KeyError) as error:  # whatever a broken file makes a parser raise
        raise ValueError(f"{config_file} is no model configuration: {error}") from error

    def need(name: str) -> Any:
        if text.get(name) is None:
            raise ValueError(f"{config_file} says nothing of {name}: a draft cannot be derived from it")
        return text[name]

    hidden_size = int(need("hidden_size"))
    num_heads = int(need("num_attention_heads"))
    return VerifierShape(
        name_or_path=str(directory),
        architectures=tuple(raw.get("architectures") or ()),
        model_type=str(raw.get("model_type", "")),
        num_hidden_layers=int(need("num_hidden_layers")),
        hidden_size=hidden_size,
        # A mixture-of-experts verifier without a dense width gets the common gated ratio, as in speculators.
        intermediate_size=int(text.get("intermediate_size") or 3 * hidden_size),
        num_attention_heads=num_heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=_head_dim(text, hidden_size, num_heads),
        vocab_size=int(need("vocab_size")),
        hidden_act=str(text.get("hidden_act") or "silu"),
        rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
        max_position_embeddings=int(need("max_position_embeddings")),
        rope_parameters=normal_rope(text),
        bos_token_id=text.get("bos_token_id"),
        eos_token_id=text.get("eos_token_id"),
        pad_token_id=text.get("pad_token_id"),
    )


def _text_config(directory: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """The language model's configuration, with transformers' defaults filled in where it leaves anything to them.

    The raw one for unknown model types.
    """
    nested = raw.get("text_config")
    nested = nested if isinstance(nested, dict) else raw
    # Importing transformers takes longer than everything else here.
    if all(any(name in nested for name in names) for names in WANTED_FIELDS):
        return nested

    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if raw.get("model_type") not in CONFIG_MAPPING:
        return nested
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return {**nested, **config.get_text_config(decoder=True).to_dict()}


def _head_dim(text: dict[str, Any], hidden_size: int, num_heads: int) -> int:
    if text.get("kv_lora_rank"):
        if not text.get("v_head_dim"):
            raise ValueError("the verifier has multi-head latent attention but no v_head_dim: set head_dim yourself")
        return int(text["v_head_dim"])
    if text.get("head_dim"):
        return int(text["head_dim"])
    if hidden_size % num_heads:
        raise ValueError(
            f"the verifier names no head_dim and hidden_size {hidden_size} is no multiple of {num_heads} heads: "
            "set head_dim yourself"
        )
    return hidden_size // num_heads


def normal_rope(config: dict[str, Any]) -> dict[str, Any]:
    """One flat rope description out of any of the spellings in use, restricted to ROPE_KEYS.

    Understands transformers 5 (`rope_parameters`, also nested by layer type), transformers 4 (`rope_theta` beside
    `rope_scaling` with `type` or `rope_type`) and both at once, where `rope_scaling` wins as it does in transformers.
    """
    stated = [config.get(name) for name in ("rope_scaling", "rope_parameters")]
    wrong = [value for value in stated if value is not None and not isinstance(value, dict)]
    if wrong:
        raise ValueError(f"rope_scaling and rope_parameters must be objects, not {wrong[0]!r}")
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    for layer_type in ("full_attention", "sliding_attention"):
        if isinstance(rope.get(layer_type), dict):
            rope = dict(rope[layer_type])
    rope.setdefault("rope_type", rope.get("type") or "default")
    if rope.get("rope_theta") is None:
        parameters = config.get("rope_parameters") or {}
        rope["rope_theta"] = config.get("rope_theta") or parameters.get("rope_theta") or DEFAULT_ROPE_THETA
    theta = rope["rope_theta"]
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta < math.inf:
        raise ValueError(f"rope_theta must be a positive number, not {theta!r}")
    if rope["rope_type"] in ("mrope", "default"):
        return {"rope_type": "default", "rope_theta": float(theta)}
    normal = {key: rope[key] for key in ROPE_KEYS if rope.get(key) is not None}
    normal["rope_theta"] = float(theta)
    for key in ROPE_NUMBERS & normal.keys():
        if not isinstance(normal[key], int | float) or not math.isfinite(normal[key]):
            raise ValueError(f"the rope's {key} must be a number, not {normal[key]!r}")
    return normal
