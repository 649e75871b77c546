"""Admission: never over the budget or the limit, fewer requests after a shortage, recovery, nobody starved."""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gen.admission import RECOVERY_REQUESTS, Admission


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 8), st.integers(100, 200))
def test_budget_and_limit_hold_and_everybody_gets_in(sizes: list[int], limit: int, budget: int) -> None:
    admission = Admission(budget, limit)
    inside: list[int] = []
    served: list[int] = []

    async def request(nbytes: int) -> None:
        async with admission.admit(nbytes):
            inside.append(nbytes)
            assert len(inside) <= limit
            assert sum(inside) <= budget
            await asyncio.sleep(0)
            inside.remove(nbytes)
            served.append(nbytes)

    async def scenario() -> None:
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            for nbytes in sizes:
                group.create_task(request(nbytes))

    asyncio.run(scenario())
    assert sorted(served) == sorted(sizes)


def test_a_shortage_halves_what_is_inside_and_waits_for_the_effect() -> None:
    async def scenario() -> list[int]:
        admission = Admission(1000, 64)
        assert not admission.tighten()  # nothing is inside: nothing to give up
        limits = []
        leave = [asyncio.Event() for _ in range(8)]

        async def request(number: int) -> None:
            async with admission.admit(1):
                await leave[number].wait()

        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(request(number))
            await asyncio.sleep(0)
            for number in range(8):
                while admission.tighten():
                    limits.append(admission.limit)
                leave[number].set()
                await asyncio.sleep(0.001)
        assert admission.num_tightened == len(limits)
        return limits

    # Eight are inside of 64 that might be: halving the limit alone would change nothing.
    assert asyncio.run(scenario()) == [4, 2, 1]


def test_admission_recovers_one_by_one() -> None:
    async def scenario() -> list[int]:
        admission = Admission(1000, 4)
        async with admission.admit(1), admission.admit(1):
            admission.tighten()
        limits = []
        for _ in range(3 * RECOVERY_REQUESTS):
            async with admission.admit(1):
                limits.append(admission.limit)
        return limits

    limits = asyncio.run(scenario())
    assert limits[0] == 1
    assert limits[-1] >= 3
    assert all(0 <= later - earlier <= 1 for earlier, later in itertools.pairwise(limits))


def test_what_can_never_fit_is_known_before_it_waits() -> None:
    admission = Admission(100, 4)
    assert admission.fits(100)
    assert not admission.fits(101)
