"""What a configuration asks for that a draft with plain Llama decoder layers does not have.

Training (the speculators library), export and validation know one decoder: Llama attention over whole heads, a gated
MLP, full causal attention. Engines serve others too, and some of the switches change the arithmetic of the same
tensors without a word, so none of them is passed over.
"""

from __future__ import annotations

from typing import Any

# Names that vLLM 0.32 maps to its Llama-type EAGLE-3 draft, and those of the speculators library.
LLAMA_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",  # with the method named, vLLM makes it Eagle3LlamaForCausalLM
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
)
EXPERT_FIELDS = ("num_local_experts", "n_routed_experts", "num_experts", "use_moe")


def find_foreign_parts(config: dict[str, Any]) -> list[str]:
    """Everything in a config.json of either form that asks for another draft than a Llama-type EAGLE-3 one."""
    speculator = config.get("speculators_model_type")
    if speculator not in (None, "eagle3"):
        return [f"speculators_model_type {speculator!r} is no EAGLE-3 draft"]
    decoder = config if speculator is None else config.get("transformer_layer_config")
    if not isinstance(decoder, dict):
        return []  # nothing to look at: the readers of the file say so
    eagle = config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    other = [name for name in named if name not in LLAMA_ARCHITECTURES]
    mla = {name: decoder[name] for name in ("kv_lora_rank", "q_lora_rank") if decoder.get(name)}
    windows = _windows(decoder)
    target_hidden, hidden = config.get("target_hidden_size"), decoder.get("hidden_size")
    reasons = {
        f"multi-head latent attention ({_list(mla)})": bool(mla),
        f"architectures {other}": bool(other),
        f"model_type {decoder.get('model_type')!r}": decoder.get("model_type") not in (None, "llama"),
        f"experts ({_list({name: decoder[name] for name in EXPERT_FIELDS if decoder.get(name)})})": any(
            decoder.get(name) for name in EXPERT_FIELDS
        ),
        f"sliding windows ({_list(windows)})": bool(windows),
        "attention that is not causal (is_causal)": not decoder.get("is_causal", True),
        f"scaled logits (logit_scale {decoder.get('logit_scale')})": decoder.get("logit_scale") not in (None, 1),
        f"multi-token prediction (n_predict {decoder.get('n_predict')})": decoder.get("n_predict") is not None,
        "quantized weights (quantization_config)": bool(decoder.get("quantization_config")),
        "no fc over auxiliary states (use_aux_hidden_state false)": eagle.get("use_aux_hidden_state") is False,
        f"a width of its own (hidden_size {hidden}, target_hidden_size {target_hidden})": (
            isinstance(target_hidden, int) and isinstance(hidden, int) and target_hidden != hidden
        ),
    }
    for name in ("bias", "qkv_bias"):  # vLLM's Llama reads them beside attention_bias
        stated = decoder.get(name)
        reasons[f"{name} {stated} unlike attention_bias"] = stated is not None and stated != bool(
            decoder.get("attention_bias")
        )
    return [reason for reason, applies in reasons.items() if applies]


def _windows(decoder: dict[str, Any]) -> dict[str, Any]:
    layer_types = decoder.get("layer_types")
    windows: dict[str, Any] = {}
    if isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        windows["layer_types"] = layer_types
    if decoder.get("use_sliding_window"):
        windows["use_sliding_window"] = True
    return windows


def _list(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
