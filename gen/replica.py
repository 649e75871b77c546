"""One verifier replica: takes units of prompts, answers them, and returns samples whose states are in closed shards."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gen import memory
from gen.admission import Admission
from gen.calibrate import calibrate
from gen.capture.messages import CaptureError, CaptureFault
from gen.config import CaptureConfig, ReplicasConfig, SamplingConfig, VerifierConfig
from gen.engine import (
    EngineInfo,
    check_mode,
    cpu_bindings,
    describe_engine,
    engine_arguments,
    set_environment,
    start_engine,
    supported_mode,
)
from gen.gate import Gate
from gen.isolation import EngineDiedError, FatalTurn, Isolation
from gen.outcome import DOES_NOT_FIT, UnitOutcome, fault_reject
from gen.prompts import BadRow, Prompt, RowError
from gen.requests import FINISHED, sample_seed, sampling_params
from storage import Receipt, Reject, Sample, SampleKey, ShardTarget, StateSpec

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

    from gen.capture.client import CaptureClient
    from gen.capture.config import CaptureMode
    from gen.chat import ChatTokenizer

# Available host memory below which fewer requests are admitted, as a share of the node's, and how often it is read.
SHORT_OF_MEMORY = 0.05
MEMORY_INTERVAL_S = 1.0
# An engine that dies of memory is killed at most so many readings before its death is seen.
OOM_READINGS = 30
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
    on_gpu: bool = False
    num_on_node: int = 1  # replicas that share this node's memory and cores
    index_on_node: int = 0  # among those


class Replica:
    """A vLLM engine with capture. `start` once, then `run_unit` for as many units as wanted, several at a time."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._gate = Gate()
        self._watch: asyncio.Task[None] | None = None
        self._started = False
        self._num_tightened = 0  # as told by the outcomes of units so far
        self._tokenising = asyncio.Lock()
        self._num_units = 0  # that are being done
        self._exclusive = False  # whether one of them must be alone
        self._oom_kills = deque([memory.count_oom_kills()], OOM_READINGS)  # latest readings, oldest first

    async def start(self) -> EngineInfo:
        """Load the verifier. Blocks the event loop for as long as that takes."""
        assert not self._started
        spec = self._spec
        replicas = spec.replicas
        binding = None
        if not spec.on_gpu:
            bindings = cpu_bindings(spec.num_on_node, replicas.tensor_parallel_size, replicas.cores)
            binding = bindings[spec.index_on_node]
        set_environment(replicas, binding)
        from gen.capture.client import CaptureClient
        from gen.chat import ChatTokenizer

        directory = spec.verifier.directory()
        configured = spec.capture.mode

        def arguments(mode: CaptureMode) -> dict[str, Any]:
            return engine_arguments(
                directory, spec.verifier, spec.replicas, spec.states, mode, spec.capture.prefix_arena_gib
            )

        if configured == "auto":
            mode = supported_mode(arguments("one_pass"))
        else:
            mode = configured
            check_mode(arguments(mode))
        self._engine = start_engine(arguments(mode))
        self._started = True
        await self._while_alive(CaptureClient(self._engine, spec.states, mode).check())
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

    @property
    def oom_kills_before(self) -> int:
        """The kernel's count of out-of-memory kills half a minute ago, or before the start."""
        return self._oom_kills[0]

    def stop(self) -> None:
        """End the engine and its worker processes."""
        if self._started:
            if self._watch is not None:
                self._watch.cancel()
            self._engine.shutdown()
            self._started = False

    async def run_unit(
        self, rows: Sequence[Prompt | BadRow], target: ShardTarget, isolation: Isolation | None = None
    ) -> UnitOutcome:
        """Answer every prompt of a unit and capture its states.

        Every expected key of the unit ends as a sample or a reject. When anything else goes wrong (a dead engine, a
        full disk) the unit's shards are abandoned and the error is raised: a unit is whole or not there.

        Raises EngineDiedError when the engine died, with the samples that were in it.
        """
        started = time.monotonic()
        isolation = isolation or Isolation()
        outcome = UnitOutcome(target.unit)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_memory())
        # Beside another unit a prompt that runs alone would be blamed for what that one's do.
        assert not self._num_units or not (isolation.is_exclusive or self._exclusive)
        self._num_units += 1
        self._exclusive = isolation.is_exclusive
        try:
            await self._while_alive(self._fill(rows, target, isolation, outcome))
        except BaseException as error:
            # With a dead engine there is nobody to abort; what it wrote are orphans that no reader trusts.
            with suppress(CaptureError):
                await self._while_alive(self._client.abort_unit(target.unit))
            if isinstance(error, Exception) and self.is_dead:
                raise EngineDiedError(tuple(sorted(outcome.in_engine)), outcome.alone) from error
            raise
        finally:
            self._num_units -= 1
            self._exclusive = False
        outcome.sort()
        # Units run side by side: each shortage is told once, by the unit that ends next.
        outcome.num_tightened = self._admission.num_tightened - self._num_tightened
        self._num_tightened = self._admission.num_tightened
        outcome.seconds = time.monotonic() - started
        return outcome

    async def _fill(
        self, rows: Sequence[Prompt | BadRow], target: ShardTarget, isolation: Isolation, outcome: UnitOutcome
    ) -> None:
        """Open the unit, do every row, close the unit."""
        await self._client.open_unit(target)
        alone: list[tuple[Prompt, int]] = []
        together: list[tuple[Prompt, int]] = []
        for row in rows:
            for n in range(self._spec.sampling.n):
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

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is given up when the engine dies.

        vLLM fails the requests of an engine that dies, but never answers the calls (`collective_rpc`) that were under
        way: whoever waits for one would wait for ever.

        Raises CaptureError when the engine is dead, and what the watch of its memory raised.
        """
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=DEATH_INTERVAL_S)
                if not task.done() and self.is_dead:
                    raise CaptureError("the engine died while a call to it was under way")
                if self._watch is not None and self._watch.done() and not self.is_dead:
                    self._watch.result()
            return task.result()
        finally:
            task.cancel()

    async def _watch_memory(self) -> None:
        """Admit fewer requests while the node is short of host memory: cheaper than an engine that is killed."""
        floor = SHORT_OF_MEMORY * memory.total_bytes()
        while not self.is_dead:
            await asyncio.sleep(MEMORY_INTERVAL_S)
            if memory.available_bytes() < floor:
                self._admission.tighten()
            self._oom_kills.append(memory.count_oom_kills())

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

    async def _in_turn(self, tokenise: Callable[[], T]) -> T:
        """Tokenise one prompt, then let the event loop go on: a unit may have thousands, and the engine's answers and
        other units wait for the loop."""
        async with self._tokenising:
            result = tokenise()
            await asyncio.sleep(0)
            return result

    async def _sample(
        self, prompt: Prompt, key: SampleKey, messages: list[dict[str, Any]], outcome: UnitOutcome
    ) -> Sample | Reject:
        """One generated answer."""
        unit = outcome.unit
        try:
            prompt_ids = await self._in_turn(
                lambda: self._chat.prompt_ids(messages, max_tokens=self._max_prompt_tokens)
            )
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
            replica=self._spec.name,
            started_at=started_at,
            finished_at=finished_at,
        )

    async def _extract(self, prompt: Prompt, key: SampleKey, outcome: UnitOutcome) -> Sample | Reject:
        """The states of a conversation that already has its answers; nothing is generated."""
        unit = outcome.unit
        try:
            answered = await self._in_turn(
                lambda: self._chat.answered(prompt.messages, max_tokens=self._info.max_model_len)
            )
        except RowError as error:
            return Reject(key, prompt.prompt_id, unit, error.reason, error.detail)
        started_at = time.time()
        num_bytes = len(answered.token_ids) * self._spec.states.row_bytes
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
        params = sampling_params(self._spec.sampling, seed, skip_special_tokens=self._chat.skip_special_tokens)
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
