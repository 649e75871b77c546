"""Random mixes of requests for one engine, and the check that each of them left the right rows and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capture_engine import MAX_MODEL_LEN, SMOLLM_SPEC, Engine, sampling
from capture_reference import Reference, as_float, check_states
from hypothesis import strategies as st

from gen.capture.messages import CaptureFault
from storage.types import Receipt, SampleKey

TEXTS = (
    "A train leaves at noon and drives 60 miles an hour. How far is it at three?",
    "Write a short poem about rivers.",
    "Name three prime numbers and explain why they are prime. Then add them up, step by step.",
    "Hello",
)
WORDS = range(100, 40_000)


def example_prompts(verifier_dir: Path) -> list[list[int]]:
    """Token ids of some questions as the verifier's chat template renders them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier_dir)
    return [
        list(
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        )
        for text in TEXTS
    ]


def smollm_reference(verifier_dir: Path) -> Reference:
    """Hugging Face's states of SmolLM2 in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return Reference(AutoModelForCausalLM.from_pretrained(verifier_dir, dtype=torch.float32))


def metric(name: str) -> int:
    """A counter of vLLM over all engines of this process: `num_preemptions`, or `prefix_cache_hits` (tokens)."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    return sum(
        metric.value
        for metric in get_metrics_snapshot()
        if metric.name == f"vllm:{name}" and isinstance(metric, Counter)
    )


@dataclass(frozen=True)
class Request:
    """One prompt of a mix."""

    kind: str  # chat: a question; same: the first one; prefix: two that share their beginning; words: random; repeat
    choice: int  # which question, which random words, which repeated token
    length: int  # of words and repeats
    max_tokens: int  # 0: as many as the model's length leaves
    ignore_eos: bool = False
    n: int = 1  # answers
    captured: bool = True  # an uncaptured neighbour fills the prefix cache and the batch, and must leave nothing
    arrives_s: float = 0.0
    aborted_s: float | None = None  # after so long

    def prompt(self, questions: Sequence[list[int]]) -> list[int]:
        draw = random.Random(self.choice)
        match self.kind:
            case "chat":
                return list(questions[self.choice % len(questions)])
            case "same":
                return list(questions[0])
            case "prefix":
                return [*questions[2], *(draw.choice(WORDS) for _ in range(1 + self.length % 40))]
            case "words":
                return [draw.choice(WORDS) for _ in range(self.length)]
            case _:
                return [draw.choice(WORDS)] * self.length


@dataclass(frozen=True)
class Mix:
    requests: list[Request]
    at_once: int
    two_passes: bool = False
    reads_cache: bool = True  # where the engine has an arena


requests = st.builds(
    Request,
    kind=st.sampled_from(["chat", "same", "prefix", "words", "repeat"]),
    choice=st.integers(0, 50),
    length=st.one_of(st.integers(1, 60), st.integers(120, 200)),  # some are longer than a step's token budget
    max_tokens=st.one_of(st.just(1), st.integers(2, 40), st.sampled_from([1, 0])),
    ignore_eos=st.booleans(),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    captured=st.sampled_from([True, True, True, False]),
    arrives_s=st.floats(0, 1),
    aborted_s=st.one_of(st.none(), st.none(), st.none(), st.floats(0, 2)),
)


def mixes(min_requests: int, max_requests: int, *, two_passes: bool = True) -> st.SearchStrategy[Mix]:
    return st.builds(
        Mix,
        requests=st.lists(requests, min_size=min_requests, max_size=max_requests),
        at_once=st.sampled_from([64, 16, 2]),
        two_passes=st.booleans() if two_passes else st.just(False),
        reads_cache=st.sampled_from([True, True, False]),
    )


def run_mix(engine: Engine, mix: Mix, questions: Sequence[list[int]], reference: Reference) -> int:
    """Run a mix in one unit and check every sample against Hugging Face. Returns the number of samples."""
    mode = "two_pass" if mix.two_passes else engine.mode
    client = engine.new_client(mode, read_prefix_cache=mix.reads_cache)
    unit = next(engine.units)
    token_ids: dict[SampleKey, list[int]] = {}
    receipts: dict[SampleKey, Receipt | CaptureFault] = {}
    plain = itertools.count()

    async def answer(request: Request, key: SampleKey, slots: asyncio.Semaphore) -> None:
        prompt = request.prompt(questions)
        params = sampling(
            request.max_tokens or MAX_MODEL_LEN - len(prompt), key.row * 8 + key.n, ignore_eos=request.ignore_eos
        )
        await asyncio.sleep(request.arrives_s)
        async with slots:
            if request.captured:
                work = asyncio.create_task(engine.generate(prompt, params, unit, key, client))
            else:
                work = asyncio.create_task(uncaptured(engine, prompt, params, f"plain-{unit}-{next(plain)}"))
            try:
                async with asyncio.timeout(request.aborted_s):
                    ids = await work
            except TimeoutError:
                return
            finally:
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
            if request.captured:
                receipts.update(await client.finish(unit, {key: ids}))
                token_ids[key] = ids

    async def work() -> Any:
        await client.open_unit(engine.target(unit))
        slots = asyncio.Semaphore(mix.at_once)
        async with asyncio.TaskGroup() as group:
            for row, request in enumerate(mix.requests):
                for n in range(request.n):
                    group.create_task(answer(request, SampleKey(row, 0, n), slots))
        return await client.close_unit(unit)

    files = engine.run(work(), timeout=600)
    assert sum(entry.num_samples for entry in files) == len(token_ids)
    states = engine.read(receipts, files)
    expected = reference.states([ids[:-1] for ids in token_ids.values()])
    for (key, ids), expected_TKH in zip(token_ids.items(), expected, strict=True):
        request = mix.requests[key.row]
        assert len(states[key]) == len(ids) - 1, f"{key} of {request}"
        try:
            check_states(
                as_float(states[key]),
                expected_TKH,
                SMOLLM_SPEC.layer_ids,
                nearest_layer=request.kind != "repeat" and len(expected_TKH) >= 16,
                num_repeated=request.length if request.kind == "repeat" and request.length >= 16 else 0,
            )
        except AssertionError as error:
            raise AssertionError(f"{key} of {request}: {error}") from error
    return len(token_ids)


async def uncaptured(engine: Engine, prompt: list[int], params: Any, request_id: str) -> list[int]:
    final = None
    async for output in engine.engine.generate({"prompt_token_ids": prompt}, params, request_id):
        final = output
    assert final is not None
    return [*prompt, *final.outputs[0].token_ids]
