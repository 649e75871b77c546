"""The draft vocabulary and its maps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft.vocab import build_vocab, find_mapping_faults, mapping_from_targets


@st.composite
def counted_vocabularies(draw: st.DrawFn) -> tuple[np.ndarray, int, list[int]]:
    size = draw(st.integers(1, 200))
    frequencies = np.array(draw(st.lists(st.integers(0, 20), min_size=size, max_size=size)), dtype=np.int64)
    draft_size = draw(st.integers(1, size))
    special = draw(st.lists(st.integers(0, size - 1), max_size=min(draft_size, 5), unique=True))
    return frequencies, draft_size, special


@settings(max_examples=200, deadline=None)
@given(counted_vocabularies())
def test_mapping_is_sound_and_takes_the_most_frequent(drawn: tuple[np.ndarray, int, list[int]]) -> None:
    frequencies, draft_size, special = drawn
    mapping = build_vocab(frequencies, draft_size, special)
    assert mapping.d2t.dtype == np.int64
    assert mapping.t2d.dtype == np.bool_
    assert len(mapping.d2t) == draft_size
    assert int(mapping.t2d.sum()) == draft_size
    assert find_mapping_faults(mapping.d2t, mapping.t2d, len(frequencies)) == []
    assert set(special) <= set(mapping.targets.tolist())
    chosen = [token for token in mapping.targets.tolist() if token not in special]
    left = [token for token in range(len(frequencies)) if not mapping.t2d[token]]
    if chosen and left:
        worst = min(chosen, key=lambda token: (frequencies[token], -token))
        best = max(left, key=lambda token: (frequencies[token], -token))
        assert (frequencies[worst], -worst) > (frequencies[best], -best)
    total = frequencies.sum()
    assert mapping.coverage == pytest.approx(frequencies[mapping.targets].sum() / total if total else 1.0)


def test_example_by_hand() -> None:
    mapping = build_vocab(np.array([5, 0, 9, 0, 9, 1]), 3, special_ids=[1])
    assert mapping.targets.tolist() == [1, 2, 4]
    assert mapping.d2t.tolist() == [1, 1, 2]
    assert mapping.coverage == pytest.approx(18 / 24)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros(4), 2), "integers"),
        ((np.zeros((2, 2), np.int64), 2), "integers"),
        ((np.array([1, -1]), 1), "negative"),
        ((np.zeros(4, np.int64), 5), r"within \[1, 4\]"),
        ((np.zeros(4, np.int64), 0), r"within \[1, 4\]"),
        ((np.zeros(4, np.int64), 2, [4]), "another tokenizer"),
        ((np.zeros(4, np.int64), 1, [0, 1]), "do not fit"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_vocab(*arguments)


def test_targets_must_ascend() -> None:
    with pytest.raises(ValueError, match="ascend"):
        mapping_from_targets(np.array([3, 2]), 10)
    with pytest.raises(ValueError, match="ascend"):
        mapping_from_targets(np.array([3, 10]), 10)


def test_faults_of_files_are_told_apart() -> None:
    mapping = mapping_from_targets(np.array([1, 4, 7, 9]), 10)
    absolute = find_mapping_faults(mapping.targets, mapping.t2d, 10)
    assert any("offsets, not target ids" in fault for fault in absolute)
    swapped = np.array([4, 0, 5, 6])
    assert any("ascend" in fault for fault in find_mapping_faults(swapped, mapping.t2d, 10))
    other = mapping_from_targets(np.array([1, 4, 7, 8]), 10)
    assert any("3 in both" in fault for fault in find_mapping_faults(mapping.d2t, other.t2d, 10))
    assert any("shape" in fault for fault in find_mapping_faults(mapping.d2t, mapping.t2d[:-1], 10))
    assert any("float64" in fault for fault in find_mapping_faults(mapping.d2t.astype(float), None, 10))
    assert find_mapping_faults(mapping.d2t, None, 10) == []
