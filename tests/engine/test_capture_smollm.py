"""Capture of a real language model against Hugging Face: every mode, and a busy engine that preempts and aborts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from capture_engine import MAX_MODEL_LEN, SMOLLM_SPEC, Engine, sampling
from capture_mixes import Mix, metric, mixes, run_mix
from capture_reference import Reference, as_float, check_all, check_controls, check_states, exchange_rows
from hypothesis import HealthCheck, given, settings

from gen.capture.client import CaptureClient
from gen.capture.config import CaptureMode
from gen.capture.messages import CaptureError, CaptureFault
from storage.types import Receipt, SampleKey

LAYERS = SMOLLM_SPEC.layer_ids


def test_one_pass_is_exact(smollm_engine: Engine, prompts: list[list[int]], reference: Reference) -> None:
    token_ids, states = smollm_engine.capture(prompts, [sampling(40, seed) for seed in range(len(prompts))])
    check_all(token_ids, states, reference, LAYERS)


def test_a_shift_by_one_fails(smollm_engine: Engine, prompts: list[list[int]], reference: Reference) -> None:
    """The mutation that the comparison exists for, on captured states: rows of the next token or of the next layer."""
    token_ids, states = smollm_engine.capture(prompts[:1], [sampling(40, 0)])
    [(key, ids)] = token_ids.items()
    [right] = reference.states([ids[:-1]])
    check_controls(right, LAYERS)
    captured = as_float(states[key])
    check_states(captured, right, LAYERS)
    for wrong, of in ((captured[1:], right[:-1]), (captured[:-1], right[1:]), (exchange_rows(captured), right)):
        with pytest.raises(AssertionError, match="lowest cosine"):
            check_states(wrong, of, LAYERS)
    for layers in ([3, 15, 27, 30], [2, 14, 27, 30], [2, 15, 28, 30], [2, 15, 27, 29]):
        with pytest.raises(AssertionError, match="lowest cosine"):
            check_states(captured, right, layers)


def test_two_passes_are_exact(smollm_engine: Engine, prompts: list[list[int]], reference: Reference) -> None:
    client = smollm_engine.new_client("two_pass")
    params = [sampling(24, seed) for seed in range(len(prompts))]
    token_ids, states = smollm_engine.capture(prompts, params, client)
    check_all(token_ids, states, reference, LAYERS)


def busy_requests(prompts: list[list[int]]) -> list[tuple[list[int], Any]]:
    """96 requests: repeated identical prompts, repeated tokens, prompts longer than the token budget, answers of one
    token and up to the model's length."""
    rng = np.random.default_rng(0)
    requests = []
    for index in range(96):
        prompt = list(prompts[index % len(prompts)])
        max_tokens = int(rng.integers(2, 40))
        match index % 8:
            case 0:
                prompt = list(prompts[0])
            case 1:
                prompt = [5] * int(rng.integers(1, 60))
            case 2 if index < 40:
                prompt = [int(token) for token in rng.integers(100, 40000, 150)]
            case 3:
                max_tokens = 1
            case 4 if index < 16:
                max_tokens = MAX_MODEL_LEN - len(prompt)
        requests.append((prompt, sampling(max_tokens, index, ignore_eos=index % 2 == 0)))
    return requests


def test_busy_engine(smollm_engine: Engine, prompts: list[list[int]], reference: Reference) -> None:
    """64 requests at once in a token budget of 128 and a KV cache for a third of them; every eighth is aborted."""
    requests = busy_requests(prompts)
    before = metric("num_preemptions")
    unit = next(smollm_engine.units)
    client = smollm_engine.client
    token_ids: dict[SampleKey, list[int]] = {}
    receipts: dict[SampleKey, Receipt | CaptureFault] = {}

    async def one(index: int, slots: asyncio.Semaphore) -> None:
        key = SampleKey(index, 0, 0)
        prompt, params = requests[index]
        async with slots:
            task = asyncio.create_task(smollm_engine.generate(prompt, params, unit, key))
            if index % 8 == 7:
                await asyncio.sleep(0.05 * index)
                task.cancel()
                await asyncio.wait([task])
                return
            token_ids[key] = await task
            receipts.update(await client.finish(unit, {key: token_ids[key]}))

    async def work() -> Any:
        await client.open_unit(smollm_engine.target(unit))
        slots = asyncio.Semaphore(64)
        await asyncio.gather(*(one(index, slots) for index in range(len(requests))))
        return await client.close_unit(unit)

    files = smollm_engine.run(work())
    assert metric("num_preemptions") > before
    assert len(token_ids) == 84
    assert max(map(len, token_ids.values())) == MAX_MODEL_LEN
    check_all(token_ids, smollm_engine.read(receipts, files), reference, LAYERS, nearest_layer=False)


@pytest.mark.parametrize("mode", ["one_pass", "two_pass"])
def test_cached_prefixes_come_from_the_arena(
    smollm_engine: Engine, prompts: list[list[int]], reference: Reference, mode: CaptureMode
) -> None:
    """Prompts that begin alike, over and over in a KV cache that has to evict: the hits are kept and the rows right."""
    client = smollm_engine.new_client(mode)
    beginning = (prompts[0] + prompts[2] + prompts[1])[:100]
    hits = metric("prefix_cache_hits")
    for round_number in range(2):
        tails = [[1000 * round_number + 10 * i + 200, 300 + i] for i in range(8)]
        fillers = [[5000 + 97 * round_number + 11 * i + j for j in range(90)] for i in range(6)]
        repeated = [*([*beginning, *tail] for tail in tails), *fillers]
        params = [sampling(12, seed, ignore_eos=True) for seed in range(len(repeated))]
        token_ids, states = smollm_engine.capture(repeated, params, client)
        check_all(token_ids, states, reference, LAYERS)
    assert metric("prefix_cache_hits") - hits >= 12 * 96


@settings(max_examples=4, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(mix=mixes(min_requests=6, max_requests=16))
def test_random_mixes(smollm_engine: Engine, prompts: list[list[int]], reference: Reference, mix: Mix) -> None:
    """Prefix-cache hits, chunked and preempted requests, aborts, n answers, neighbours that are not captured. The soak
    tier does it for long and on other engines. (vLLM turns asynchronous scheduling off on CPU.)"""
    run_mix(smollm_engine, mix, prompts, reference)


def test_wrong_tokens_and_missing_rows_are_faults(smollm_engine: Engine, prompts: list[list[int]]) -> None:
    unit = next(smollm_engine.units)
    client = smollm_engine.client
    keys = [SampleKey(row, 0, 0) for row in range(4)]

    async def work() -> list[Any]:
        await client.open_unit(smollm_engine.target(unit))
        ids = [await smollm_engine.generate(prompts[3], sampling(8, 0), unit, key) for key in keys[:3]]
        wrong = [*ids[0][:-2], ids[0][-2] + 1, ids[0][-1]]
        results = await client.finish(
            unit, {keys[0]: wrong, keys[1]: [*ids[1], 5, 5], keys[2]: ids[2], keys[3]: ids[2]}
        )
        await client.close_unit(unit)
        return [results[key] for key in keys]

    wrong, missing, right, absent = smollm_engine.run(work())
    assert isinstance(wrong, CaptureFault)
    assert wrong.reason == "wrong_tokens"
    assert isinstance(missing, CaptureFault)
    assert missing.reason == "missing_rows"
    assert isinstance(right, Receipt)
    assert isinstance(absent, CaptureFault)
    assert absent.reason == "not_captured"


def test_a_shard_that_cannot_be_written_fails_its_unit(smollm_engine: Engine, prompts: list[list[int]]) -> None:
    """A directory of shards that is a file: the error reaches the caller, the engine and other units go on."""
    unit = next(smollm_engine.units)
    client: CaptureClient = smollm_engine.client
    blocked = smollm_engine.directory / "blocked"
    blocked.write_text("a file")
    key = SampleKey(0, 0, 0)

    async def work() -> None:
        from dataclasses import replace

        await client.open_unit(replace(smollm_engine.target(unit), uri=str(blocked)))
        ids = await smollm_engine.generate(prompts[3], sampling(8, 0), unit, key)
        await client.finish(unit, {key: ids})
        await client.close_unit(unit)

    with pytest.raises(CaptureError, match=f"unit {unit}"):
        smollm_engine.run(work())
    smollm_engine.run(client.abort_unit(unit))
    _, states = smollm_engine.capture(prompts[:1], [sampling(4, 0)])
    assert len(states) == 1
