"""Acceptance in real vLLM: a draft that always proposes the same token is accepted exactly where answers have it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from draft.checkpoint import write_checkpoint
from draft.config import DraftConfig
from draft.evaluate import EvaluationPrompt, EvaluationReport, evaluate
from draft.export import export
from draft.model import build_training_model, checkpoint_tensors
from draft.vocab import mapping_from_targets
from gen.chat import ChatTokenizer
from gen.head import extract_head
from ray_jobs.charts import acceptance_chart
from ray_jobs.commands.evaluate import print_report

QUESTIONS = {
    "count": "Count from one to twenty in words.",
    "repeat": "Write the word apple ten times.",
    "sum": "What is 12 + 30?",
    "story": "Tell a story of two sentences about a mill.",
}
K = 2
MAX_TOKENS = 24
ENGINE = {"enforce_eager": True, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def prompts(verifier_dir: Path) -> list[EvaluationPrompt]:
    chat = ChatTokenizer.from_directory(verifier_dir)
    return [
        EvaluationPrompt(chat.prompt_ids([{"role": "user", "content": text}]), name, "word" if name != "sum" else "sum")
        for name, text in QUESTIONS.items()
    ]


@pytest.fixture(scope="module")
def common_token(verifier_dir: Path, prompts: list[EvaluationPrompt]) -> int:
    """The token that the verifier says most often in these answers."""
    from transformers import AutoModelForCausalLM

    verifier = AutoModelForCausalLM.from_pretrained(verifier_dir, dtype=torch.bfloat16)
    said: Counter[int] = Counter()
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        output = verifier.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=2
        )
        said.update(output[0, ids.shape[1] :].tolist())
    return said.most_common(1)[0][0]


@pytest.fixture(scope="module")
def draft_dir(verifier_dir: Path, common_token: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft that always proposes `common_token`: all its logits are 0, and that token has the lowest draft id."""
    directory = tmp_path_factory.mktemp("draft")
    head = extract_head(verifier_dir, directory / "head.safetensors")
    config = DraftConfig.from_verifier(verifier_dir, draft_vocab_size=64)
    vocab = mapping_from_targets(np.arange(common_token, common_token + 64), config.vocab_size)
    model = build_training_model(config, head, vocab)
    with torch.no_grad():
        for silent in (model.fc, model.layers[0].self_attn.o_proj, model.layers[0].mlp.down_proj):
            silent.weight.zero_()
    checkpoint = write_checkpoint(directory / "checkpoint", config, checkpoint_tensors(model), {"step": 0})
    return export(checkpoint, directory / "constant")


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def report(draft_dir: Path, verifier_dir: Path, prompts: list[EvaluationPrompt], log_dir: Path) -> EvaluationReport:
    seen: list[tuple[int, int, str]] = []
    report = evaluate(
        [draft_dir],
        verifier_dir,
        prompts,
        log_dir=log_dir,
        num_draft_tokens=(K,),
        max_tokens=MAX_TOKENS,
        engine_args=ENGINE,
        progress=lambda *state: seen.append(state),
    )
    assert seen[-1] == (2, 2, "")
    assert {total for _, total, _ in seen} == {2}
    return report


def drafts_by_hand(answer: list[int], proposed: int) -> list[int]:
    """Accepted tokens of each draft in an answer, when every draft is K times `proposed`."""
    accepted_by_draft = []
    position = 1  # the first token comes from the prompt's own forward pass
    while position < len(answer):
        accepted = 0
        while accepted < K and position + accepted < len(answer) and answer[position + accepted] == proposed:
            accepted += 1
        accepted_by_draft.append(accepted)
        position += accepted + 1
    return accepted_by_draft


def test_counts_are_those_of_the_answers(report, log_dir, common_token):
    """Only the last draft of an answer is not known from it: the answer ends inside."""
    answer = json.loads((log_dir / "engine-1.answer.json").read_text())
    by_hand = [drafts_by_hand(output, common_token) for output in answer["outputs"]]
    for histogram, accepted in zip(answer["histograms"], by_hand, strict=True):
        assert abs(sum(histogram) - len(accepted)) <= 1
        assert abs(sum(j * drafts for j, drafts in enumerate(histogram)) - sum(accepted)) <= K
    assert sum(map(sum, by_hand)) >= 5


def test_the_report_adds_up(report):
    (result,) = report.results
    measured = result.acceptance
    assert measured.num_prompts == len(QUESTIONS)
    assert len(measured.position_rates) == K
    assert measured.num_draft_tokens <= K * measured.num_drafts
    assert measured.acceptance_length.value == pytest.approx(1 + measured.num_accepted / measured.num_drafts)
    assert measured.acceptance_length.value > 1
    assert sum(group.num_drafts for group in result.categories.values()) == measured.num_drafts
    assert set(result.categories) == {"word", "sum"}


def test_a_draft_changes_speed_and_not_the_answers(report):
    (result,) = report.results
    assert report.baseline is not None
    assert result.differences is not None
    assert result.differences.num_different <= 1  # rounding may swap two near-equal tokens
    assert result.speed_up is not None
    assert result.speed_up > 0
    assert any("serving hardware" in note for note in report.notes)


def test_the_report_is_json_a_table_and_a_chart(report, tmp_path, capsys):
    assert json.loads(json.dumps(report.to_json()))["results"][0]["num_draft_tokens"] == K
    print_report(report)
    printed = capsys.readouterr().out
    for words in (
        "acceptance length",
        "position 2",
        "per draft token",
        "greedy answers that differ",
        "sum (1 prompts)",
    ):
        assert words in printed
    acceptance_chart(report, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
