"""Names and shapes of a draft's tensors, and what vLLM makes of the names in a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draft.config import DraftConfig
    from draft.formats import Form

EMBEDDING = "embed_tokens.weight"
# Parts of the verifier that the speculators library holds for training and never saves; vLLM refuses them.
VERIFIER_ONLY = ("verifier_norm.weight", "verifier_lm_head.weight")


def tensor_shapes(config: DraftConfig, *, embedding: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor of the draft by the speculators library's names.

    The first decoder layer reads [embedding, state]: its q, k and v take 2 x hidden_size. d2t and t2d exist only where
    the draft vocabulary is a subset. The embedding is the verifier's unless a draft carries its own.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    num_aux = len(config.aux_layer_ids)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, num_aux * hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"layers.{layer}."
        inputs = 2 * hidden if layer == 0 else hidden
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q_rows, inputs),
            prefix + "self_attn.k_proj.weight": (kv_rows, inputs),
            prefix + "self_attn.v_proj.weight": (kv_rows, inputs),
            prefix + "self_attn.o_proj.weight": (hidden, q_rows),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
        if layer == 0:
            shapes[prefix + "hidden_norm.weight"] = (hidden,)
        if config.attention_bias:
            for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows), ("o_proj", hidden)):
                shapes[f"{prefix}self_attn.{name}.bias"] = (rows,)
        if config.mlp_bias:
            for name, rows in (("gate_proj", inner), ("up_proj", inner), ("down_proj", hidden)):
                shapes[f"{prefix}mlp.{name}.bias"] = (rows,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (num_aux * hidden,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (hidden,) for index in range(num_aux)}
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}
    if config.uses_draft_vocab:
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    if embedding:
        shapes[EMBEDDING] = (config.vocab_size, hidden)
    return shapes


def name_in_form(name: str, form: Form, num_hidden_layers: int) -> str:
    """A tensor's name in an export. One-layer flat drafts say `midlayer.`, the only name that SGLang knows."""
    if form == "flat" and num_hidden_layers == 1 and name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return name


def canonical_name(name: str) -> str:
    """The speculators library's name for a tensor of either form."""
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def vllm_name(name: str) -> str | None:
    """The parameter that vLLM 0.32 loads a checkpoint's tensor into, before q/k/v and gate/up are stacked.

    None for t2d, which it skips. Follows Eagle3LlamaForCausalLM.load_weights: names are matched by *substring*, so that
    `model.layers.0.x` becomes `model.model.layers.0.x`, which no parameter has.
    """
    if "t2d" in name:
        return None
    if "d2t" in name:
        return name.replace("d2t", "draft_id_to_target_id")
    if "lm_head" not in name:
        name = "model." + name
    return name.replace("midlayer.", "layers.0.")


def expected_vllm_names(config: DraftConfig) -> set[str]:
    """Parameters of vLLM's draft that a complete checkpoint fills (its own embedding aside)."""
    names = (vllm_name(name) for name in tensor_shapes(config))
    return {name for name in names if name is not None}


def implied_numbers(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """What a checkpoint's tensors say of its configuration, by DraftConfig names.

    `shapes` may have either form's names. Head counts cannot be told from shapes: `q_rows` and `kv_rows` are heads
    times head_dim.
    """
    by_name = {canonical_name(name): shape for name, shape in shapes.items()}
    numbers: dict[str, int] = {}

    def take(field: str, name: str, axis: int) -> None:
        if name in by_name and len(by_name[name]) > axis:
            numbers.setdefault(field, by_name[name][axis])

    take("hidden_size", "norm.weight", 0)
    take("hidden_size", "layers.0.hidden_norm.weight", 0)
    take("intermediate_size", "layers.0.mlp.gate_proj.weight", 0)
    take("q_rows", "layers.0.self_attn.q_proj.weight", 0)
    take("kv_rows", "layers.0.self_attn.k_proj.weight", 0)
    take("draft_vocab_size", "lm_head.weight", 0)
    take("draft_vocab_size", "d2t", 0)
    take("vocab_size", "t2d", 0)
    take("vocab_size", EMBEDDING, 0)
    hidden, fc = numbers.get("hidden_size"), by_name.get("fc.weight", ())
    if hidden and len(fc) == 2 and fc[0] == hidden and fc[1] % hidden == 0:  # else fc itself is wrong
        numbers["num_aux_layers"] = fc[1] // hidden
    numbers["num_hidden_layers"] = count_layers(by_name)
    return numbers


def count_layers(names: Iterable[str]) -> int:
    indices = {int(part[1]) for part in (canonical_name(n).split(".") for n in names) if _is_layer(part)}
    return len(indices)


def _is_layer(parts: list[str]) -> bool:
    return len(parts) > 1 and parts[0] == "layers" and parts[1].isdigit()
