"""One verifier replica: takes units of prompts, answers them, and returns samples whose states are in closed shards."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from gen import memory
from gen.admission import Admission
from gen.answerer import Answerer
from gen.calibrate import calibrate
from gen.capture.messages import CaptureError
from gen.config import CaptureConfig, ReplicasConfig, SamplingConfig, VerifierConfig
from gen.engine import (
    EngineInfo,
    check_mode,
    cpu_binding,
    describe_engine,
    engine_arguments,
    set_environment,
    start_engine,
    supported_mode,
)
from gen.isolation import EngineDiedError, Isolation
from gen.outcome import UnitOutcome
from gen.prompts import BadRow, Prompt
from storage import ShardTarget, StateSpec

if TYPE_CHECKING:
    from gen.capture.client import CaptureClient
    from gen.capture.config import CaptureMode

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
    cores: int | None  # of each TP rank; None on GPUs


class Replica:
    """A vLLM engine with capture. `start` once, then `run_unit` for as many units as wanted, several at a time."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._watch: asyncio.Task[None] | None = None
        self._started = False
        self._num_tightened = 0  # as told by the outcomes of units so far
        self._num_units = 0  # that are being done
        self._exclusive = False  # whether one of them must be alone
        self._oom_kills = deque([memory.count_oom_kills()], OOM_READINGS)  # latest readings, oldest first

    async def start(self, index_on_node: int = 0, num_on_node: int = 1) -> EngineInfo:
        """Load the verifier. Blocks the event loop for as long as that takes.

        Several replicas of a node have its cores by their index and share its memory.
        """
        assert not self._started
        spec = self._spec
        replicas = spec.replicas
        binding = None
        if spec.cores is not None:
            binding = cpu_binding(index_on_node, replicas.tensor_parallel_size, spec.cores)
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
        self._client: CaptureClient = CaptureClient(self._engine, spec.states, mode)
        budget = spec.capture.host_memory_gib
        self._admission = Admission(
            memory.total_bytes() // 2 // num_on_node if budget is None else int(budget * 2**30),
            # The scheduler keeps a queue of its own; one engine's worth of requests waiting there is enough.
            2 * spec.replicas.max_num_seqs,
        )
        self._answerer = Answerer(
            spec.name,
            self._engine,
            self._client,
            ChatTokenizer.from_config(spec.verifier, directory, engine=self._engine),
            self._admission,
            spec.sampling,
            spec.states,
            self._info.max_model_len,
        )
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
            await self._while_alive(self._answerer.answer_unit(rows, target, isolation, outcome), watched=True)
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

    async def _while_alive(self, work: Coroutine[Any, Any, T], *, watched: bool = False) -> T:
        """The result of `work`, which is given up when the engine dies.

        vLLM fails the requests of an engine that dies, but never answers the calls (`collective_rpc`) that were under
        way: whoever waits for one would wait for ever.

        Raises CaptureError when the engine is dead; with `watched` also what ended the watch of the node's memory.
        """
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=DEATH_INTERVAL_S)
                if task.done():
                    break
                if self.is_dead:
                    raise CaptureError("the engine died while a call to it was under way")
                if watched and self._watch is not None and self._watch.done():
                    watch, self._watch = self._watch, None  # the next unit is watched again
                    watch.result()
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
