"""Training checkpoints, exports in both forms, and the way back."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from draft_helpers import NOTES, edit_config, edit_tensors, make_checkpoint, random_tensors, small_config
from draft_strategies import draft_configs
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from draft.checkpoint import MARKER_NAME, MODEL_NAME, is_complete, read_checkpoint
from draft.config import DraftConfig
from draft.export import export
from draft.formats import Form
from draft.importing import import_draft
from draft.notes import Acceptance, ExportRecord
from draft.serve import serve_command
from draft.tensorfiles import INDEX_NAME, read_canonical, read_headers, weight_files
from draft.verifier import VerifierShape

FORMS: tuple[Form, Form] = ("flat", "nested")


@pytest.fixture(scope="module")
def config(verifier_dir: Path) -> DraftConfig:
    return small_config(verifier_dir, draft_vocab_size=256, intermediate_size=64, verifier_name="org/verifier")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, config: DraftConfig) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("draft") / "checkpoint", config)


def test_checkpoint_round_trip(tmp_path: Path, config: DraftConfig) -> None:
    tensors = random_tensors(config)
    optimizer = {"exp_avg": torch.arange(6.0).reshape(2, 3).T}
    directory = make_checkpoint(
        tmp_path / "c", config, tensors, state={"stream": [3, 4]}, extra_tensors={"optimizer": optimizer}
    )
    assert is_complete(directory)
    read = read_checkpoint(directory, verify=True)
    assert read.config == config
    assert read.state == {"stream": [3, 4]}
    assert read.notes == NOTES
    assert read.tensors().keys() == tensors.keys()
    assert all(torch.equal(read.tensors()[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(read.tensors("optimizer")["exp_avg"], optimizer["exp_avg"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"], "staging directories are gone"


def test_checkpoint_is_never_overwritten_and_never_half_there(tmp_path: Path, config: DraftConfig) -> None:
    directory = make_checkpoint(tmp_path / "c", config)
    with pytest.raises(FileExistsError):
        make_checkpoint(directory, config)
    with pytest.raises(TypeError):
        make_checkpoint(tmp_path / "d", config, state={"not JSON": object()})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_torn_copies_of_a_checkpoint_are_refused(tmp_path: Path, config: DraftConfig) -> None:
    directory = make_checkpoint(tmp_path / "c", config)
    weights = directory / MODEL_NAME
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="torn"):
        read_checkpoint(directory)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    read_checkpoint(directory)
    with pytest.raises(ValueError, match="digest"):
        read_checkpoint(directory, verify=True)
    weights.unlink()
    with pytest.raises(ValueError, match="missing"):
        read_checkpoint(directory)
    (directory / MARKER_NAME).unlink()
    with pytest.raises(FileNotFoundError, match="not a finished"):
        read_checkpoint(directory)


def test_checkpoint_of_an_unknown_version_is_refused(tmp_path: Path, config: DraftConfig) -> None:
    directory = make_checkpoint(tmp_path / "c", config)
    edit_config(directory, lambda marker: marker.update(format_version=9), MARKER_NAME)
    with pytest.raises(ValueError, match="format_version 9"):
        read_checkpoint(directory)


def test_tensors_that_do_not_fit_are_all_named(tmp_path: Path, config: DraftConfig) -> None:
    tensors = random_tensors(config)
    tensors["fc.weight"] = tensors["fc.weight"].T
    tensors["verifier_norm.weight"] = tensors.pop("norm.weight")
    with pytest.raises(ValueError, match=r"norm\.weight is missing.*verifier_norm.*fc\.weight is \[1728, 576\]"):
        make_checkpoint(tmp_path / "c", config, tensors)


@pytest.mark.parametrize("form", FORMS)
def test_export_casts_names_and_documents(tmp_path: Path, config: DraftConfig, checkpoint: Path, form: Form) -> None:
    acceptance = Acceptance(
        acceptance_length=1.675,
        position_rates=[0.401, 0.196, 0.079],
        num_drafts=11376,
        prompts="GSM8K",
        num_speculative_tokens=3,
    )
    out = export(checkpoint, tmp_path / "draft", form, acceptance=[acceptance])
    tensors = load_file(out / MODEL_NAME)
    prefix = "midlayer." if form == "flat" else "layers.0."
    assert f"{prefix}self_attn.q_proj.weight" in tensors
    trained = read_checkpoint(checkpoint).tensors()
    assert torch.equal(tensors["fc.weight"], trained["fc.weight"].to(torch.bfloat16))
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert "embed_tokens.weight" not in tensors
    assert json.loads((out / "config.json").read_text()) == (config.to_flat() if form == "flat" else config.to_nested())
    assert DraftConfig.load(out) == config
    record = ExportRecord.load(out)
    assert record.form == form
    assert record.notes.datasets == NOTES.datasets
    assert record.notes.acceptance == [acceptance]
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "org/verifier"
    assert "speculative-decoding" in front["tags"]
    for expected in ("s3://bucket/set", "ab" * 32, "1.675", "0.401 / 0.196 / 0.079", "vllm serve org/verifier"):
        assert expected in card


@pytest.mark.parametrize("form", FORMS)
def test_export_import_export_is_exact(tmp_path: Path, verifier_dir: Path, checkpoint: Path, form: Form) -> None:
    first = export(checkpoint, tmp_path / "first", form)
    back = import_draft(first, verifier_dir, tmp_path / "imported")
    second = export(back, tmp_path / "second", form)
    for name in (MODEL_NAME, "config.json", "draft_config.json", "headrace.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    other: Form = "nested" if form == "flat" else "flat"
    crossed = import_draft(export(back, tmp_path / "other", other), verifier_dir, tmp_path / "crossed")
    third = export(crossed, tmp_path / "third", form)
    assert (third / MODEL_NAME).read_bytes() == (first / MODEL_NAME).read_bytes()
    assert (third / "config.json").read_bytes() == (first / "config.json").read_bytes()


def write_verifier(directory: Path, shape: VerifierShape) -> Path:
    """A verifier's directory as far as importing reads it."""
    directory.mkdir()
    data = {**asdict(shape), "architectures": list(shape.architectures), "model_type": "unheard_of"}
    (directory / "config.json").write_text(json.dumps(data))
    return directory


@settings(max_examples=25, deadline=None)
@given(draft_configs(), st.sampled_from(FORMS), st.booleans(), st.booleans())
def test_round_trips_are_exact_for_any_draft(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[DraftConfig, VerifierShape],
    form: Form,
    embedding: bool,
    foreign: bool,
) -> None:
    """Every byte of every tensor and every field, over both forms and back; without our own files as well."""
    config, shape = drawn
    root = tmp_path_factory.mktemp("trip")
    other: Form = "nested" if form == "flat" else "flat"
    verifier = write_verifier(root / "verifier", shape)
    config = config.replace(verifier={**config.verifier.model_dump(), "name_or_path": str(verifier)})
    dtype = getattr(torch, config.dtype)
    tensors = random_tensors(config, dtype=dtype)
    if embedding:
        tensors["embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size).to(dtype)
    first = export(make_checkpoint(root / "c", config, tensors), root / "first", form)
    there = Path(shutil.copytree(first, root / "there"))
    if foreign:
        (there / "draft_config.json").unlink()
        (there / "headrace.json").unlink()
    crossed = export(import_draft(there, verifier, root / "c1"), root / "crossed", other)
    back = import_draft(crossed, verifier, root / "c2")
    assert read_checkpoint(back).config == config
    held = read_checkpoint(back).tensors()
    assert held.keys() == tensors.keys()
    assert all(held[name].dtype == tensor.dtype and torch.equal(held[name], tensor) for name, tensor in tensors.items())
    last = export(back, root / "last", form)
    for name in (MODEL_NAME, "config.json", "draft_config.json"):
        assert (first / name).read_bytes() == (last / name).read_bytes(), name


def test_import_of_a_foreign_flat_draft(
    tmp_path: Path, verifier_dir: Path, config: DraftConfig, checkpoint: Path
) -> None:
    """As published drafts are: no draft_config.json, no t2d, transformers 4 rope, nothing but what vLLM needs."""
    foreign = export(checkpoint, tmp_path / "foreign", "flat")
    for name in ("draft_config.json", "headrace.json", "README.md"):
        (foreign / name).unlink()
    edit_tensors(foreign, lambda tensors: tensors.pop("t2d"))
    for name in ("rope_parameters", "num_aux_hidden_states", "norm_before_residual", "target_hidden_size"):
        edit_config(foreign, lambda data, name=name: data.pop(name))
    back = read_checkpoint(import_draft(foreign, verifier_dir, tmp_path / "back"))
    assert back.config == config.replace(verifier={**config.verifier.model_dump(), "name_or_path": str(verifier_dir)})
    mine = read_checkpoint(checkpoint).tensors()
    assert torch.equal(back.tensors()["t2d"], mine["t2d"])


def test_import_refuses_what_contradicts_itself(tmp_path: Path, verifier_dir: Path, checkpoint: Path) -> None:
    drifted = export(checkpoint, tmp_path / "drifted", "flat")
    edit_config(drifted, lambda data: data.update(head_dim=128))
    with pytest.raises(ValueError, match="disagree about head_dim"):
        import_draft(drifted, verifier_dir, tmp_path / "a")
    (drifted / "draft_config.json").unlink()
    with pytest.raises(ValueError, match=r"q_proj\.weight is \[576, 1152\].*\[1152, 1152\]"):
        import_draft(drifted, verifier_dir, tmp_path / "b")


def test_export_refuses_what_cannot_be_served(tmp_path: Path, config: DraftConfig) -> None:
    tensors = random_tensors(config)
    tensors["fc.weight"][3, 4] = 3.4e38  # finite in fp32, beyond the largest bf16
    with pytest.raises(ValueError, match=r"fc\.weight has values that are not finite"):
        export(make_checkpoint(tmp_path / "a", config, tensors), tmp_path / "out")
    tensors = random_tensors(config)
    tensors["d2t"][5] += 1
    with pytest.raises(ValueError, match="mapping is unsound"):
        export(make_checkpoint(tmp_path / "b", config, tensors), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_embedding_is_optional_and_comes_from_the_head(
    tmp_path: Path, config: DraftConfig, checkpoint: Path, verifier_dir: Path
) -> None:
    with pytest.raises(ValueError, match="holds no embedding"):
        export(checkpoint, tmp_path / "out", embedding=True)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    save_file({"embed_tokens.weight": embedding}, tmp_path / "head.safetensors")
    out = export(checkpoint, tmp_path / "out", "nested", embedding=True, head=tmp_path / "head.safetensors")
    assert "embed_tokens.weight" not in read_headers(
        export(import_draft(out, verifier_dir, tmp_path / "kept"), tmp_path / "without", embedding=False)
    )
    assert torch.equal(read_canonical(read_headers(out))["embed_tokens.weight"], embedding.to(torch.bfloat16))
    save_file({"embed_tokens.weight": embedding[:-1]}, tmp_path / "short.safetensors")
    with pytest.raises(ValueError, match="the draft needs"):
        export(checkpoint, tmp_path / "out2", embedding=True, head=tmp_path / "short.safetensors")


def test_full_vocabulary_and_several_layers(tmp_path: Path, verifier_dir: Path) -> None:
    config = small_config(verifier_dir, intermediate_size=64, num_hidden_layers=2, fc_norm=True)
    config = config.replace(draft_vocab_size=config.vocab_size)
    out = export(make_checkpoint(tmp_path / "c", config), tmp_path / "out", "flat")
    names = read_headers(out).keys()
    assert {"layers.0.hidden_norm.weight", "layers.1.input_layernorm.weight", "fc_norm.2.weight"} <= names
    assert not {"d2t", "t2d", "layers.1.hidden_norm.weight"} & names
    back = import_draft(out, verifier_dir, tmp_path / "back")
    assert read_checkpoint(back).config == config


def test_serve_line_is_one_shell_command(tmp_path: Path, checkpoint: Path) -> None:
    out = export(checkpoint, tmp_path / "it's a draft", "flat")
    words = shlex.split(serve_command(out, "org/verifier", tensor_parallel_size=8))
    assert words[:5] == ["vllm", "serve", "org/verifier", "--tensor-parallel-size", "8"]
    assert words[5] == "--speculative-config"
    assert json.loads(words[6]) == {"method": "eagle3", "model": str(out), "num_speculative_tokens": 3}
    assert json.loads(shlex.split(serve_command(out, "v", num_speculative_tokens=5))[4])["num_speculative_tokens"] == 5
    with pytest.raises(ValueError, match="positive"):
        serve_command(out, "v", num_speculative_tokens=0)


def test_which_files_hold_the_weights(tmp_path: Path) -> None:
    """As vLLM reads a directory: all safetensors, or those that an index lists."""
    with pytest.raises(FileNotFoundError, match=r"has no .*safetensors file$"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(FileNotFoundError, match=r"only pytorch_model\.bin: save the tensors as safetensors"):
        weight_files(tmp_path)
    for number in (1, 2):
        save_file({f"t{number}": torch.ones(2)}, tmp_path / f"part-{number}.safetensors")
    assert set(read_headers(tmp_path)) == {"t1", "t2"}
    index = tmp_path / INDEX_NAME
    index.write_text(json.dumps({"weight_map": {"t2": "part-2.safetensors"}}))
    assert set(read_headers(tmp_path)) == {"t2"}
    index.write_text(json.dumps({"weight_map": {"t2": "part-2.safetensors", "t3": "part-3.safetensors"}}))
    with pytest.raises(ValueError, match=r"not there: part-3\.safetensors"):
        read_headers(tmp_path)
    index.write_text(json.dumps({"weight_map": []}))
    with pytest.raises(ValueError, match="no weight_map"):
        read_headers(tmp_path)
    index.unlink()
    save_file({"t1": torch.ones(2)}, tmp_path / "part-3.safetensors")
    with pytest.raises(ValueError, match=r"t1 is in part-1\.safetensors and in part-3\.safetensors"):
        read_headers(tmp_path)
