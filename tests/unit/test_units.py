"""Units cover the prompt order without gaps, near their target, the same every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen.prompts import BadRow, Prompt, Reason
from gen.units import PromptSize, expected_size, plan_units

sizes_lists = st.lists(st.builds(PromptSize, st.integers(1, 8), st.integers(0, 200)), max_size=60)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@given(
    sizes=sizes_lists,
    row_bytes=st.integers(1, 10),
    target=st.integers(1, 1500),
    limits=st.tuples(st.integers(1, 6), st.integers(0, 10)),
)
def test_units_cover_everything_once(
    sizes: list[PromptSize], row_bytes: int, target: int, limits: tuple[int, int]
) -> None:
    least, most = limits[0], limits[0] + limits[1]
    units = plan_units(sizes, row_bytes=row_bytes, target_bytes=target, min_prompts=least, max_prompts=most)
    assert [unit.unit for unit in units] == list(range(len(units)))
    position = 0
    for unit in units:
        assert unit.first == position
        mine = sizes[position : position + unit.num_prompts]
        position += unit.num_prompts
        assert unit.expected_samples == sum(size.samples for size in mine)
        assert unit.expected_bytes == sum(size.rows for size in mine) * row_bytes
        assert 1 <= unit.num_prompts <= most
        # Over the target only where the smallest unit is already over it.
        assert unit.expected_bytes <= target or unit.num_prompts <= least
        if unit is not units[-1]:
            assert unit.num_prompts >= least
            following = sizes[position].rows * row_bytes
            assert unit.num_prompts == most or unit.expected_bytes + following > target
    assert position == len(sizes)


def test_long_samples_make_small_units() -> None:
    # 10,000 tokens of Kimi-K2.5 are 573 MB: a unit of 2 GiB takes three of them, and thousands of short ones.
    row_bytes = 4 * 7168 * 2
    long = plan_units([PromptSize(1, 10_000)] * 10, row_bytes=row_bytes, target_bytes=2 << 30)
    assert [unit.num_prompts for unit in long] == [3, 3, 3, 1]
    short = plan_units([PromptSize(1, 20)] * 10_000, row_bytes=row_bytes, target_bytes=2 << 30)
    assert short[0].num_prompts == (2 << 30) // (20 * row_bytes)


def test_turns_and_answers_count() -> None:
    [one] = [expected_size(Prompt(0, "a", [user("x" * 40)]), n=1, output_tokens=100)]
    assert (one.samples, one.rows) == (1, 8 + 10 + 100)
    four = expected_size(Prompt(0, "a", [user("x" * 40)]), n=4, output_tokens=100)
    assert (four.samples, four.rows) == (4, 4 * one.rows)
    # The second turn's sample holds the first turn and its answer as well.
    turns = expected_size(Prompt(0, "a", [user("x" * 40)], ["y" * 8]), n=1, output_tokens=100)
    assert (turns.samples, turns.rows) == (2, one.rows + one.rows + 8 + 2 + 100)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "y" * 80}]}
    answered = expected_size(Prompt(0, "a", [user("x" * 40), answer], answered=True), n=1, output_tokens=100)
    assert (answered.samples, answered.rows) == (1, 8 + 10 + 8 + 20)
    bad = expected_size(BadRow(0, None, Reason.NOT_JSON, ""), n=2, output_tokens=100)
    assert (bad.samples, bad.rows) == (2, 0)


def test_wrong_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="unit_bytes"):
        plan_units([], row_bytes=1, target_bytes=0)
    with pytest.raises(ValueError, match="min_prompts 5"):
        plan_units([], row_bytes=1, target_bytes=1, min_prompts=5, max_prompts=4)
