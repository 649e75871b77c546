"""Acceptance rates and their intervals: right numbers on hand-made counts, honest coverage on simulated prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.acceptance import AcceptanceCounts, Interval, length_difference, measure
from draft.engine_run import EngineAnswer, EngineFailedError, EngineRequest, engine_environment, run_engine
from draft.evaluate import EvaluationPrompt, EvaluationReport, _differences, _result, acceptance_notes, evaluate


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
    for interval in (*measured.position_rates, measured.acceptance_length):
        assert interval.low <= interval.value + 1e-9
        assert interval.value <= interval.high + 1e-9


def test_prompts_that_agree_have_no_width_and_a_single_prompt_neither():
    for prompts in ([counts(1, 2, 3)] * 9, [counts(1, 2, 3)]):
        length = measure(prompts).acceptance_length
        assert length.low == length.value == length.high


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
