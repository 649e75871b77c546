"""Choosing the capture mode on the hardware that will run it: a few seconds of each mode, the faster one is taken."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage import SampleKey, ShardTarget, StateSpec

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from gen.capture.config import CaptureMode

# Enough to fill a batch for some dozens of steps; the first of the rounds warms up and does not count.
NUM_REQUESTS = 32
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32
NUM_ROUNDS = 3


@dataclass(frozen=True)
class Calibration:
    """Generated tokens per second of each mode, shards included, best of the counted rounds."""

    tokens_per_s: dict[CaptureMode, float]

    @property
    def fastest(self) -> CaptureMode:
        return max(self.tokens_per_s, key=self.tokens_per_s.__getitem__)

    def __str__(self) -> str:
        return ", ".join(f"{mode} {speed:.0f} tokens/s" for mode, speed in self.tokens_per_s.items())


async def calibrate(engine: AsyncLLM, spec: StateSpec, modes: Sequence[CaptureMode], codec: str) -> Calibration:
    """Run the same requests in each mode, in turn, on one engine.

    Args:
        engine: one_pass and two_pass share the worker and can be compared on one engine. The stock method needs an
            engine of its own, whose start costs more than it could win: it is for what cannot be hooked.
        spec: what the engine captures.
        modes: to compare.
        codec: of the shards, which are written to a temporary folder and dropped.
    """
    best: dict[CaptureMode, float] = dict.fromkeys(modes, 0.0)
    with tempfile.TemporaryDirectory(prefix="headrace-calibration-") as directory:
        for round_number in range(NUM_ROUNDS):
            for unit, mode in enumerate(modes):
                target = ShardTarget(directory, "calibration", unit, round_number, spec, codec=codec)
                seconds = await _measure(engine, spec, mode, target)
                if round_number > 0:
                    best[mode] = max(best[mode], NUM_REQUESTS * OUTPUT_TOKENS / seconds)
    return Calibration(best)


async def _measure(engine: AsyncLLM, spec: StateSpec, mode: CaptureMode, target: ShardTarget) -> float:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from gen.capture.client import CaptureClient

    client = CaptureClient(engine, spec, mode)
    vocab_size = engine.vllm_config.model_config.get_vocab_size()
    # Other tokens in each round and mode, so that no mode finds the other's prompts in the prefix cache.
    draw = random.Random(f"{mode}/{target.attempt}")

    async def answer(n: int) -> None:
        prompt_ids = [draw.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        params = SamplingParams(
            max_tokens=OUTPUT_TOKENS,
            min_tokens=OUTPUT_TOKENS,
            temperature=0.0,
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
        )
        key = SampleKey(0, 0, n)
        client.prepare(params, target.unit, key)
        request_id = f"calibration-{mode}-{target.attempt}-{n}"
        async for output in engine.generate({"prompt_token_ids": prompt_ids}, params, request_id):
            token_ids = [*prompt_ids, *output.outputs[0].token_ids]
        await client.finish(target.unit, {key: token_ids})

    await client.open_unit(target)
    started = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            for n in range(NUM_REQUESTS):
                group.create_task(answer(n))
        return time.monotonic() - started
    finally:
        await client.abort_unit(target.unit)
