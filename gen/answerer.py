"""What a started replica does with the rows of a unit: every prompt answered, every answer's states captured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from gen.admission import Admission
from gen.capture.messages import CaptureError, CaptureFault
from gen.config import SamplingConfig
from gen.gate import Gate, Turns
from gen.isolation import FatalTurn, Isolation
from gen.outcome import DOES_NOT_FIT, UnitOutcome, fault_reject
from gen.prompts import BadRow, Prompt, RowError
from gen.requests import FINISHED, sample_seed, sampling_params
from storage import Receipt, Reject, Sample, SampleKey, ShardTarget, StateSpec

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from gen.capture.client import CaptureClient
    from gen.chat import ChatTokenizer


class Answerer:
    """Answers prompts with one engine, several units at a time."""

    def __init__(
        self,
        replica: str,
        engine: AsyncLLM,
        client: CaptureClient,
        chat: ChatTokenizer,
        admission: Admission,
        sampling: SamplingConfig,
        states: StateSpec,
        max_model_len: int,
    ) -> None:
        """`replica` is the name that samples carry."""
        self._replica = replica
        self._engine = engine
        self._client = client
        self._chat = chat
        self._admission = admission
        self._sampling = sampling
        self._states = states
        self._max_model_len = max_model_len
        self._gate = Gate()
        self._tokenising = Turns()

    async def answer_unit(
        self, rows: Sequence[Prompt | BadRow], target: ShardTarget, isolation: Isolation, outcome: UnitOutcome
    ) -> None:
        """Open the unit, do every row, close the unit. After an error the unit is the caller's to abort."""
        await self._client.open_unit(target)
        alone: list[tuple[Prompt, int]] = []
        together: list[tuple[Prompt, int]] = []
        for row in rows:
            for n in range(self._sampling.n):
                if isinstance(row, BadRow):
                    key = SampleKey(row.row, 0, n)
                    outcome.rejects.append(Reject(key, row.prompt_id, target.unit, row.reason, row.detail))
                elif isolation.runs_alone((row.row, n)):
                    alone.append((row, n))
                else:
                    together.append((row, n))
        outcome.alone = bool(alone)
        for prompt, n in alone:
            await self._work(prompt, n, isolation.fatal.get(prompt.row), outcome)
        outcome.alone = False
        async with asyncio.TaskGroup() as group:
            for prompt, n in together:
                group.create_task(self._work(prompt, n, isolation.fatal.get(prompt.row), outcome))
        outcome.shards = await self._client.close_unit(target.unit)

    async def _work(self, prompt: Prompt, n: int, fatal: FatalTurn | None, outcome: UnitOutcome) -> None:
        """One of the n answers to a prompt, or the states of the answer that it already has."""
        if prompt.answered:
            key = SampleKey(prompt.row, 0, n)
            outcome.record(_fatal_reject(prompt, key, fatal, outcome) or await self._extract(prompt, key, outcome))
        else:
            await self._answer(prompt, n, fatal, outcome)

    async def _answer(self, prompt: Prompt, n: int, fatal: FatalTurn | None, outcome: UnitOutcome) -> None:
        """Answer all turns, one after the other; a failed turn rejects the later ones."""
        messages = [dict(message) for message in prompt.messages]
        for turn in range(prompt.num_turns):
            key = SampleKey(prompt.row, turn, n)
            if turn > 0:
                messages.append({"role": "user", "content": prompt.later_turns[turn - 1]})
            result = _fatal_reject(prompt, key, fatal, outcome) or await self._sample(prompt, key, messages, outcome)
            outcome.record(result)
            if isinstance(result, Reject):
                detail = f"turn {turn} was rejected: {result.reason}"
                for later in range(turn + 1, prompt.num_turns):
                    later_key = key._replace(turn=later)
                    outcome.record(Reject(later_key, prompt.prompt_id, outcome.unit, "earlier_turn_rejected", detail))
                return
            messages = self._chat.append_answer(messages, result.text, result.reasoning_text)

    async def _sample(
        self, prompt: Prompt, key: SampleKey, messages: list[dict[str, Any]], outcome: UnitOutcome
    ) -> Sample | Reject:
        """One generated answer."""
        unit = outcome.unit
        try:
            prompt_ids = await self._tokenising.take(
                lambda: self._chat.prompt_ids(messages, max_tokens=self._max_model_len - self._sampling.max_tokens)
            )
        except RowError as error:
            return Reject(key, prompt.prompt_id, unit, error.reason, error.detail)
        seed = sample_seed(self._sampling.seed, key)
        answer: CompletionOutput
        started_at = finished_at = 0.0

        async def attempt() -> Receipt | CaptureFault:
            nonlocal answer, started_at, finished_at
            started_at = time.time()
            answer = await self._generate(key, prompt_ids, unit, seed)
            finished_at = time.time()
            return (await self._client.finish(unit, {key: [*prompt_ids, *answer.token_ids]}))[key]

        num_bytes = (len(prompt_ids) + self._sampling.max_tokens) * self._states.row_bytes
        receipt = await self._captured(key, num_bytes, attempt, outcome)
        if isinstance(receipt, CaptureFault):
            return fault_reject(prompt, unit, receipt)
        reasoning, text = self._chat.split_reasoning(answer.text, answer.token_ids, prompt_ids)
        token_ids = [*prompt_ids, *answer.token_ids]
        outcome.num_prompt_tokens += len(prompt_ids)
        outcome.num_output_tokens += len(answer.token_ids)
        return Sample(
            key=key,
            prompt_id=prompt.prompt_id,
            unit=unit,
            token_ids=token_ids,
            num_prompt_tokens=len(prompt_ids),
            loss_spans=[(len(prompt_ids), len(token_ids))],
            text=text,
            reasoning_text=reasoning,
            finish_reason=str(answer.finish_reason),
            stop_reason=None if answer.stop_reason is None else str(answer.stop_reason),
            receipt=receipt,
            seed=seed,
            category=prompt.category,
            replica=self._replica,
            started_at=started_at,
            finished_at=finished_at,
        )

    async def _extract(self, prompt: Prompt, key: SampleKey, outcome: UnitOutcome) -> Sample | Reject:
        """The states of a conversation that already has its answers; nothing is generated."""
        unit = outcome.unit
        try:
            answered = await self._tokenising.take(
                lambda: self._chat.answered(prompt.messages, max_tokens=self._max_model_len)
            )
        except RowError as error:
            return Reject(key, prompt.prompt_id, unit, error.reason, error.detail)
        started_at = time.time()
        num_bytes = len(answered.token_ids) * self._states.row_bytes
        receipt = await self._captured(
            key, num_bytes, lambda: self._client.extract(unit, key, answered.token_ids), outcome
        )
        if isinstance(receipt, CaptureFault):
            return fault_reject(prompt, unit, receipt)
        outcome.num_prompt_tokens += len(answered.token_ids)
        return Sample(
            key=key,
            prompt_id=prompt.prompt_id,
            unit=unit,
            token_ids=answered.token_ids,
            num_prompt_tokens=answered.num_prompt_tokens,
            loss_spans=answered.loss_spans,
            text=answered.text,
            reasoning_text=answered.reasoning_text,
            finish_reason="given",
            receipt=receipt,
            category=prompt.category,
            replica=self._replica,
            started_at=started_at,
            finished_at=time.time(),
        )

    async def _captured(
        self,
        key: SampleKey,
        num_bytes: int,
        attempt: Callable[[], Awaitable[Receipt | CaptureFault]],
        outcome: UnitOutcome,
    ) -> Receipt | CaptureFault:
        """Run an attempt; when its states are bad, once more with nothing else in the engine.

        `num_bytes` are the rows that the answer may have at most; one that does not fit alone is not tried.
        """
        if not self._admission.fits(num_bytes):
            detail = f"{num_bytes} bytes of hidden states may not fit into host memory (capture.host_memory_gib)"
            return CaptureFault(key, DOES_NOT_FIT, detail)
        async with self._admission.admit(num_bytes), self._gate.shared():
            outcome.in_engine.add(key)
            receipt = await attempt()
            outcome.in_engine.remove(key)
        if isinstance(receipt, CaptureFault):
            outcome.capture_faults[receipt.reason] += 1
            async with self._gate.alone():
                outcome.in_engine.add(key)
                receipt = await attempt()
                outcome.in_engine.remove(key)
        return receipt

    async def _generate(self, key: SampleKey, prompt_ids: list[int], unit: int, seed: int) -> CompletionOutput:
        params = sampling_params(self._sampling, seed, skip_special_tokens=self._chat.skip_special_tokens)
        self._client.prepare(params, unit, key)
        request_id = f"{unit}/{key.name}"
        final = None
        async for output in self._engine.generate({"prompt_token_ids": prompt_ids}, params, request_id):
            final = output
        assert final is not None, f"sample {key}: vLLM ended the request without an output"
        [answer] = final.outputs
        if answer.finish_reason not in FINISHED:
            raise CaptureError(
                f"sample {key}: vLLM gave the request up ({answer.finish_reason}); its answer is no sample"
            )
        return answer


def _fatal_reject(prompt: Prompt, key: SampleKey, fatal: FatalTurn | None, outcome: UnitOutcome) -> Reject | None:
    """The reject of the turn that an engine died of; later turns never come to it."""
    if fatal is None or key.turn < fatal.turn:
        return None
    return Reject(key, prompt.prompt_id, outcome.unit, fatal.reason, fatal.detail)
