"""What a replica does when its engine dies, and how its errors reach the driver; no engine is needed for either."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gen.capture.messages import CaptureError
from gen.config import CaptureConfig, ReplicasConfig, SamplingConfig, VerifierConfig
from gen.isolation import Isolation
from gen.prompts import Reason, RowError
from gen.replica import Replica, ReplicaSpec
from ray_jobs.generate.actor import UnitError, describe_error
from ray_jobs.generate.deaths import Death
from ray_jobs.generate.driver import _Replica
from storage import ShardTarget, StateSpec


@dataclass
class Engine:
    """As much of vLLM's AsyncLLM as says whether it lives."""

    errored: bool = False


def started(engine: Engine) -> Replica:
    spec = ReplicaSpec(
        name="replica-0",
        verifier=VerifierConfig(model="model"),
        sampling=SamplingConfig(max_tokens=8),
        capture=CaptureConfig(),
        replicas=ReplicasConfig(),
        states=StateSpec((1, 2), 8),
        codec="none",
        cores=1,
    )
    replica = Replica(spec)
    vars(replica).update(_engine=engine, _started=True)
    return replica


def test_a_call_that_a_dead_engine_never_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gen.replica.DEATH_INTERVAL_S", 0.01)

    async def scenario() -> None:
        engine = Engine()
        replica = started(engine)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def call() -> int:
            return await answer

        waiting = asyncio.create_task(replica._while_alive(call()))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        engine.errored = True
        with pytest.raises(CaptureError, match="engine died"):
            async with asyncio.timeout(5):
                await waiting
        await asyncio.sleep(0)
        assert answer.cancelled()

    asyncio.run(scenario())


def test_what_an_engine_did_answer_is_kept_whatever_became_of_it() -> None:
    async def call() -> str:
        return "answer"

    async def failing() -> Any:
        raise OSError("disk full")

    replica = started(Engine(errored=True))
    assert asyncio.run(replica._while_alive(call())) == "answer"
    with pytest.raises(OSError, match="disk full"):
        asyncio.run(replica._while_alive(failing()))


def test_a_watch_of_memory_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gen.replica.DEATH_INTERVAL_S", 0.01)
    monkeypatch.setattr("gen.replica.MEMORY_INTERVAL_S", 0.01)
    monkeypatch.setattr("gen.memory.MEMINFO", Path("/nowhere/meminfo"))

    async def scenario() -> None:
        replica = started(Engine())
        vars(replica)["_watch"] = asyncio.create_task(replica._watch_memory())
        with pytest.raises(FileNotFoundError, match="meminfo"):
            async with asyncio.timeout(5):
                await replica._while_alive(asyncio.sleep(60), watched=True)
        assert replica._watch is None  # the next unit starts another

    asyncio.run(scenario())


def test_a_unit_that_searches_for_a_killer_is_never_beside_another() -> None:
    async def scenario() -> None:
        replica = started(Engine())
        vars(replica)["_num_units"] = 1
        with pytest.raises(AssertionError):
            await replica.run_unit([], ShardTarget("/nowhere", "w", 0, 0, StateSpec((1, 2), 8)), Isolation(None))

    asyncio.run(scenario())


def test_an_error_is_told_by_its_cause_and_not_by_the_frame_around_it() -> None:
    first, second = ValueError("no room"), CaptureError("unit 3: finish failed:\nTraceback ...\nOSError: disk full\n")
    group = ExceptionGroup("unhandled errors in a TaskGroup", [first, first, ExceptionGroup("inner", [second])])
    assert describe_error(group) == "ValueError: no room; CaptureError: OSError: disk full"
    assert describe_error(KeyError()) == "KeyError"


@pytest.mark.parametrize("error", [RowError(Reason.TOO_LONG, "9 tokens"), UnitError("ValueError: no room")])
def test_errors_survive_the_way_to_another_process(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - as Ray does
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_death_costs_the_start_and_the_work_since_the_last_unit() -> None:
    waiting = _Replica(0, "replica-0", Death(0, 0), None, started=100.0, token_budget=None)
    assert waiting.lost_s(130.0) == 0.0
    loading = _Replica(0, "replica-0", Death(0, 0), None, 90.0, None, placed=100.0)
    assert loading.lost_s(130.0) == 30.0
    info: Any = object()
    working = _Replica(
        0, "replica-0", Death(0, 0), None, 90.0, None, placed=100.0, info=info, loaded=130.0, last_result=500.0
    )
    assert working.lost_s(510.0) == 40.0
