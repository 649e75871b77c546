"""Layer ids: which residual streams are captured, in vLLM's, Hugging Face's or SGLang's way of counting."""

from __future__ import annotations

from collections.abc import Sequence

# Added to an id of the convention to give vLLM's: there id k is the residual stream entering decoder layer k (Hugging
# Face's output_hidden_states[k] for k below the number of layers); SGLang's id k is the stream after layer k.
CONVENTION_OFFSET: dict[str, int] = {"vllm": 0, "sglang": 1}

MIN_EAGLE3_LAYERS = 7  # below this, 2, n // 2 and n - 3 are not three ascending layers


def resolve_layer_ids(
    layers: str | Sequence[int],
    num_layers: int,
    convention: str = "vllm",
    include_final: bool = True,
) -> tuple[int, ...]:
    """Ascending layer ids in vLLM's convention.

    `layers` is the word "eagle3", EAGLE-3's own choice (2, n // 2, n - 3) whatever the convention, or a list of ids
    that ascend in `convention`. The final id, `num_layers` (the last layer's output before the final norm, from which
    training targets are made), is added unless it is there already or `include_final` is false.

    Raises ValueError naming the field for an unknown word or convention, an id out of range, a duplicate, or ids that
    do not ascend.
    """
    if convention not in CONVENTION_OFFSET:
        known = " or ".join(repr(name) for name in CONVENTION_OFFSET)
        raise ValueError(f"capture.layer_convention {convention!r} must be {known}")
    ids = _eagle3(layers, num_layers) if isinstance(layers, str) else _validated(layers, num_layers, convention)
    if include_final and num_layers not in ids:
        ids = (*ids, num_layers)
    return ids


def _eagle3(word: str, num_layers: int) -> tuple[int, ...]:
    if word != "eagle3":
        raise ValueError(f"capture.layers {word!r} must be 'eagle3' or a list of layer ids")
    if num_layers < MIN_EAGLE3_LAYERS:
        raise ValueError(
            f"capture.layers 'eagle3' needs a verifier of at least {MIN_EAGLE3_LAYERS} layers, this one has "
            f"{num_layers}; give a list of layer ids"
        )
    return (2, num_layers // 2, num_layers - 3)


def _validated(layers: Sequence[int], num_layers: int, convention: str) -> tuple[int, ...]:
    given = list(layers)
    if not given:
        raise ValueError("capture.layers is empty; give at least one layer id, or 'eagle3'")
    wrong = [value for value in given if isinstance(value, bool) or not isinstance(value, int)]
    if wrong:
        raise ValueError(f"capture.layers {given}: {wrong[0]!r} is not a whole number")
    offset = CONVENTION_OFFSET[convention]
    outside = [value for value in given if not 0 <= value + offset <= num_layers]
    if outside:
        raise ValueError(
            f"capture.layers {given}: {outside[0]} is out of range; with layer_convention {convention!r} a verifier of "
            f"{num_layers} layers has the ids {-offset} to {num_layers - offset}"
        )
    if len(set(given)) < len(given):
        twice = next(value for value in given if given.count(value) > 1)
        raise ValueError(f"capture.layers {given}: {twice} is given twice; name each layer once")
    if given != sorted(given):
        raise ValueError(f"capture.layers {given} must ascend; write {sorted(given)}")
    return tuple(value + offset for value in given)
