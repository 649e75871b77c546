"""Hidden states from Hugging Face, and the comparison that captured states must pass and shifted ones must fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

BATCH = 16


class Reference:
    """All layer ids' states of a Hugging Face model: id k enters decoder layer k, the last id leaves the last layer."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        inner = getattr(model, "model", model)
        inner = getattr(inner, "language_model", inner)
        self._layers = getattr(inner, "layers", None) or inner.blocks

    def states(self, samples: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """float32 [tokens, layers + 1, hidden] of each sample."""
        order = sorted(range(len(samples)), key=lambda index: len(samples[index]))
        states: list[torch.Tensor] = [torch.empty(0)] * len(samples)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            for index, state in zip(batch, self._forward([samples[index] for index in batch]), strict=True):
                states[index] = state
        return states

    @torch.inference_mode()
    def _forward(self, samples: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Padded on the right, which causal attention needs no mask for. Hooks, since `output_hidden_states` norms its
        last entry."""
        seen: list[torch.Tensor] = []

        def enters(_module: Any, args: Any, kwargs: Any) -> None:
            seen.append(args[0] if args else kwargs["hidden_states"])

        def leaves(_module: Any, _args: Any, output: Any) -> None:
            seen.append(output[0] if isinstance(output, tuple) else output)

        hooks = [layer.register_forward_pre_hook(enters, with_kwargs=True) for layer in self._layers]
        hooks.append(self._layers[-1].register_forward_hook(leaves))
        width = max(map(len, samples))
        try:
            self._model(
                input_ids=torch.tensor([[*sample, *[0] * (width - len(sample))] for sample in samples]), use_cache=False
            )
        finally:
            for hook in hooks:
                hook.remove()
        states_BTKH = torch.stack([state.reshape(len(samples), width, -1) for state in seen], dim=2).float()
        return [state[: len(sample)] for state, sample in zip(states_BTKH, samples, strict=True)]


def as_float(states_TLH: np.ndarray, dtype: str = "bfloat16") -> torch.Tensor:
    """The bits of a shard as float32."""
    return torch.from_numpy(np.array(states_TLH)).view(getattr(torch, dtype)).float()


def cosines(captured_TLH: torch.Tensor, expected_TLH: torch.Tensor, *, centred: bool = False) -> torch.Tensor:
    """Cosine per token and layer, [tokens, layers].

    `centred` takes the mean over tokens away first: on a random model it is most of every state, and a copy shifted by
    one token would score 0.996 without.
    """
    if centred:
        captured_TLH = captured_TLH - captured_TLH.mean(0, keepdim=True)
        expected_TLH = expected_TLH - expected_TLH.mean(0, keepdim=True)
    return torch.nn.functional.cosine_similarity(captured_TLH, expected_TLH, dim=-1)


def check_states(
    captured_TLH: torch.Tensor,
    reference_TKH: torch.Tensor,
    layer_ids: Sequence[int],
    *,
    lowest: float = 0.99,
    floor: float = 0.9,
    centred: bool = False,
    nearest_layer: bool = True,
    num_repeated: int = 0,
) -> None:
    """Assert that captured states are those of these layers and tokens.

    In every layer 98 of 100 tokens have a cosine of at least `lowest` with the reference, and none is below `floor`:
    Hugging Face's own bf16 states of SmolLM2 dip to 0.976 of its fp32 states for single tokens of the middle layers,
    where massive activations arise. A single row in the wrong place is below the floor in the first layers. And of all
    the reference's layers the right one is nearest: neighbouring layers of a deep random model have a cosine of 0.99.
    (Not for `nearest_layer=False`: of a few tokens the first one's massive activations decide which layer that is, and
    the states of a repeated token do not change over some layers.)

    `num_repeated` is for text that begins with one token so many times. Behind the repetition single bf16 states of the
    later layers are anything (a cosine of 0.36 between Hugging Face's own bf16 and fp32, -0.2 between vLLM's and fp32):
    there only the first layer is compared.
    """
    assert captured_TLH.shape == (len(reference_TKH), len(layer_ids), reference_TKH.shape[-1])
    assert torch.isfinite(captured_TLH).all()
    found_TL = cosines(captured_TLH, reference_TKH[:, list(layer_ids)], centred=centred)
    if num_repeated:
        found_TL[num_repeated:, 1:] = 1
    low_L = (found_TL < lowest).sum(0)
    summary = f"lowest cosine per layer {[round(value, 4) for value in found_TL.min(0).values.tolist()]}"
    assert (low_L <= max(1, len(found_TL) // 50)).all(), f"{low_L.tolist()} tokens below {lowest}; {summary}"
    assert found_TL.min() >= floor, summary
    if nearest_layer:
        nearest = nearest_layers(captured_TLH, reference_TKH)
        assert nearest == list(layer_ids), f"nearest layers are {nearest}, not {list(layer_ids)}; {summary}"


def nearest_layers(captured_TLH: torch.Tensor, reference_TKH: torch.Tensor) -> list[int]:
    """For each captured layer, the reference layer at the smallest distance from the median token (a first token's
    massive activations, hundreds of times larger than the rest, are the same over many layers)."""
    distances_LK = torch.stack(
        [
            (reference_TKH - captured_TLH[:, index : index + 1]).norm(dim=-1).median(0).values
            for index in range(captured_TLH.shape[1])
        ]
    )
    return distances_LK.argmin(1).tolist()


def check_all(
    token_ids: Mapping[Any, list[int]],
    states: Mapping[Any, np.ndarray],
    reference: Reference,
    layer_ids: Sequence[int],
    **options: Any,
) -> None:
    """`check_states` of every sample, and rows == tokens - 1."""
    expected = reference.states([ids[:-1] for ids in token_ids.values()])
    for (key, ids), state in zip(token_ids.items(), expected, strict=True):
        assert len(states[key]) == len(ids) - 1
        check_states(as_float(states[key]), state, layer_ids, **options)


def check_controls(reference_TKH: torch.Tensor, layer_ids: Sequence[int], **options: Any) -> None:
    """Assert that states shifted by one token or by one layer fail the comparison: otherwise it proves nothing."""
    right = reference_TKH[:, list(layer_ids)]
    wrong = {
        "next token": (right[1:], reference_TKH[:-1], layer_ids),
        "previous token": (right[:-1], reference_TKH[1:], layer_ids),
        "one row exchanged": (exchange_rows(right), reference_TKH, layer_ids),
    }
    for index in range(len(layer_ids)):
        shifted = list(layer_ids)
        shifted[index] += 1 if shifted[index] + 1 < reference_TKH.shape[1] else -1
        wrong[f"layer {layer_ids[index]} for {shifted[index]}"] = (right, reference_TKH, shifted)
    for name, (captured, reference, ids) in wrong.items():
        try:
            check_states(captured, reference, ids, **options)
        except AssertionError:
            continue
        raise AssertionError(f"states with {name} pass for the right ones")


def exchange_rows(states_TLH: torch.Tensor) -> torch.Tensor:
    """Two rows in the middle in each other's place."""
    order = list(range(len(states_TLH)))
    middle = len(order) // 2
    order[middle], order[middle + 1] = order[middle + 1], order[middle]
    return states_TLH[order]
