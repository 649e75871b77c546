"""The gate: many together or one alone."""

from __future__ import annotations

import asyncio

from gen.gate import Gate, Turns


def test_alone_means_alone_and_is_not_starved() -> None:
    async def scenario() -> list[str]:
        gate = Gate()
        inside: set[str] = set()
        seen: list[str] = []

        async def shared(name: str) -> None:
            async with gate.shared():
                assert not any(other.startswith("alone") for other in inside)
                inside.add(name)
                seen.append(name)
                await asyncio.sleep(0.001)
                inside.remove(name)

        async def alone(name: str) -> None:
            async with gate.alone():
                assert not inside
                inside.add(name)
                seen.append(name)
                await asyncio.sleep(0.001)
                inside.remove(name)

        async with asyncio.TaskGroup() as group:
            for index in range(4):
                group.create_task(shared(f"early{index}"))
            group.create_task(alone("alone0"))
            group.create_task(alone("alone1"))
            await asyncio.sleep(0)
            for index in range(4):
                group.create_task(shared(f"late{index}"))
        return seen

    seen = asyncio.run(scenario())
    assert sorted(seen[:4]) == [f"early{i}" for i in range(4)]
    assert seen[4] == "alone0"
    assert set(seen) == {*(f"early{i}" for i in range(4)), "alone0", "alone1", *(f"late{i}" for i in range(4))}


def test_a_cancelled_wait_for_solitude_opens_the_gate_again() -> None:
    async def scenario() -> str:
        gate = Gate()
        release = asyncio.Event()

        async def hold() -> None:
            async with gate.shared():
                await release.wait()

        async def alone() -> None:
            async with gate.alone():
                raise AssertionError("the holder never left")

        holder = asyncio.create_task(hold())
        await asyncio.sleep(0)
        waiting = asyncio.create_task(alone())
        await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(1), gate.shared():
            release.set()
            await holder
            return "passed"

    assert asyncio.run(scenario()) == "passed"


def test_an_error_inside_gives_the_gate_back() -> None:
    async def scenario() -> None:
        gate = Gate()
        for passage in (gate.shared, gate.alone):
            try:
                async with passage():
                    raise RuntimeError("engine died")
            except RuntimeError:
                pass
        async with asyncio.timeout(1), gate.alone():
            pass

    asyncio.run(scenario())


def test_the_event_loop_goes_on_between_two_prompts() -> None:
    """Thousands of prompts of one unit must not hold up the engine's answers: others get a turn after each."""
    order: list[str] = []

    async def scenario() -> None:
        turns = Turns()

        async def prompt(name: str) -> None:
            await turns.take(lambda: order.append(name))

        async def others() -> None:
            while order.count("other") < 3:
                order.append("other")
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(prompt(name))
            group.create_task(others())

    asyncio.run(scenario())
    assert [name for name in order if name != "other"] == ["a", "b", "c"]
    for first, second in ("ab", "bc"):
        assert "other" in order[order.index(first) : order.index(second)]
