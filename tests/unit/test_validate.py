"""Validation: sound drafts pass, and every known defect fails the check that is named after it.

One probe process answers for all drafts of this module: importing vLLM takes longer than everything else.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_corruptions import copy_and_corrupt
from draft_helpers import (
    edit_config,
    edit_tensors,
    make_checkpoint,
    random_tensors,
    seal,
    small_config,
    write_kimi_config,
)
from typer.testing import CliRunner

from draft.checkpoint import MODEL_NAME
from draft.config import DraftConfig
from draft.export import export
from draft.importing import import_draft
from draft.serve import serve_command
from draft.validate import CheckResult, Subject, checks, run_checks, validate
from draft.validate.probe import EngineReport, Probe
from draft.verifier import read_verifier
from draft.vocab import mapping_from_targets

Break = Callable[[Path], object]


@dataclass(frozen=True)
class Defect:
    """A sound draft (`base`), what breaks it, and the check that has to say so.

    `silent`: vLLM 0.32 loads the broken draft without a word; the parameters it left alone, or None for other harm.
    """

    check: str
    says: str
    apply: Break
    base: str = "flat"
    silent: tuple[str, ...] | None = None
    loads: bool = True


def drop(name: str) -> Break:
    return lambda draft: edit_tensors(draft, lambda tensors: tensors.pop(name))


def state(**fields: Any) -> Break:
    return lambda draft: edit_config(draft, lambda data: data.update(fields))


def omit(*names: str) -> Break:
    return lambda draft: edit_config(draft, lambda data: [data.pop(name) for name in names])


def change(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Break:
    return lambda draft: edit_tensors(draft, lambda tensors: tensors.update({name: function(tensors[name])}))


def in_turn(*breaks: Break) -> Break:
    return lambda draft: [step(draft) for step in breaks]


def rename(old: str, new: str) -> Break:
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return lambda draft: edit_tensors(draft, apply)


def truncate(draft: Path) -> None:
    weights = draft / MODEL_NAME
    weights.write_bytes(weights.read_bytes()[:-4096])
    seal(draft)


def swap_weights(draft: Path) -> None:
    shutil.copy(draft.parent / "nested" / MODEL_NAME, draft / MODEL_NAME)


def widen_heads(tensors: dict[str, torch.Tensor]) -> None:
    """Projections for a head_dim of 128 where hidden_size / heads is 64."""
    for part, rows in (("q_proj", 1152), ("k_proj", 384), ("v_proj", 384)):
        tensors[f"midlayer.self_attn.{part}.weight"] = 0.02 * torch.randn(rows, 1152, dtype=torch.bfloat16)
    tensors["midlayer.self_attn.o_proj.weight"] = 0.02 * torch.randn(576, 1152, dtype=torch.bfloat16)


def widen_fc(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = 0.02 * torch.randn(576, 4 * 576, dtype=torch.bfloat16)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[7] = torch.nan
    return tensor


def other_tokenizers_t2d(_: torch.Tensor) -> torch.Tensor:
    t2d = torch.zeros(32000, dtype=torch.bool)
    t2d[:4096] = True
    return t2d


def other_runs_t2d(_: torch.Tensor) -> torch.Tensor:
    t2d = torch.zeros(49152, dtype=torch.bool)
    t2d[:4096] = True
    return t2d


def forget_end_of_sequence(draft: Path) -> None:
    mapping = mapping_from_targets(torch.arange(100, 4196).numpy(), 49152)
    edit_tensors(
        draft, lambda tensors: tensors.update(d2t=torch.from_numpy(mapping.d2t), t2d=torch.from_numpy(mapping.t2d))
    )


def untrain_norms(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if "norm" in name:
            tensors[name] = torch.ones_like(tensors[name])


ALL_LAYERS = [2, 15, 27, 30]
DEFECTS = {
    # What vLLM 0.32 does silently.
    "fc missing": Defect("names", "model.fc.weight", drop("fc.weight"), silent=("model.fc.weight",)),
    "norm missing": Defect("names", "model.norm.weight", drop("norm.weight"), silent=("model.norm.weight",)),
    "lm_head missing": Defect("names", "lm_head.weight", drop("lm_head.weight"), silent=("lm_head.weight",)),
    "d2t missing": Defect("names", "draft_id_to_target_id", drop("d2t"), silent=("draft_id_to_target_id",)),
    "head_dim absent, larger projections": Defect(
        "shapes",
        r"q_proj\.weight is \[1152, 1152\], config\.json implies \[576, 1152\]",
        in_turn(omit("head_dim"), lambda draft: edit_tensors(draft, widen_heads)),
        silent=(),
    ),
    "head_dim absent": Defect("explicit", "head_dim", omit("head_dim"), silent=()),
    "norm_before_residual omitted, flat": Defect(
        "explicit", "norm_before_residual", omit("norm_before_residual"), silent=()
    ),
    "norm_before_residual omitted, nested": Defect(
        "explicit", "norm_before_residual", omit("norm_before_residual"), base="nested", silent=()
    ),
    "layer ids only in eagle_config": Defect(
        "layer_id_places", "V2 takes its defaults", omit("eagle_aux_hidden_state_layer_ids"), silent=()
    ),
    # What vLLM 0.32 refuses, after the verifier is loaded.
    "four ids only at top level": Defect(
        "layer_id_places",
        "4 layer ids, but vLLM sizes fc for 3",
        in_turn(
            state(eagle_aux_hidden_state_layer_ids=[2, 10, 15, 27]),
            omit("eagle_config", "num_aux_hidden_states"),
            lambda draft: edit_tensors(draft, widen_fc),
        ),
        loads=False,
    ),
    "final id among the ids": Defect(
        "layer_ids",
        "30, the final state",
        in_turn(
            state(
                eagle_aux_hidden_state_layer_ids=ALL_LAYERS,
                eagle_config={"eagle_aux_hidden_state_layer_ids": ALL_LAYERS, "use_aux_hidden_state": True},
                num_aux_hidden_states=4,
            ),
            lambda draft: edit_tensors(draft, widen_fc),
        ),
    ),
    "extra verifier_norm": Defect(
        "names",
        r"held for training only\): verifier_norm",
        lambda draft: edit_tensors(draft, lambda t: t.update({"verifier_norm.weight": t["norm.weight"].clone()})),
        loads=False,
    ),
    "model. before every name": Defect(
        "names", r"model\.layers\.0\.", rename("layers.0.", "model.layers.0."), base="nested", loads=False
    ),
    "draft_vocab_size absent": Defect("explicit", "draft_vocab_size", omit("draft_vocab_size"), loads=False),
    # Weights.
    "fc transposed": Defect("shapes", r"fc\.weight is .*transposed", change("fc.weight", lambda t: t.T), loads=False),
    "one block twice": Defect(
        "names",
        "are both",
        lambda draft: edit_tensors(
            draft,
            lambda t: t.update({"layers.0.hidden_norm.weight": t["midlayer.hidden_norm.weight"].clone()}),
        ),
    ),
    "t2d of another tokenizer": Defect("vocab_map", r"t2d has shape \[32000\]", change("t2d", other_tokenizers_t2d)),
    "t2d of another run": Defect("vocab_map", "name different tokens", change("t2d", other_runs_t2d)),
    "d2t holds target ids": Defect(
        "vocab_map", "offsets, not target ids", change("d2t", lambda t: t + torch.arange(len(t)))
    ),
    "d2t not ascending": Defect("vocab_map", "ascend", change("d2t", lambda t: t.flip(0))),
    "end of sequence not in the vocabulary": Defect("vocab_map", r"tokens \[2\]", forget_end_of_sequence),
    "t2d missing, nested": Defect("names", "t2d is missing", drop("t2d"), base="nested"),
    "truncated file": Defect("files", "no whole safetensors file", truncate, loads=False),
    "file replaced after export": Defect("files", "not the file that headrace.json recorded", swap_weights),
    "pickle beside the weights": Defect(
        "files", "training_state.pt", lambda draft: (draft / "training_state.pt").write_bytes(b"x")
    ),
    "weights absent": Defect("files", "no .*safetensors", lambda draft: (draft / MODEL_NAME).unlink(), loads=False),
    "config.json is no JSON": Defect(
        "files", "not JSON", lambda draft: (draft / "config.json").write_text("{"), loads=False
    ),
    "fp32 weights called bf16": Defect("dtypes", "F32, expected BF16", change("fc.weight", torch.Tensor.float)),
    "d2t in int32": Defect("dtypes", "d2t is I32", change("d2t", lambda t: t.int())),
    "NaN": Defect("finite", r"fc\.weight \(1 values\)", change("fc.weight", poison)),
    "norms never trained": Defect("norms", "exactly 1.0", lambda draft: edit_tensors(draft, untrain_norms)),
    "norm of zeros": Defect("norms", r"all zeros: norm\.weight", change("norm.weight", torch.zeros_like)),
    "lm_head constant": Defect(
        "matrices", r"lm_head\.weight", change("lm_head.weight", lambda t: t[:1].expand_as(t).clone())
    ),
    "embedding of another verifier": Defect(
        "embedding",
        r"its embedding is \[32000, 576\]",
        lambda draft: edit_tensors(
            draft, lambda t: t.update({"embed_tokens.weight": torch.randn(32000, 576, dtype=torch.bfloat16)})
        ),
        loads=False,
    ),
    # Configuration.
    "tied embeddings": Defect("embedding", "tie_word_embeddings", state(tie_word_embeddings=True)),
    "another draft's configuration file": Defect(
        "agreement",
        "intermediate_size: .*2048.*1536",
        lambda draft: edit_config(draft, lambda data: data.update(intermediate_size=2048), "draft_config.json"),
    ),
    "two ropes": Defect("rope", "two different ropes", state(rope_theta=10000.0)),
    "no layer ids anywhere": Defect(
        "explicit",
        "eagle_aux_hidden_state_layer_ids",
        omit("eagle_aux_hidden_state_layer_ids", "eagle_config"),
    ),
    "no rope": Defect("rope", "nothing of rope", omit("rope_parameters", "rope_theta", "rope_scaling")),
    "partial rope": Defect("rope", "partial_rotary_factor 0.5", state(partial_rotary_factor=0.5)),
    "YaRN too short": Defect(
        "rope",
        "reaches 4096 positions, the verifier 8192",
        state(
            rope_parameters=None,
            rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048},
        ),
    ),
    "a rope that training turns otherwise": Defect(
        "rope",
        "vLLM's table of rotations differs from training's",
        state(
            rope_parameters=None,
            rope_theta=10000.0,
            rope_scaling={"rope_type": "dynamic", "factor": 8.0, "alpha": 1000.0},  # only vLLM knows alpha
        ),
    ),
    "two places, two lists of ids": Defect(
        "layer_id_places",
        "eagle_config says",
        lambda draft: edit_config(
            draft, lambda data: data["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 14, 26])
        ),
    ),
    "ids beyond the verifier": Defect(
        "layer_ids", "do not lie within", state(eagle_aux_hidden_state_layer_ids=[2, 15, 31])
    ),
    "unknown model type": Defect("transformers", "AutoConfig", state(model_type="eagle_of_yore"), loads=False),
    "no EAGLE-3 architecture": Defect(
        "vllm_config", "refuses|not for an EAGLE-3 draft", state(architectures=["MedusaModel"]), loads=False
    ),
    "speculators' fields missing": Defect(
        "transformers",
        "without speculators_config",
        omit("speculators_config", "transformer_layer_config"),
        base="nested",
        loads=False,
    ),
    "unknown schema version": Defect(
        "schema",
        "schema_version 7",
        lambda draft: edit_config(draft, lambda data: data.update(schema_version=7), "draft_config.json"),
    ),
    "record of an unknown version": Defect(
        "schema",
        "schema_version 7",
        lambda draft: edit_config(draft, lambda data: data.update(schema_version=7), "headrace.json"),
    ),
    "vocabulary covers little": Defect(
        "coverage",
        "only 0.500",
        lambda draft: edit_config(draft, lambda data: data["notes"].update(coverage=0.5), "headrace.json"),
    ),
    # Drafts of another kind, and switches that change what the same tensors compute.
    "multi-head latent attention": Defect(
        "config",
        "multi-head latent attention .*kv_lora_rank 512",
        state(
            architectures=["Eagle3DeepseekV2ForCausalLM"],
            model_type="deepseek_v3",
            kv_lora_rank=512,
            q_lora_rank=1536,
        ),
        loads=False,
    ),
    "layers of experts": Defect(
        "config",
        "experts .*num_local_experts 16",
        state(architectures=["GptOssForCausalLMEagle3"], num_local_experts=16),
        loads=False,
    ),
    "sliding window": Defect(
        "config", "sliding windows", state(layer_types=["sliding_attention"], sliding_window=512), silent=()
    ),
    "attention that is not causal": Defect("config", "not causal", state(is_causal=None), silent=()),
    "scaled logits": Defect("config", "logit_scale 0.5", state(logit_scale=0.5), silent=()),
    "only the last state": Defect(
        "config",
        "use_aux_hidden_state false",
        lambda draft: edit_config(draft, lambda data: data["eagle_config"].update(use_aux_hidden_state=False)),
        silent=(),
    ),
    "number in quotes": Defect("config", "hidden_size cannot be '576'", state(hidden_size="576"), loads=False),
    "file that is a directory": Defect(
        "files",
        "model.safetensors is no file",
        lambda draft: ((draft / MODEL_NAME).unlink(), (draft / MODEL_NAME).mkdir()),
        loads=False,
    ),
    # Whole drafts of another verifier.
    "wrong hidden size": Defect(
        "verifier_fit", "hidden_size is 512", lambda draft: None, base="hidden512", loads=False
    ),
    "wrong vocabulary": Defect("verifier_fit", "vocab_size is 32000", lambda draft: None, base="vocab32000"),
}
GOOD = (
    *("flat", "nested", "speculators", "sglang", "own_embedding", "four_layers", "variants", "two_layers"),
    "foreign_exported",
)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory, verifier_dir: Path) -> Path:
    """Sound drafts by name, and broken copies of them."""
    root = tmp_path_factory.mktemp("drafts")
    config = small_config(verifier_dir)
    checkpoint = make_checkpoint(root / "checkpoint", config)
    export(checkpoint, root / "flat", "flat")
    export(checkpoint, root / "nested", "nested")
    export(checkpoint, root / "sglang", "flat", engine="sglang")
    embedding = {**random_tensors(config), "embed_tokens.weight": torch.randn(49152, 576)}
    export(make_checkpoint(root / "c-embedding", config, embedding), root / "own_embedding", "flat", embedding=True)
    for name, form, changes in (
        ("four_layers", "nested", {"aux_layer_ids": [2, 10, 15, 27]}),
        ("variants", "flat", {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
        ("two_layers", "flat", {"num_hidden_layers": 2, "norm_before_fc": True}),
        ("hidden512", "flat", {"hidden_size": 512}),
        ("vocab32000", "flat", {"vocab_size": 32000}),
    ):
        export(make_checkpoint(root / f"c-{name}", config.replace(**changes)), root / name, form)  # type: ignore[arg-type]
    save_with_speculators(config, verifier_dir, root / "speculators")
    kimi = DraftConfig.from_verifier(write_small_kimi(root / "kimi_verifier"), draft_vocab_size=512)
    export(make_checkpoint(root / "c-kimi", kimi), root / "kimi", "flat")
    make_foreign(root, verifier_dir)
    make_corrupted(root, verifier_dir)
    for name, defect in DEFECTS.items():
        broken = root / name.replace(" ", "_")
        shutil.copytree(root / defect.base, broken)
        defect.apply(broken)
    return root


def make_foreign(root: Path, verifier_dir: Path) -> None:
    """A draft as others publish theirs, and what import and export make of it."""
    foreign = Path(shutil.copytree(root / "flat", root / "foreign"))
    for name in ("draft_config.json", "headrace.json", "README.md"):
        (foreign / name).unlink()
    edit_tensors(foreign, lambda tensors: tensors.pop("t2d"))
    rename("midlayer.", "layers.0.")(foreign)
    published = (
        *(
            "attention_bias",
            "bos_token_id",
            "draft_vocab_size",
            "eagle_config",
            "eos_token_id",
            "head_dim",
            "hidden_act",
        ),
        *("hidden_size", "intermediate_size", "max_position_embeddings", "model_type", "num_attention_heads"),
        *("num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "torch_dtype"),
        *("architectures", "tie_word_embeddings", "use_cache", "vocab_size"),
    )
    edit_config(foreign, lambda data: [data.pop(name) for name in [*data] if name not in published])
    edit_config(
        foreign,
        lambda data: data.update(
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 14, 26], "use_aux_hidden_state": True},
            rms_norm_eps=1e-5,
            pad_token_id=0,
            max_position_embeddings=2048,
        ),
    )
    checkpoint = import_draft(foreign, verifier_dir, root / "c-foreign", engine="sglang")
    export(checkpoint, root / "foreign_exported", "flat")


SEEDS = range(32)


def make_corrupted(root: Path, verifier_dir: Path) -> None:
    """Drafts damaged at random, of a verifier so narrow that they are small."""
    narrow = root / "narrow_verifier"
    narrow.mkdir()
    shutil.copy(verifier_dir / "config.json", narrow)
    edit_config(narrow, lambda data: data.update(hidden_size=64, intermediate_size=96, vocab_size=512, head_dim=16))
    edit_config(narrow, lambda data: data.update(num_attention_heads=4, num_key_value_heads=2))
    checkpoint = make_checkpoint(root / "c-narrow", small_config(narrow, draft_vocab_size=128))
    for form in ("flat", "nested"):
        export(checkpoint, root / f"narrow_{form}", form)  # type: ignore[arg-type]
    for seed in SEEDS:
        copy_and_corrupt(root / f"narrow_{'flat' if seed % 2 else 'nested'}", root / f"corrupted_{seed}", seed)


def save_with_speculators(config: DraftConfig, verifier_dir: Path, directory: Path) -> None:
    """A draft that the speculators library made from its own arguments and saved itself."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import LlamaConfig

    layer = LlamaConfig.from_pretrained(verifier_dir)
    layer.num_hidden_layers = 1
    tensors = random_tensors(config)
    model = Eagle3DraftModel.from_training_args(
        layer,
        t2d=tensors["t2d"],
        d2t=tensors["d2t"],
        draft_vocab_size=config.draft_vocab_size,
        norm_before_residual=True,
        target_layer_ids=config.aux_layer_ids,
        ttt_steps=3,
        verifier_name_or_path=str(verifier_dir),
        draft_attn_impl="sdpa",
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.mul_(1.25)
    model.to(torch.bfloat16).save_pretrained(directory)


@pytest.fixture(scope="module")
def reports(drafts: Path, verifier_dir: Path) -> dict[str, EngineReport]:
    names = [*GOOD, *DEFECTS, "foreign"]
    pairs = [(verifier_dir, drafts / name.replace(" ", "_")) for name in names]
    pairs.append((drafts / "kimi_verifier", drafts / "kimi"))
    narrow = ["narrow_flat", "narrow_nested", *(f"corrupted_{seed}" for seed in SEEDS)]
    pairs += [(drafts / "narrow_verifier", drafts / name) for name in narrow]
    return dict(zip([*names, "kimi", *narrow], Probe(pairs).reports(), strict=True))


def results_of(name: str, drafts: Path, reports: dict[str, EngineReport], verifier_dir: Path) -> dict[str, CheckResult]:
    directory = drafts / name.replace(" ", "_")
    subject = Subject(directory, read_verifier(verifier_dir), reports[name])
    return {result.name: result for result in run_checks(subject)}


@pytest.mark.parametrize("name", GOOD)
def test_sound_drafts_pass(name: str, drafts: Path, reports: dict[str, EngineReport], verifier_dir: Path) -> None:
    results = results_of(name, drafts, reports, verifier_dir)
    assert list(results) == list(checks())
    assert {r.name: r.detail for r in results.values() if r.status == "fail"} == {}
    skipped = {r.name for r in results.values() if r.status == "skipped"}
    unrecorded = {"speculators": {"schema", "coverage"}, "foreign_exported": {"coverage"}}
    assert skipped == {"dataset_accuracy"} | unrecorded.get(name, set())


@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_fails_by_name(
    name: str, drafts: Path, reports: dict[str, EngineReport], verifier_dir: Path
) -> None:
    import re

    defect = DEFECTS[name]
    results = results_of(name, drafts, reports, verifier_dir)
    failed = {r.name: r.detail for r in results.values() if r.status == "fail"}
    assert defect.check in failed, {r.name: (r.status, r.detail) for r in results.values()}
    assert re.search(defect.says, failed[defect.check]), failed[defect.check]
    assert results[defect.check].remedy
    assert all(r.remedy for r in results.values() if r.status == "fail")
    if defect.check != "files":
        assert "files" not in failed, "the defect itself must be found, not that bytes differ"


@pytest.mark.parametrize("name", DEFECTS)
def test_what_vllm_itself_does_with_every_defect(name: str, reports: dict[str, EngineReport]) -> None:
    """Documents why the checks exist: which defects vLLM 0.32 loads without a word."""
    defect, report = DEFECTS[name], reports[name]
    loaded = report.config_error is None and report.load_error is None
    assert loaded == defect.loads, (report.config_error, report.load_error)
    if defect.silent is not None:
        assert loaded
        assert report.unfilled == list(defect.silent)


def test_a_transposed_fc_is_not_taken_for_other_layer_ids(
    drafts: Path, reports: dict[str, EngineReport], verifier_dir: Path
) -> None:
    results = results_of("fc transposed", drafts, reports, verifier_dir)
    assert {r.name for r in results.values() if r.status == "fail"} == {"shapes", "vllm_load"}


def test_a_published_draft_only_leaves_things_unsaid(
    drafts: Path, reports: dict[str, EngineReport], verifier_dir: Path
) -> None:
    results = results_of("foreign", drafts, reports, verifier_dir)
    failed = {r.name: r for r in results.values() if r.status == "fail"}
    assert set(failed) == {"explicit", "layer_id_places"}
    assert "norm_before_residual" in failed["explicit"].detail
    assert "headrace draft import" in failed["explicit"].remedy
    assert "SGLang adds one" in failed["layer_id_places"].detail
    imported = DraftConfig.load(drafts / "foreign_exported")
    assert imported.aux_layer_ids == [2, 15, 27]
    assert (imported.max_position_embeddings, imported.norm_before_residual) == (2048, False)


def test_random_damage_is_named_or_makes_no_difference_to_vllm(drafts: Path, reports: dict[str, EngineReport]) -> None:
    verifier = read_verifier(drafts / "narrow_verifier")
    sound = 0
    for seed in SEEDS:
        report = reports[f"corrupted_{seed}"]
        results = run_checks(Subject(drafts / f"corrupted_{seed}", verifier, report))
        assert len(results) == len(checks())
        failed = [r for r in results if r.status == "fail"]
        assert all(r.remedy for r in failed)
        if not failed:
            sound += 1
            assert what_vllm_does(report) == what_vllm_does(reports[f"narrow_{'flat' if seed % 2 else 'nested'}"]), seed
    assert sound < len(SEEDS) / 2, "most damage is damage"


def what_vllm_does(report: EngineReport) -> dict[str, Any]:
    return {name: value for name, value in report.to_json().items() if name != "parsed"}


def test_vllm_narrows_larger_projections_silently(reports: dict[str, EngineReport]) -> None:
    report = reports["head_dim absent, larger projections"]
    assert report.load_error is None
    assert any("qkv_proj.weight is [960, 1152], the file holds [1920, 1152]" in text for text in report.altered)
    assert any("o_proj" in text for text in report.altered)


def test_vllm_reads_silence_differently_in_the_two_forms(reports: dict[str, EngineReport]) -> None:
    assert not reports["norm_before_residual omitted, flat"].parsed["norm_before_residual"]
    assert reports["norm_before_residual omitted, nested"].parsed["norm_before_residual"] is True


def test_vllm_runners_read_different_places(reports: dict[str, EngineReport]) -> None:
    report = reports["layer ids only in eagle_config"]
    assert (report.layer_ids_v1, report.layer_ids_v2) == ([2, 15, 27], None)


def test_command_prints_a_table_and_exits_with_1(drafts: Path, verifier_dir: Path) -> None:
    import typer

    from ray_jobs.commands.validate import command

    app = typer.Typer()
    app.command()(command)
    broken = drafts / "layer_ids_only_in_eagle_config"
    result = CliRunner().invoke(app, [str(broken), "--verifier", str(verifier_dir), "--json"])
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert not answer["sound"]
    by_name = {check["name"]: check for check in answer["checks"]}
    assert by_name["layer_id_places"]["status"] == "fail"
    assert by_name["vllm_config"]["status"] == "pass"
    assert list(by_name) == list(checks())
    missing = CliRunner().invoke(app, [str(drafts / "nowhere"), "--verifier", str(verifier_dir)])
    assert isinstance(missing.exception, FileNotFoundError)


def test_a_draft_that_takes_vllm_down_is_a_finding(
    drafts: Path, verifier_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draft.validate.probe.LAUNCH", "import os; print('out of memory'); os._exit(9)")
    results = {r.name: r for r in validate(drafts / "flat", verifier_dir)}
    assert results["vllm_config"].status == "fail"
    assert "ended with code 9" in results["vllm_config"].detail
    assert results["vllm_load"].status == "skipped"


def write_small_kimi(directory: Path) -> Path:
    """Kimi's architecture, layers, width of heads and rope, a hundredth of its hidden size; quantized, no weights."""

    def shrink(config: dict[str, Any]) -> None:
        config["text_config"] |= {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 4096}
        config["text_config"] |= {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
        config["text_config"] |= {"bos_token_id": 1, "eos_token_id": 2}
        config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}

    edit_config(write_kimi_config(directory), shrink)
    return directory


def test_a_draft_for_kimi_validates_without_any_verifier_weights(
    drafts: Path, reports: dict[str, EngineReport]
) -> None:
    report = reports["kimi"]
    results = run_checks(Subject(drafts / "kimi", read_verifier(drafts / "kimi_verifier"), report))
    assert {r.name: r.detail for r in results if r.status == "fail"} == {}
    assert (report.parsed["head_dim"], report.layer_ids_v1, report.layer_ids_v2) == (128, [2, 30, 58], [2, 30, 58])
    assert report.parsed["rope_parameters"]["rope_type"] == "yarn"


def test_vllm_parses_the_serve_line(drafts: Path, verifier_dir: Path) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = shlex.split(serve_command(drafts / "flat", str(verifier_dir), tensor_parallel_size=2))
    assert words[:2] == ["vllm", "serve"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
    assert arguments.model_tag == str(verifier_dir)
    assert arguments.tensor_parallel_size == 2
    assert arguments.speculative_config == {
        "method": "eagle3",
        "model": str(drafts / "flat"),
        "num_speculative_tokens": 3,
    }


def test_yarn_is_the_same_table_in_training_and_in_serving(tmp_path: Path) -> None:
    """transformers turns heads in training and vLLM in serving: Kimi's rope, mscale included, must agree."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    config = DraftConfig.from_verifier(write_kimi_config(tmp_path))
    flat = config.to_flat()
    trained = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in flat.items() if k != "rope_scaling"}))
    positions = torch.tensor([[0, 1, 1000, 4095, 4096, 100_000, 262_143]])
    cos, sin = trained(torch.zeros(1, dtype=torch.float32), positions)
    with set_current_vllm_config(VllmConfig()):
        served = get_rope(
            config.head_dim, config.max_position_embeddings, rope_parameters=config.rope_parameters, dtype=torch.float32
        )
    half = config.head_dim // 2
    table = served.cos_sin_cache[positions[0]].float()
    # float32 angles at position 262,143 are exact to about 0.02.
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], atol=0.05, rtol=0)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], atol=0.05, rtol=0)
    assert float(table[0, 0]) == pytest.approx(1.0), "mscale and mscale_all_dim cancel"
