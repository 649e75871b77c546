"""The stock method, and one pass with compiled graphs, against Hugging Face."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_engine import SMOLLM_SPEC, Engine, sampling
from capture_reference import Reference, check_all
from random_models import HIDDEN, RANDOM_MODELS, VOCAB

from storage.types import Receipt, SampleKey, StateSpec

LAYERS = SMOLLM_SPEC.layer_ids


def test_stock_method(verifier_dir: Path, tmp_path: Path, prompts: list[list[int]], reference: Reference) -> None:
    """States out of vLLM's paged cache: with prefix-cache hits, chunked prefills, one-token answers and aborts."""
    engine = Engine(
        verifier_dir,
        SMOLLM_SPEC,
        "stock",
        tmp_path,
        max_model_len=256,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=32,
    )
    try:
        repeated = [*prompts, *prompts, prompts[0] + prompts[2] + prompts[1]]
        token_ids, states = engine.capture(
            repeated, [sampling(1 + 7 * (seed % 4), seed) for seed in range(len(repeated))]
        )
        check_all(token_ids, states, reference, LAYERS)
        engine.run(abort_one_finish_another(engine, prompts))
    finally:
        engine.close()


async def abort_one_finish_another(engine: Engine, prompts: list[list[int]]) -> None:
    unit = next(engine.units)
    aborted, finished = SampleKey(0, 0, 0), SampleKey(1, 0, 0)
    await engine.client.open_unit(engine.target(unit))
    task = asyncio.create_task(engine.generate(prompts[0], sampling(150, 0, ignore_eos=True), unit, aborted))
    ids = await engine.generate(prompts[1], sampling(8, 1), unit, finished)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    receipts: dict[SampleKey, Any] = await engine.client.finish(unit, {finished: ids})
    assert isinstance(receipts[finished], Receipt)
    [entry] = await engine.client.close_unit(unit)
    assert entry.num_samples == 1


@pytest.mark.parametrize("runner", [1, 2])
def test_stock_method_of_a_model_with_latent_attention(
    runner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.triton_utils import HAS_TRITON

    if runner == 2 and not HAS_TRITON:
        pytest.skip("vLLM refuses its second model runner here: Model Runner V2 requires Triton")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(runner - 1))
    model = RANDOM_MODELS["deepseek_v3"]
    reference = Reference(model.make(tmp_path / "model"))
    spec = StateSpec(model.layer_ids, HIDDEN)
    arguments = {"max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 8, "skip_tokenizer_init": True}
    engine = Engine(tmp_path / "model", spec, "stock", tmp_path, dtype="bfloat16", enforce_eager=True, **arguments)
    try:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(2, VOCAB - 8, length).tolist() for length in (40, 100, 17, 5)]
        token_ids, states = engine.capture(prompts, [sampling(16, seed, ignore_eos=True) for seed in range(4)])
        check_all(token_ids, states, reference, model.layer_ids, lowest=0.93, floor=0.8, centred=True)
    finally:
        engine.close()


def test_compiled_graphs(tmp_path: Path) -> None:
    """A model of 8 layers, since compiling takes as long as there are layers."""
    model = RANDOM_MODELS["qwen3"]
    reference = Reference(model.make(tmp_path / "model"))
    spec = StateSpec(model.layer_ids, HIDDEN)
    engine = Engine(
        tmp_path / "model", spec, "one_pass", tmp_path, dtype="bfloat16", max_model_len=256, skip_tokenizer_init=True
    )
    try:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(2, VOCAB, length).tolist() for length in (40, 7, 90)]
        token_ids, states = engine.capture(prompts, [sampling(24, seed, ignore_eos=True) for seed in range(3)])
        check_all(token_ids, states, reference, model.layer_ids, lowest=0.98, centred=True)
    finally:
        engine.close()
