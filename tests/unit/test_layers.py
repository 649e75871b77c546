"""Layer ids in every convention, and the errors that name the field and the remedy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen.layers import resolve_layer_ids


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(30, (2, 15, 27, 30)), (61, (2, 30, 58, 61)), (36, (2, 18, 33, 36)), (7, (2, 3, 4, 7))],
)
def test_eagle3(num_layers: int, expected: tuple[int, ...]) -> None:
    assert resolve_layer_ids("eagle3", num_layers) == expected
    # The word means the same layers whatever the convention of listed ids is.
    assert resolve_layer_ids("eagle3", num_layers, "sglang") == expected
    assert resolve_layer_ids("eagle3", num_layers, include_final=False) == expected[:-1]


def test_eagle3_needs_room_for_three_layers() -> None:
    with pytest.raises(ValueError, match="at least 7 layers, this one has 6; give a list of layer ids"):
        resolve_layer_ids("eagle3", 6)


def test_conventions_name_the_same_layers() -> None:
    assert resolve_layer_ids([1, 29, 57, 60], 61, "sglang") == resolve_layer_ids([2, 30, 58, 61], 61, "vllm")
    # The embedding's output is vLLM's 0; SGLang has no layer before its layer 0 and writes -1.
    assert resolve_layer_ids([-1], 4, "sglang") == resolve_layer_ids([0], 4) == (0, 4)


def test_final_layer_is_added_once() -> None:
    assert resolve_layer_ids([2, 4], 4) == (2, 4)
    assert resolve_layer_ids([2], 4) == (2, 4)
    assert resolve_layer_ids([2], 4, include_final=False) == (2,)


@pytest.mark.parametrize(
    ("layers", "convention", "message"),
    [
        ("eagle2", "vllm", r"capture\.layers 'eagle2' must be 'eagle3' or a list"),
        ([], "vllm", "empty"),
        ([2, 2, 5], "vllm", "2 is given twice"),
        ([5, 2], "vllm", r"must ascend; write \[2, 5\]"),
        ([2, 31], "vllm", "31 is out of range.*ids 0 to 30"),
        ([2, 30], "sglang", "30 is out of range.*ids -1 to 29"),
        ([-1], "vllm", "-1 is out of range"),
        ([2.0], "vllm", "2.0 is not a whole number"),
        ([True], "vllm", "True is not a whole number"),
        (["2"], "vllm", "'2' is not a whole number"),
        ([2], "huggingface", r"capture\.layer_convention 'huggingface' must be 'vllm' or 'sglang'"),
    ],
)
def test_errors_name_field_and_remedy(layers: object, convention: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_layer_ids(layers, 30, convention)  # type: ignore[arg-type]


@given(num_layers=st.integers(1, 100), data=st.data())
def test_resolved_ids_are_ascending_in_range_and_end_with_the_final_layer(num_layers: int, data: st.DataObject) -> None:
    given_ids = sorted(data.draw(st.sets(st.integers(0, num_layers), min_size=1)))
    ids = resolve_layer_ids(given_ids, num_layers)
    assert list(ids) == sorted(set(given_ids) | {num_layers})
    assert resolve_layer_ids([i - 1 for i in given_ids], num_layers, "sglang") == ids
