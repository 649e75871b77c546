"""`headrace draft check`: every disagreement between files, and with the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from draft_helpers import edit_config, make_checkpoint, small_config
from typer.testing import CliRunner

from draft.compare import collect_statements, find_disagreements, implied_by_weights
from draft.config import DraftConfig
from draft.export import export
from draft.tolerance import same
from ray_jobs.commands.draft import app


@pytest.fixture
def drafts(tmp_path: Path, verifier_dir: Path) -> Path:
    config = small_config(verifier_dir, draft_vocab_size=256, intermediate_size=64)
    checkpoint = make_checkpoint(tmp_path / "checkpoint", config)
    export(checkpoint, tmp_path / "flat", "flat")
    export(checkpoint, tmp_path / "nested", "nested")
    return tmp_path


def disagreements(*paths: Path) -> dict[str, object]:
    found = find_disagreements(collect_statements(paths), implied_by_weights(paths[0]))
    return {disagreement.field: disagreement for disagreement in found}


def test_all_forms_of_one_draft_agree(drafts: Path) -> None:
    statements = collect_statements([drafts / "flat", drafts / "nested", drafts / "checkpoint" / "draft_config.json"])
    assert [statement.kind for statement in statements] == [
        "draft_config",
        "flat",
        "draft_config",
        "nested",
        "draft_config",
    ]
    assert find_disagreements(statements, implied_by_weights(drafts / "flat")) == []


def test_a_wrong_head_dim_is_blamed_on_the_file_that_has_it(drafts: Path) -> None:
    edit_config(drafts / "flat", lambda data: data.update(head_dim=56))
    found = find_disagreements(collect_statements([drafts / "flat"]), implied_by_weights(drafts / "flat"))
    by_field = {disagreement.field: disagreement for disagreement in found}
    assert by_field["head_dim"].weights == "64"
    assert by_field["head_dim"].wrong == (str(drafts / "flat" / "config.json"),)
    assert by_field["head_dim"].values[str(drafts / "flat" / "draft_config.json")] == "64"


def test_an_absent_head_dim_is_what_readers_make_of_it(drafts: Path) -> None:
    edit_config(drafts / "flat", lambda data: (data.pop("head_dim"), data.update(num_attention_heads=18)))
    found = disagreements(drafts / "flat")
    assert "absent: vLLM reads this" in str(found["head_dim"])
    assert "num_attention_heads" in found


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "rope_parameters"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 16, 28]}, "aux_layer_ids"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"draft_vocab_size": 255}, "draft_vocab_size"),
        ({"vocab_size": 49153}, "vocab_size"),
        ({"intermediate_size": 65}, "intermediate_size"),
        ({"num_key_value_heads": 9}, "num_key_value_heads"),
        ({"max_position_embeddings": 4096}, "max_position_embeddings"),
        ({"fc_norm": True}, "fc_norm"),
    ],
)
def test_every_field_is_compared(drafts: Path, change: dict, field: str) -> None:
    edit_config(drafts / "flat", lambda data: data.update(change))
    assert list(disagreements(drafts / "flat")) == [field]


def test_omitted_norm_before_residual_means_two_things(drafts: Path) -> None:
    """The same silence is false in a flat file and true in a nested one."""
    for form in ("flat", "nested"):
        edit_config(drafts / form, lambda data: data.pop("norm_before_residual"))
    assert list(disagreements(drafts / "nested")) == ["norm_before_residual"]
    assert disagreements(drafts / "flat") == {}
    both = disagreements(drafts / "flat" / "config.json", drafts / "nested" / "config.json")
    assert list(both) == ["norm_before_residual"]


def test_numbers_that_json_prints_differently_agree(drafts: Path) -> None:
    edit_config(drafts / "flat", lambda data: data.update(rms_norm_eps=1e-5, rope_theta=100000))
    assert disagreements(drafts / "flat") == {}


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (1e-5, 9.999999747378752e-06, True),
        (1e-5, 1e-6, False),
        (64, 64.0, True),
        (64, 65, False),
        (50000.0, 50001, False),
        (1, True, False),
        ({"factor": 64}, {"factor": 64.0}, True),
        ({"factor": 64}, {"factor": 64.0, "beta_fast": 32}, False),
        ([2, 30, 58], (2, 30, 58), True),
        ([2, 30, 58], [2, 30], False),
        ("silu", "silu", True),
        (float("nan"), float("nan"), False),
    ],
)
def test_what_counts_as_the_same_value(left: object, right: object, equal: bool) -> None:
    assert same(left, right) is equal
    assert same(right, left) is equal


def test_number_of_layer_ids_against_fc(drafts: Path) -> None:
    ids = [2, 15, 20, 27]
    edit_config(drafts / "flat", lambda data: data.update(eagle_aux_hidden_state_layer_ids=ids))
    edit_config(drafts / "flat", lambda data: data.update(aux_layer_ids=ids), "draft_config.json")
    found = disagreements(drafts / "flat")
    assert list(found) == ["aux_layer_ids"]
    assert "3 ids" in str(found["aux_layer_ids"])


def test_command_exit_codes_and_json(drafts: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["check", str(drafts / "flat"), str(drafts / "nested")])
    assert good.exit_code == 0
    assert "agree" in good.output
    edit_config(drafts / "nested", lambda data: data["transformer_layer_config"].update(head_dim=32))
    bad = runner.invoke(app, ["check", str(drafts / "flat"), str(drafts / "nested"), "--json"])
    assert bad.exit_code == 1
    answer = json.loads(bad.stdout)
    assert not answer["agree"]
    assert [item["field"] for item in answer["disagreements"]] == ["head_dim"]
    table = runner.invoke(app, ["check", str(drafts / "flat"), str(drafts / "nested")])
    assert table.exit_code == 1
    assert "head_dim" in table.output
    missing = runner.invoke(app, ["check", str(drafts / "nowhere")])
    assert isinstance(missing.exception, FileNotFoundError)


def test_init_writes_the_configuration(tmp_path: Path, verifier_dir: Path) -> None:
    runner = CliRunner()
    out = tmp_path / "draft_config.json"
    command = [
        "init",
        "--verifier",
        str(verifier_dir),
        "-o",
        str(out),
        "--layers",
        "3,10,20",
        "--verifier-name",
        "org/m",
    ]
    made = runner.invoke(app, [*command, "--set", "num_key_value_heads=9", "--set", "norm_before_residual=true"])
    assert made.exit_code == 0, made.output
    config = DraftConfig.load(out)
    assert config.aux_layer_ids == [3, 10, 20]
    assert config.num_key_value_heads == 9
    assert config.norm_before_residual
    assert config.draft_vocab_size == 32000
    assert config.verifier.name_or_path == "org/m"
    again = runner.invoke(app, command)
    assert isinstance(again.exception, ValueError)
    assert "--force" in str(again.exception)
    unknown = runner.invoke(app, [*command, "--force", "--set", "heads=9"])
    assert "heads" in str(unknown.exception)
