"""One verifier replica: takes units of prompts, answers them, and returns samples whose states are in closed shards."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from gen import memory
from gen.admission import Admission
from gen.calibrate import calibrate
from gen.capture.messages import CaptureError, CaptureFault
from gen.config import CaptureConfig, ReplicasConfig, SamplingConfig, VerifierConfig
from gen.engine import (
    EngineInfo,
    check_mode,
    describe_engine,
    engine_arguments,
    set_environment,
    start_engine,
    supported_mode,
)
from gen.gate import Gate
from gen.prompts import BadRow, Prompt, RowError
from storage import FileEntry, Receipt, Reject, Sample, SampleKey, ShardTarget, StateSpec

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

    from gen.capture.client import CaptureClient
    from gen.capture.config import CaptureMode
    from gen.chat import ChatTokenizer

# The reject of a sample whose rows exceed the host memory that capture may use, even alone.
DOES_NOT_FIT = "does_not_fit"
# How vLLM says that an answer has ended. With `abort` and `error` it gives up, and hands out what it had until then.
FINISHED = ("stop", "length", "repetition")
# Available host memory below which fewer requests are admitted, as a share of the node's, and how often it is read.
SHORT_OF_MEMORY = 0.05
MEMORY_INTERVAL_S = 1.0
# How often a wait for the engine looks whether the engine still lives.
DEATH_INTERVAL_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class ReplicaSpec:
    """Everything a replica needs to start (picklable)."""

    name: str
    verifier: VerifierConfig
    sampling: SamplingConfig
    capture: CaptureConfig
    replicas: ReplicasConfig
    states: StateSpec
    codec: str
    num_on_node: int = 1  # replicas that share this node's memory
    cpu_binding: str | None = None


@dataclass
class UnitOutcome:
    """What one unit became."""

    unit: int
    samples: list[Sample] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    shards: list[FileEntry] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_capture_faults: int = 0
    num_tightened: int = 0  # times that fewer requests were admitted for want of memory
    seconds: float = 0.0


def sample_seed(base_seed: int, key: SampleKey) -> int:
    """The seed of one sample: 63 bits of a digest of the run's seed and the sample's key, the same on every replica."""
    digest = hashlib.sha256(f"{base_seed}/{key.row}/{key.turn}/{key.n}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Replica:
    """A vLLM engine with capture. `start` once, then `run_unit` for as many units as wanted, several at a time."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._gate = Gate()
        self._watch: asyncio.Task[None] | None = None
        self._started = False
        self._num_tightened = 0  # as told by the outcomes of units so far

    async def start(self) -> EngineInfo:
        """Load the verifier. Blocks the event loop for as long as that takes."""
        assert not self._started
        spec = self._spec
        set_environment(spec.replicas, spec.cpu_binding)
        from gen.capture.client import CaptureClient
        from gen.chat import ChatTokenizer

        directory = spec.verifier.directory()
        configured = spec.capture.mode

        def arguments(mode: CaptureMode) -> dict[str, Any]:
            return engine_arguments(directory, spec.verifier, spec.replicas, spec.states, mode)

        if configured == "auto":
            mode = supported_mode(arguments("one_pass"))
        else:
            mode = configured
            check_mode(arguments(mode))
        self._engine = start_engine(arguments(mode))
        self._started = True
        calibration = None
        if configured == "auto" and mode == "one_pass":
            calibration = await self._while_alive(
                calibrate(self._engine, spec.states, ("one_pass", "two_pass"), spec.codec)
            )
            mode = calibration.fastest
        self._info = describe_engine(self._engine, mode, "" if calibration is None else str(calibration))
        self._chat: ChatTokenizer = ChatTokenizer.from_config(spec.verifier, directory, engine=self._engine)
        self._client: CaptureClient = CaptureClient(self._engine, spec.states, mode)
        budget = spec.capture.host_memory_gib
        self._admission = Admission(
            memory.total_bytes() // 2 // spec.num_on_node if budget is None else int(budget * 2**30),
            # The scheduler keeps a queue of its own; one engine's worth of requests waiting there is enough.
            2 * spec.replicas.max_num_seqs,
        )
        self._max_prompt_tokens = self._info.max_model_len - spec.sampling.max_tokens
        return self._info

    @property
    def is_dead(self) -> bool:
        """Whether the engine has died. A dead engine never answers again: its process must be replaced."""
        return self._started and self._engine.errored

    def stop(self) -> None:
        """End the engine and its worker processes."""
        if self._started:
            if self._watch is not None:
                self._watch.cancel()
            self._engine.shutdown()
            self._started = False

    async def run_unit(self, rows: Sequence[Prompt | BadRow], target: ShardTarget) -> UnitOutcome:
        """Answer every prompt of a unit and capture its states.

        Every expected key of the unit ends as a sample or a reject. When anything else goes wrong (a dead engine, a
        full disk) the unit's shards are abandoned and the error is raised: a unit is whole or not there.
        """
        started = time.monotonic()
        outcome = UnitOutcome(target.unit)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_memory())
        try:
            await self._while_alive(self._fill(rows, target, outcome))
        except BaseException:
            # With a dead engine there is nobody to abort; what it wrote are orphans that no reader trusts.
            with suppress(CaptureError):
                await self._while_alive(self._client.abort_unit(target.unit))
            raise
        outcome.samples.sort(key=lambda sample: sample.key)
        outcome.rejects.sort(key=lambda reject: reject.key)
        # Units run side by side: each shortage is told once, by the unit that ends next.
        outcome.num_tightened = self._admission.num_tightened - self._num_tightened
        self._num_tightened = self._admission.num_tightened
        outcome.seconds = time.monotonic() - started
        return outcome

    async def _fill(self, rows: Sequence[Prompt | BadRow], target: ShardTarget, outcome: UnitOutcome) -> None:
        """Open the unit, do every row, close the unit."""
        await self._client.open_unit(target)
        async with asyncio.TaskGroup() as group:
            for row in rows:
                for n in range(self._spec.sampling.n):
                    if isinstance(row, BadRow):
                        key = SampleKey(row.row, 0, n)
                        outcome.rejects.append(Reject(key, row.prompt_id, target.unit, row.reason, row.detail))
                    else:
                        group.create_task(self._work(row, n, target.unit, outcome))
        outcome.shards = await self._client.close_unit(target.unit)

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is given up when the engine dies.

        vLLM fails the requests of an engine that dies, but never answers the calls (`collective_rpc`) that were under
        way: whoever waits for one would wait for ever.

        Raises CaptureError when the engine is dead.
        """
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=DEATH_INTERVAL_S)
                if not task.done() and self.is_dead:
                    raise CaptureError("the engine died while a call to it was under way")
            return task.result()
        finally:
            task.cancel()

    async def _watch_memory(self) -> None:
        """Admit fewer requests while the node is short of host memory: cheaper than an engine that is killed."""
        floor = SHORT_OF_MEMORY * memory.total_bytes()
        while True:
            await asyncio.sleep(MEMORY_INTERVAL_S)
            if memory.available_bytes() < floor:
                self._admission.tighten()

    async def _work(self, prompt: Prompt, n: int, unit: int, outcome: UnitOutcome) -> None:
        """One of the n answers to a prompt, or the states of the answer that it already has."""
        if prompt.answered:
            result = await self._extract(prompt, SampleKey(prompt.row, 0, n), unit, outcome)
            _record(result, outcome)
        else:
            await self._answer(prompt, n, unit, outcome)

    async def _answer(self, prompt: Prompt, n: int, unit: int, outcome: UnitOutcome) -> None:
        """Answer all turns, one after the other; a failed turn rejects the later ones."""
        messages = [dict(message) for message in prompt.messages]
        for turn in range(prompt.num_turns):
            key = SampleKey(prompt.row, turn, n)
            if turn > 0:
                messages.append({"role": "user", "content": prompt.later_turns[turn - 1]})
            result = await self._sample(prompt, key, messages, unit, outcome)
            _record(result, outcome)
            if isinstance(result, Reject):
                detail = f"turn {turn} was rejected: {result.reason}"
                for later in range(turn + 1, prompt.num_turns):
                    later_key = key._replace(turn=later)
                    outcome.rejects.append(Reject(later_key, prompt.prompt_id, unit, "earlier_turn_rejected", detail))
                return
            messages = self._chat.append_answer(messages, result.text, result.reasoning_text)

    async def _sample(
        self, prompt: Prompt, key: SampleKey, messages: list[dict[str, Any]], unit: int, outcome: UnitOutcome
    ) -> Sample | Reject:
        """One generated answer."""
        try:
            prompt_ids = self._chat.prompt_ids(messages, max_tokens=self._max_prompt_tokens)
        except RowError as error:
            return Reject(key, prompt.prompt_id, unit, error.reason, error.detail)
        seed = sample_seed(self._spec.sampling.seed, key)
        answer: CompletionOutput
        started_at = finished_at = 0.0

        async def attempt() -> Receipt | CaptureFault:
            nonlocal answer, started_at, finished_at
            started_at = time.time()
            answer = await self._generate(key, prompt_ids, unit, seed)
            finished_at = time.time()
            return (await self._client.finish(unit, {key: [*prompt_ids, *answer.token_ids]}))[key]

        num_bytes = (len(prompt_ids) + self._spec.sampling.max_tokens) * self._spec.states.row_bytes
        receipt = await self._captured(key, num_bytes, attempt, outcome)
        if isinstance(receipt, CaptureFault):
            return _fault_reject(prompt, unit, receipt)
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
            replica=self._spec.name,
            started_at=started_at,
            finished_at=finished_at,
        )

    async def _extract(self, prompt: Prompt, key: SampleKey, unit: int, outcome: UnitOutcome) -> Sample | Reject:
        """The states of a conversation that already has its answers; nothing is generated."""
        try:
            answered = self._chat.answered(prompt.messages, max_tokens=self._info.max_model_len)
        except RowError as error:
            return Reject(key, prompt.prompt_id, unit, error.reason, error.detail)
        started_at = time.time()
        num_bytes = len(answered.token_ids) * self._spec.states.row_bytes
        receipt = await self._captured(
            key, num_bytes, lambda: self._client.extract(unit, key, answered.token_ids), outcome
        )
        if isinstance(receipt, CaptureFault):
            return _fault_reject(prompt, unit, receipt)
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
            replica=self._spec.name,
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
            receipt = await attempt()
        if isinstance(receipt, CaptureFault):
            outcome.num_capture_faults += 1
            async with self._gate.alone():
                receipt = await attempt()
        return receipt

    async def _generate(self, key: SampleKey, prompt_ids: list[int], unit: int, seed: int) -> CompletionOutput:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = self._spec.sampling
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            stop=list(sampling.stop),
            thinking_token_budget=sampling.thinking_token_budget,
            seed=seed,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_special_tokens=self._chat.skip_special_tokens,
        )
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


def _record(result: Sample | Reject, outcome: UnitOutcome) -> None:
    if isinstance(result, Sample):
        outcome.samples.append(result)
    else:
        outcome.rejects.append(result)


def _fault_reject(prompt: Prompt, unit: int, fault: CaptureFault) -> Reject:
    if fault.reason == DOES_NOT_FIT:
        return Reject(fault.key, prompt.prompt_id, unit, DOES_NOT_FIT, fault.detail)
    return Reject(fault.key, prompt.prompt_id, unit, "capture_fault", f"{fault.reason}: {fault.detail}")
