"""What only data can show: a draft trained on a small made-up verifier, then broken where no shape gives it away.

The verifier's "layer 4" foretells the token after next, so a draft that reads it right is nearly always right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_helpers import edit_config, edit_tensors
from safetensors.torch import load_file, save_file

from draft.alignment import StateColumns, make_batch
from draft.checkpoint import write_checkpoint
from draft.config import DraftConfig
from draft.export import export
from draft.model import build_training_model, checkpoint_tensors
from draft.notes import FILE_NAME as RECORD_NAME
from draft.notes import GenerationNotes, TrainingMetrics
from draft.objective import Objective, forward_batch
from draft.validate import CheckResult, Subject, run_checks
from draft.verifier import read_verifier
from draft.vocab import build_vocab, mapping_from_targets
from storage import Dataset, Identity, Sample, SampleKey, StateSpec, UnitPlan
from storage.reader import SampleReader
from storage.shards import open_shard_writer

VOCAB, HIDDEN, LAYERS = 64, 32, 8
SPEC = StateSpec(layer_ids=(2, 3, 4, 5, 6, LAYERS), hidden_size=HIDDEN)
AUX = [2, 4, 5]
TOKENS, SAMPLES, UNIT = 50, 24, 12
OBJECTIVE = Objective(ttt_steps=2)


def write_verifier(directory: Path) -> Path:
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def unit_rows(generator: np.random.Generator, rows: int) -> np.ndarray:
    values = generator.standard_normal((rows, HIDDEN))
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def write_dataset(uri: Path, head: Path) -> Dataset:
    """Tokens 0..47 at random; the final state says the next token, layer 4 the one after, the others are noise."""
    generator = np.random.default_rng(5)
    lm_head_VH, hint_VH = unit_rows(generator, VOCAB), unit_rows(generator, VOCAB)
    save_file(
        {
            "embed_tokens.weight": torch.from_numpy(unit_rows(generator, VOCAB)).float(),
            "norm.weight": torch.ones(HIDDEN),
            "lm_head.weight": torch.from_numpy(lm_head_VH).float(),
        },
        head,
        metadata={"config": json.dumps({"rms_norm_eps": 1e-5, "num_layers": LAYERS})},
    )
    identity = Identity(
        mode="generate",
        verifier={"name": "made-up", "num_layers": LAYERS},
        tokenizer={"digest": "0"},
        states=SPEC,
        prompts={"digest": "0"},
    )
    units = [UnitPlan(unit, unit * UNIT, UNIT, UNIT) for unit in range(SAMPLES // UNIT)]
    dataset = Dataset.create(str(uri), identity, units)
    writer = dataset.writer()
    written = []
    for unit in units:
        samples = []
        with open_shard_writer(writer.shard_target(unit.unit, 0)) as shards:
            for row in range(unit.first, unit.first + UNIT):
                tokens = generator.integers(0, 48, TOKENS + 2)
                states = 0.2 * generator.standard_normal((TOKENS - 1, len(SPEC.layer_ids), HIDDEN))
                states[:, 2] += hint_VH[tokens[2 : TOKENS + 1]]
                states[:, 5] = lm_head_VH[tokens[1:TOKENS]]
                bits = torch.from_numpy(states).bfloat16().view(torch.uint16).numpy()
                key = SampleKey(row, 0, 0)
                samples.append(
                    Sample(
                        key=key,
                        prompt_id=f"p{row}",
                        unit=unit.unit,
                        token_ids=tokens[:TOKENS].tolist(),
                        num_prompt_tokens=4,
                        loss_spans=[(4, TOKENS)],
                        text="",
                        reasoning_text=None,
                        finish_reason="stop",
                        receipt=shards.add(key, bits),
                    )
                )
            files = shards.close()
        written.append(writer.write_unit(unit.unit, 0, samples, [], files))
    writer.commit(written, {})
    dataset.put_head(head)
    dataset.complete()
    return dataset


def train(config: DraftConfig, dataset: Dataset, head: Path, directory: Path) -> Path:
    vocab = build_vocab(np.arange(VOCAB, 0, -1), config.draft_vocab_size)
    model = build_training_model(config, head, vocab)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    samples = list(SampleReader(dataset.snapshot()))
    columns = StateColumns.for_draft(config, SPEC)
    for step in range(70):
        chosen = [samples[(step * 8 + i) % len(samples)] for i in range(8)]
        optimizer.zero_grad()
        forward_batch(model, make_batch(chosen, columns, ttt_steps=2), OBJECTIVE).loss.backward()
        optimizer.step()
    with torch.no_grad():
        output = forward_batch(model.eval(), make_batch(samples, columns, ttt_steps=2), OBJECTIVE)
    accuracy = (output.correct_K / output.total_K).tolist()
    assert accuracy[0] > 0.6, "the made-up task must be learnt, or nothing below means anything"
    metrics = TrainingMetrics(position_accuracy=accuracy, num_tokens=output.num_loss_tokens)
    return write_checkpoint(directory, config, checkpoint_tensors(model), {}, GenerationNotes(training_metrics=metrics))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained")
    config = DraftConfig.from_verifier(write_verifier(root / "verifier"), draft_vocab_size=48, aux_layer_ids=AUX)
    dataset = write_dataset(root / "data", root / "head.safetensors")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    checkpoint = train(config, dataset, root / "head.safetensors", root / "checkpoint")
    torch.set_num_threads(threads)
    for form in ("flat", "nested"):
        export(checkpoint, root / form, form)  # type: ignore[arg-type]
    return root


def accuracy_check(root: Path, draft: Path, *, reported: bool = True) -> CheckResult:
    if not reported:
        (draft / RECORD_NAME).unlink(missing_ok=True)
    subject = Subject(draft, read_verifier(root / "verifier"), None, str(root / "data"))
    [result] = run_checks(subject, ["dataset_accuracy"])
    return result


@pytest.fixture
def draft(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / "flat", tmp_path / "draft"))


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_a_sound_draft_is_as_good_as_training_said(root: Path, form: str) -> None:
    result = accuracy_check(root, root / form)
    assert result.status == "pass", result.detail
    assert "training reported" in result.detail


def test_without_a_report_controls_alone_pass_a_sound_draft(root: Path, draft: Path) -> None:
    result = accuracy_check(root, draft, reported=False)
    assert result.status == "pass", result.detail
    assert "nothing was reported" in result.detail


@pytest.mark.parametrize("reported", [True, False])
def test_columns_of_fc_in_another_layer_order(root: Path, draft: Path, reported: bool) -> None:
    def permute(tensors: dict[str, torch.Tensor]) -> None:
        blocks = tensors["fc.weight"].chunk(3, dim=1)
        tensors["fc.weight"] = torch.cat([blocks[1], blocks[0], blocks[2]], dim=1)

    edit_tensors(draft, permute)
    result = accuracy_check(root, draft, reported=reported)
    assert result.status == "fail", result.detail
    assert result.remedy


def test_a_swap_that_leaves_skill_is_found_by_its_control(root: Path, draft: Path) -> None:
    """Only half of the hint is in the wrong block: accuracy stays above guessing, and the right order is named."""

    def blend(tensors: dict[str, torch.Tensor]) -> None:
        _, second, third = tensors["fc.weight"].float().chunk(3, dim=1)
        tensors["fc.weight"] = torch.cat([second, 0.25 * second, third], dim=1).bfloat16()

    edit_tensors(draft, blend)
    result = accuracy_check(root, draft, reported=False)
    assert result.status == "fail", result.detail
    assert "in the order [4, 2, 5] instead of [2, 4, 5]" in result.detail


@pytest.mark.parametrize("reported", [True, False])
def test_a_stale_but_well_formed_mapping(root: Path, draft: Path, reported: bool) -> None:
    stale = mapping_from_targets(np.arange(48) + (np.arange(48) >= 3), VOCAB)
    edit_tensors(
        draft, lambda tensors: tensors.update(d2t=torch.from_numpy(stale.d2t), t2d=torch.from_numpy(stale.t2d))
    )
    subject = Subject(draft, read_verifier(root / "verifier"), None)
    [mapping] = run_checks(subject, ["vocab_map"])
    assert mapping.status == "pass", "nothing but data shows it"
    result = accuracy_check(root, draft, reported=reported)
    assert result.status == "fail", result.detail
    assert "d2t" in result.remedy


@pytest.mark.parametrize("reported", [True, False])
def test_layer_ids_off_by_one(root: Path, draft: Path, reported: bool) -> None:
    edit_config(draft, lambda data: data.update(eagle_aux_hidden_state_layer_ids=[3, 5, 6]))
    result = accuracy_check(root, draft, reported=reported)
    assert result.status == "fail", result.detail


def test_one_layer_id_off_by_one_is_named(root: Path, draft: Path) -> None:
    """With the hint in two neighbouring layers the wrong ids still work: only the neighbours' control tells."""

    def soften(tensors: dict[str, torch.Tensor]) -> None:
        first, second, third = tensors["fc.weight"].float().chunk(3, dim=1)
        tensors["fc.weight"] = torch.cat([first, second, 0.3 * second + third], dim=1).bfloat16()

    edit_tensors(draft, soften)
    edit_config(draft, lambda data: data.update(eagle_aux_hidden_state_layer_ids=[2, 3, 4]))
    result = accuracy_check(root, draft, reported=False)
    assert result.status == "fail", result.detail


def test_a_random_embedding_of_its_own(root: Path, draft: Path) -> None:
    """Engines use the embedding that a draft brings, so it is the one to try: exporters have made them up."""
    made_up = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16)
    edit_tensors(draft, lambda tensors: tensors.update({"embed_tokens.weight": 3 * made_up}))
    result = accuracy_check(root, draft)
    assert result.status == "fail", result.detail


def test_the_verifiers_own_embedding_makes_no_difference(root: Path, draft: Path) -> None:
    embedding = load_file(root / "head.safetensors")["embed_tokens.weight"].bfloat16()
    edit_tensors(draft, lambda tensors: tensors.update({"embed_tokens.weight": embedding}))
    result = accuracy_check(root, draft)
    assert result.status == "pass", result.detail


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].T}),
        lambda tensors: tensors.update({"d2t": tensors["d2t"].bfloat16()}),
        lambda tensors: tensors.pop("norm.weight"),
    ],
)
def test_what_other_checks_name_is_skipped(root: Path, draft: Path, change: Callable[[dict], object]) -> None:
    edit_tensors(draft, change)
    result = accuracy_check(root, draft)
    assert result.status == "skipped", result.detail
    assert result.remedy.startswith("see ")


def test_epsilon_as_another_writer_prints_it(root: Path, draft: Path) -> None:
    edit_config(draft, lambda data: data.update(rms_norm_eps=9.999999747378752e-06))
    result = accuracy_check(root, draft)
    assert result.status == "pass", result.detail


def test_layers_that_the_data_set_has_not(root: Path, draft: Path) -> None:
    edit_config(draft, lambda data: data.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4]))
    result = accuracy_check(root, draft)
    assert result.status == "fail"
    assert "cannot have been trained on" in result.detail
    assert "[1]" in result.detail


def test_a_report_that_the_weights_do_not_reach(root: Path, draft: Path) -> None:
    """Weights of an earlier checkpoint under a later one's report."""
    edit_tensors(draft, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"] * 0.02}))
    edit_config(
        draft,
        lambda data: data["notes"]["training_metrics"].update(position_accuracy=[0.999, 0.9]),
        RECORD_NAME,
    )
    result = accuracy_check(root, draft)
    assert result.status == "fail", result.detail
    assert "training reported 0.999 / 0.900" in result.detail
