"""Any draft that can be configured, and the verifier that it belongs to."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from draft.config import DraftConfig
from draft.verifier import VerifierShape


@st.composite
def draft_configs(draw: st.DrawFn) -> tuple[DraftConfig, VerifierShape]:
    num_layers = draw(st.integers(8, 80))
    kv_heads, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    vocab = draw(st.integers(64, 2000))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw(st.sampled_from([10000.0, 50000.0, 1e6]))}
    if draw(st.booleans()):
        rope |= {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
    shape = VerifierShape(
        name_or_path="some/verifier",
        architectures=("KimiK25ForConditionalGeneration",),
        model_type="kimi_k25",
        num_hidden_layers=num_layers,
        hidden_size=draw(st.integers(1, 16)) * 16,
        intermediate_size=draw(st.integers(1, 300)),
        num_attention_heads=kv_heads * groups,
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 64)),
        vocab_size=vocab,
        hidden_act="silu",
        rms_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        max_position_embeddings=131072,
        rope_parameters=rope,
        bos_token_id=draw(st.none() | st.integers(0, 63)),
        eos_token_id=draw(st.none() | st.integers(0, 63) | st.just([1, 2])),
        pad_token_id=None,
    )
    ids = sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1, max_size=5)))
    norm = draw(st.sampled_from([{}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}]))
    config = DraftConfig.from_verifier(
        shape,
        draft_vocab_size=draw(st.integers(1, vocab)),
        aux_layer_ids=ids,
        norm_before_residual=draw(st.booleans()),
        num_hidden_layers=draw(st.integers(1, 3)),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        **norm,
    )
    return config, shape
