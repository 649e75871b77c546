"""The draft's single configuration: derived from a verifier, checked as a whole, read back from either form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draft_helpers import KIMI_TEXT_CONFIG, small_config, write_kimi_config
from draft_strategies import draft_configs
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.config import DraftConfig
from draft.formats import engine_view, from_engine, to_form
from draft.verifier import VerifierShape, normal_rope, read_verifier
from draft.weights import canonical_name, implied_numbers, name_in_form, tensor_shapes, vllm_name


def test_derives_a_draft_from_the_embedded_verifier(verifier_dir: Path) -> None:
    config = DraftConfig.from_verifier(verifier_dir, draft_vocab_size=4096)
    assert config.aux_layer_ids == [2, 15, 27]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.hidden_size, config.intermediate_size) == (576, 1536)
    assert (config.vocab_size, config.draft_vocab_size) == (49152, 4096)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert config.verifier.architectures == ["LlamaForCausalLM"]
    assert config.verifier.num_hidden_layers == 30


@pytest.mark.parametrize("model_type", ["kimi_k25", "a_type_that_transformers_does_not_know"])
def test_kimi_wrapper_gives_its_text_part_with_value_head_width_and_yarn(tmp_path: Path, model_type: str) -> None:
    config = DraftConfig.from_verifier(write_kimi_config(tmp_path, model_type))
    # 7168 / 64 is 112, and transformers' head_dim for this family is the rotary part, 64. Both are wrong.
    assert config.head_dim == 128
    assert config.aux_layer_ids == [2, 30, 58]
    assert config.vocab_size == 163840
    assert config.intermediate_size == 18432
    assert config.max_position_embeddings == 262144
    assert config.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    assert tensor_shapes(config)["layers.0.self_attn.q_proj.weight"] == (64 * 128, 2 * 7168)


def test_deepseek_config_without_wrapper(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**KIMI_TEXT_CONFIG, "model_type": "deepseek_v3"}))
    assert read_verifier(tmp_path).head_dim == 128


def test_missing_fields_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_verifier(tmp_path)
    incomplete = {key: value for key, value in KIMI_TEXT_CONFIG.items() if key != "vocab_size"}
    (tmp_path / "config.json").write_text(json.dumps({**incomplete, "model_type": "unheard_of"}))
    with pytest.raises(ValueError, match="vocab_size"):
        read_verifier(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aux_layer_ids": [2, 15, 30]}, "final state"),
        ({"aux_layer_ids": [15, 2, 27]}, "ascend"),
        ({"aux_layer_ids": [2, 2, 27]}, "ascend"),
        ({"aux_layer_ids": [2, 15, 31]}, r"within \[0, 29\]"),
        ({"aux_layer_ids": [-1, 15, 27]}, r"within \[0, 29\]"),
        ({"draft_vocab_size": 50000}, "exceeds vocab_size"),
        ({"num_key_value_heads": 4}, "multiple"),
        ({"head_dim": 63}, "even"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "factor"),
        ({"hidden_dim": 576}, "hidden_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_contradictions_are_refused(verifier_dir: Path, changes: dict[str, Any], message: str) -> None:
    config = small_config(verifier_dir)
    with pytest.raises(ValueError, match=message):
        config.replace(**changes)


def test_load_names_file_version_and_fields(verifier_dir: Path, tmp_path: Path) -> None:
    config = small_config(verifier_dir)
    path = config.save(tmp_path)
    assert DraftConfig.load(tmp_path) == config
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "schema_version": 2}))
    with pytest.raises(ValueError, match=r"schema_version 2 .*expected 1"):
        DraftConfig.load(path)
    path.write_text(json.dumps({**data, "head_dim": "wide", "colour": "red"}))
    with pytest.raises(ValueError, match=r"draft_config\.json.*head_dim.*colour"):
        DraftConfig.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        DraftConfig.load(path)
    with pytest.raises(FileNotFoundError, match="draft init"):
        DraftConfig.load(tmp_path / "absent.json")


def test_nested_form_is_what_speculators_saves(verifier_dir: Path) -> None:
    from speculators.config import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    ours = small_config(verifier_dir, norm_before_residual=True, norm_output=True).to_nested()
    parsed = SpeculatorModelConfig.from_dict(ours)
    assert isinstance(parsed, Eagle3SpeculatorConfig)
    saved = json.loads(parsed.to_json_string())
    for name, value in ours.items():
        if name not in ("architectures", "transformer_layer_config"):
            assert saved[name] == value, name
    for name, value in ours["transformer_layer_config"].items():
        assert saved["transformer_layer_config"].get(name) == value, name


def test_flat_form_parses_with_transformers_alike_in_both_rope_spellings(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = DraftConfig.from_verifier(write_kimi_config(tmp_path / "kimi"))
    flat = config.to_flat()
    assert flat["head_dim"] == 128
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert flat["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert flat["num_aux_hidden_states"] == 3
    modern = {key: value for key, value in flat.items() if key not in ("rope_theta", "rope_scaling")}
    legacy = {key: value for key, value in flat.items() if key != "rope_parameters"}
    for number, data in enumerate((flat, modern, legacy)):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(data))
        parsed = AutoConfig.from_pretrained(directory).to_dict()
        assert normal_rope(parsed) == config.rope_parameters


def test_sglang_counts_layers_one_less_and_knows_no_variants(verifier_dir: Path) -> None:
    config = small_config(verifier_dir)
    flat = to_form(config, "flat", engine="sglang")
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    assert flat["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    with pytest.raises(ValueError, match="fc_norm"):
        to_form(config.replace(fc_norm=True), "flat", engine="sglang")
    with pytest.raises(ValueError, match="4 layers"):
        to_form(config.replace(aux_layer_ids=[2, 8, 15, 27]), "flat", engine="sglang")
    with pytest.raises(ValueError, match="form"):
        to_form(config, "pickle")  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(draft_configs(), st.sampled_from(["flat", "nested"]))
def test_both_forms_lead_back_to_the_same_draft(drawn: tuple[DraftConfig, VerifierShape], form: Any) -> None:
    config, shape = drawn
    written = json.loads(json.dumps(to_form(config, form)))
    assert from_engine(written, shape) == config
    stated = engine_view(written)
    assert stated["aux_layer_ids"] == config.aux_layer_ids
    assert {"head_dim", "norm_before_residual", "draft_vocab_size"} <= stated.keys()


@settings(max_examples=60, deadline=None)
@given(draft_configs(), st.sampled_from(["flat", "nested"]))
def test_weights_imply_the_configuration_they_come_from(drawn: tuple[DraftConfig, VerifierShape], form: Any) -> None:
    config, _ = drawn
    shapes = tensor_shapes(config)
    named = {name_in_form(name, form, config.num_hidden_layers): shape for name, shape in shapes.items()}
    assert {canonical_name(name) for name in named} == set(shapes)
    implied = implied_numbers(named)
    assert implied["hidden_size"] == config.hidden_size
    assert implied["intermediate_size"] == config.intermediate_size
    assert implied["q_rows"] == config.num_attention_heads * config.head_dim
    assert implied["kv_rows"] == config.num_key_value_heads * config.head_dim
    assert implied["draft_vocab_size"] == config.draft_vocab_size
    assert implied["num_aux_layers"] == len(config.aux_layer_ids)
    assert implied["num_hidden_layers"] == config.num_hidden_layers
    assert implied.get("vocab_size", config.vocab_size) == config.vocab_size


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("t2d", None),
        ("d2t", "draft_id_to_target_id"),
        ("lm_head.weight", "lm_head.weight"),
        ("fc.weight", "model.fc.weight"),
        ("midlayer.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_names_as_vllm_renames_them(name: str, parameter: str | None) -> None:
    assert vllm_name(name) == parameter
