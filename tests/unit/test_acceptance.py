"""Acceptance rates and their intervals: right numbers on hand-made counts, honest coverage on simulated prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.acceptance import AcceptanceCounts, Interval, length_difference, measure
from draft.config import DraftConfig
from draft.engine_run import EngineAnswer, EngineFailedError, EngineRequest, engine_environment, run_engine
from draft.evaluate import (
    EvaluationPrompt,
    EvaluationReport,
    _differences,
    _result,
    acceptance_notes,
    evaluate,
    short_names,
)


def counts(*histogram: int, num_draft_tokens: int | None = None) -> AcceptanceCounts:
    return AcceptanceCounts(histogram, num_draft_tokens or sum(histogram) * (len(histogram) - 1))


def test_rates_by_hand():
    measured = measure([counts(5, 3, 2, 0), counts(1, 1, 0, 8)])
    assert (measured.num_drafts, measured.num_draft_tokens, measured.num_accepted) == (20, 60, 3 + 4 + 1 + 24)
    assert [rate.value for rate in measured.position_rates] == pytest.approx([14 / 20, 10 / 20, 8 / 20])
    assert measured.acceptance_length.value == pytest.approx(1 + 32 / 20)
    assert measured.accepted_per_draft_token.value == pytest.approx(32 / 60)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.integers(0, 30), min_size=4, max_size=4).map(lambda histogram: counts(*histogram)),
        min_size=1,
        max_size=12,
    ).filter(lambda prompts: any(prompt.num_drafts for prompt in prompts))
)
def test_length_is_one_plus_the_position_rates(prompts):
    measured = measure(prompts)
    rates = [rate.value or 0.0 for rate in measured.position_rates]
    assert rates == sorted(rates, reverse=True)
    assert measured.acceptance_length.value == pytest.approx(1 + sum(rates))
    for interval in (*measured.position_rates, measured.acceptance_length) if len(prompts) > 1 else ():
        assert interval.low <= interval.value + 1e-9
        assert interval.value <= interval.high + 1e-9


def test_prompts_that_agree_have_no_width_and_a_single_prompt_no_interval():
    length = measure([counts(1, 2, 3)] * 9).acceptance_length
    assert length.low == length.value == length.high == pytest.approx(1 + 8 / 6)
    alone = measure([counts(1, 2, 3)])
    assert (alone.acceptance_length.low, alone.acceptance_length.high) == (None, None)
    assert str(alone.acceptance_length) == "2.333"
    assert str(alone.position_rates[1]) == "0.500"


def test_an_interval_is_what_resampling_prompts_by_hand_gives():
    """The same percentiles from draws of whole prompts, one after another, for prompts of very different weight."""
    generator = np.random.default_rng(11)
    drafts = generator.integers(5, 80, size=64)
    accepted = generator.binomial(drafts, generator.beta(2, 3, size=64))
    length = measure(
        [counts(int(n - yes), int(yes)) for n, yes in zip(drafts, accepted, strict=True)]
    ).acceptance_length
    lengths = []
    for _ in range(4000):
        drawn = generator.integers(0, 64, size=64)
        lengths.append(1 + accepted[drawn].sum() / drafts[drawn].sum())
    low, high = np.quantile(lengths, [0.0225, 0.9775])  # 0.025 expanded for 64 prompts
    assert length.low == pytest.approx(low, abs=0.006)
    assert length.high == pytest.approx(high, abs=0.006)


@pytest.mark.parametrize(("num_prompts", "least"), [(5, 0.86), (10, 0.88)])
def test_few_prompts_get_wider_intervals(num_prompts, least):
    generator = np.random.default_rng(num_prompts)
    hits, trials = 0, 150
    for _ in range(trials):
        accepted = generator.binomial(30, generator.beta(2, 4, size=num_prompts))
        length = measure([counts(30 - int(yes), int(yes)) for yes in accepted]).acceptance_length
        hits += length.low <= 1 + 2 / 6 <= length.high
    assert hits / trials > least


def test_intervals_cover_the_truth_where_drafts_of_a_prompt_are_alike():
    """Prompts with rates of their own: treating drafts as independent would cover far less than 95 %."""
    generator = np.random.default_rng(7)
    truth = 1 + 0.5
    hits, naive_hits, trials = 0, 0, 120
    for _ in range(trials):
        rates = generator.beta(2, 2, size=60)
        accepted = generator.binomial(40, rates)
        prompts = [counts(40 - int(yes), int(yes)) for yes in accepted]
        length = measure(prompts).acceptance_length
        hits += length.low <= truth <= length.high
        share = accepted.sum() / (40 * 60)
        naive = 1.96 * np.sqrt(share * (1 - share) / (40 * 60))
        naive_hits += abs(share - 0.5) <= naive
    assert hits / trials > 0.88
    assert naive_hits / trials < 0.75


def test_a_paired_difference_is_narrower_than_either_length():
    generator = np.random.default_rng(3)
    rates = generator.beta(2, 2, size=80)
    first = [counts(40 - int(yes), int(yes)) for yes in generator.binomial(40, rates)]
    second = [counts(40 - int(yes), int(yes)) for yes in generator.binomial(40, np.clip(rates + 0.1, 0, 1))]
    difference = length_difference(first, second)
    length = measure(first).acceptance_length
    assert difference.value == pytest.approx(
        measure(second).acceptance_length.value - measure(first).acceptance_length.value
    )
    assert difference.low > 0
    assert difference.high - difference.low < length.high - length.low


def test_nothing_drafted_gives_no_number():
    measured = measure([counts(0, 0, 0), counts(0, 0, 0)])
    assert measured.acceptance_length == Interval(None, None, None)
    assert str(measured.acceptance_length) == "-"


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="6 accepted tokens of 5 proposed"):
        AcceptanceCounts((0, 0, 3), 5)
    with pytest.raises(ValueError, match=r"different numbers of draft tokens: \[1, 2\]"):
        measure([counts(1, 1), counts(1, 1, 1)])
    with pytest.raises(ValueError, match="no prompts"):
        measure([])
    with pytest.raises(ValueError, match="1 and 2 prompts"):
        length_difference([counts(1, 1)], [counts(1, 1)] * 2)


PROMPTS = [EvaluationPrompt([1, 2], "a", "math"), EvaluationPrompt([3], "b", "code"), EvaluationPrompt([4], "c", None)]


def answer(outputs, histograms=None, generate_s=2.0) -> EngineAnswer:
    draft_tokens = None if histograms is None else [2 * sum(histogram) for histogram in histograms]
    return EngineAnswer(outputs, histograms, draft_tokens, 1.0, generate_s, "0")


def test_differences_name_the_first_token():
    alone = answer([[1, 2, 3], [4, 5], [6, 7]])
    other = answer([[1, 2, 3], [4, 9], [6, 7, 8]])
    found = _differences(PROMPTS, alone, other)
    assert (found.num_prompts, found.num_different) == (3, 2)
    assert found.first == (("b", 1), ("c", 2))


def test_result_by_category_with_speed():
    alone = answer([[1] * 10] * 3, generate_s=3.0)
    drafted = answer([[1] * 10] * 3, [[4, 2, 0], [0, 0, 5], [1, 1, 1]], generate_s=2.0)
    result = _result(Path("d"), 2, drafted, PROMPTS, drafted, alone, greedy=True)
    assert result.speed_up == pytest.approx(1.5)
    assert result.differences is not None
    assert result.differences.num_different == 0
    assert result.length_difference is None
    assert {name: group.num_drafts for name, group in result.categories.items()} == {"code": 5, "math": 6}
    assert result.categories["code"].acceptance_length.value == pytest.approx(3.0)
    assert result.acceptance.num_drafts == 14
    report = EvaluationReport("v", 3, 10, 0.0, {}, "0", None, [result])
    body = json.loads(json.dumps(report.to_json()))
    assert body["results"][0]["acceptance"]["num_drafts"] == 14
    [note] = acceptance_notes(body)
    assert note.acceptance_length == pytest.approx(1 + 15 / 14)
    assert (note.num_drafts, note.num_speculative_tokens) == (14, 2)
    with pytest.raises(ValueError, match="on 2 drafts"):
        acceptance_notes({**body, "results": [*body["results"], {**body["results"][0], "draft": "other"}]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "no prompts"),
        ({"num_draft_tokens": (3, 3)}, "different positive"),
        ({"num_draft_tokens": ()}, "different positive"),
        ({"max_tokens": 1}, "at least 2"),
        ({"prompts": [EvaluationPrompt([], "empty")]}, "without a token: empty"),
    ],
)
def test_arguments_are_checked_before_an_engine_starts(tmp_path, options, message):
    (tmp_path / "config.json").write_text("{}")
    arguments = {"prompts": PROMPTS} | options
    with pytest.raises(ValueError, match=message):
        evaluate([tmp_path], tmp_path, log_dir=tmp_path / "logs", **arguments)
    assert not (tmp_path / "logs").exists()


VERIFIER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 8,
    "vocab_size": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 100,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {},
            {"prompts": [*PROMPTS, EvaluationPrompt([1] * 90, "long")]},
            r"1 prompt.*max_model_len 100: long \(90 tokens\)",
        ),
        ({}, {"engine_args": {"max_model_len": 12}}, r"3 prompt.*max_model_len 12"),
        ({"hidden_size": 48}, {}, r"verifier_fit: hidden_size is 48, the verifier's is 32"),
        ({"vocab_size": 65}, {}, "verifier_fit: vocab_size is 65"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, {}, "layer_ids: .*8 layers"),
        ({"kv_lora_rank": 512}, {}, "config: .*latent attention"),
    ],
)
def test_what_cannot_work_is_found_before_the_verifier_is_loaded(tmp_path, change, options, message):
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    (verifier / "config.json").write_text(json.dumps(VERIFIER))
    draft = tmp_path / "draft"
    draft.mkdir()
    config = DraftConfig.from_verifier(verifier, draft_vocab_size=32).to_flat() | change
    (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        evaluate([draft], verifier, log_dir=tmp_path / "logs", **({"prompts": PROMPTS, "max_tokens": 16} | options))
    assert not (tmp_path / "logs").exists()


def test_drafts_of_the_same_name_are_told_apart():
    assert short_names(["runs/a/draft", "runs/b/draft"]) == {
        "runs/a/draft": "a/draft",
        "runs/b/draft": "b/draft",
    }
    assert short_names(["/x/one", "/x/two", "/x/one"]) == {"/x/one": "one", "/x/two": "two"}


def test_a_directory_that_is_no_draft_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no config"):
        evaluate([tmp_path], tmp_path, PROMPTS, log_dir=tmp_path)


def test_a_failing_engine_shows_the_end_of_its_log(tmp_path):
    request = EngineRequest(str(tmp_path / "no-model"), [[1]], 4, 0.0, 0, {})
    ticks = []
    with pytest.raises(EngineFailedError, match="no-model") as raised:
        run_engine(request, tmp_path / "engine.log", tick=lambda: ticks.append(1))
    assert "ended with code 1" in str(raised.value)
    assert ticks


def test_environment_gives_each_rank_its_cores_and_keeps_the_callers(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    assert engine_environment()["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3"
    assert engine_environment(2)["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "3")
    assert engine_environment()["VLLM_CPU_OMP_THREADS_BIND"] == "3"
