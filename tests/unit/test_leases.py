"""Leases: every unit ends exactly once, attempts are bounded, and the bound says why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen.isolation import EngineLostError
from ray_jobs.generate.deaths import Death, Deaths
from ray_jobs.generate.leases import Lease, Leases, UnitFailedError
from storage import SampleKey


def never(_unit: int) -> bool:
    return False


def test_units_are_given_out_in_order_with_their_attempt() -> None:
    leases = Leases([3, 1, 2], 2, never)
    assert leases.lease("a") == Lease(1, 0, "a")
    assert leases.lease("b") == Lease(2, 0, "b")
    leases.release(1, "replica lost")
    assert leases.lease("b") == Lease(1, 1, "b")
    assert leases.held_by("b") == [1, 2]
    assert leases.num_retries == 1


def test_a_unit_that_keeps_failing_stops_with_every_cause() -> None:
    leases = Leases([7], 2, never)
    leases.lease("a")
    leases.release(7, "disk full")
    leases.lease("b")
    with pytest.raises(UnitFailedError, match=r"unit 7 failed 2 times: attempt 1: disk full; attempt 2: out of memory"):
        leases.release(7, "out of memory")


def test_an_engines_death_is_not_counted_against_its_units() -> None:
    leases = Leases([7], 1, never)
    for attempt in range(5):
        assert leases.lease("a") == Lease(7, attempt, "a")
        leases.release(7, "engine died", counts=False)
    assert leases.num_retries == 5


def test_a_unit_that_must_be_alone_stays_so_whatever_it_is_released_for() -> None:
    deaths = Deaths(max_unit_deaths=1, max_prompt_deaths=1, max_fatal_prompts=8)
    leases = Leases([0, 1], 9, deaths.must_be_alone)
    leases.lease("a")
    deaths.died(0, Death(0, 0), EngineLostError("the engine died", False, (SampleKey(3, 0, 0),)))
    leases.release(0, "engine died", counts=False)
    for attempt in (1, 2):
        assert leases.lease("a") == Lease(0, attempt, "a")
        assert leases.lease("a") is None
        leases.release(0, "disk full")
    assert leases.lease("a") == Lease(0, 3, "a")
    assert leases.lease("b") == Lease(1, 0, "b")


@given(
    st.sets(st.integers(0, 30), min_size=1),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["finish", "lost", "exclusive"])), max_size=200),
)
def test_no_unit_is_lost_or_leased_twice(units: set[int], steps: list[tuple[str, str]]) -> None:
    exclusive: set[int] = set()
    leases = Leases(units, 1000, exclusive.__contains__)
    held: dict[int, str] = {}
    finished: list[int] = []
    for replica, end in steps:
        lease = leases.lease(replica)
        if lease is not None:
            assert lease.unit not in held
            assert lease.unit not in finished
            held[lease.unit] = replica
            mine = [unit for unit, holder in held.items() if holder == replica]
            assert len(mine) == 1 or not exclusive & set(mine)
        if held:
            unit = next(iter(held))
            del held[unit]
            exclusive.discard(unit)
            if end == "finish":
                leases.finish(unit)
                finished.append(unit)
            else:
                if end == "exclusive":
                    exclusive.add(unit)
                leases.release(unit, "lost")
    for unit in held:
        leases.finish(unit)
        finished.append(unit)
    while (lease := leases.lease("z")) is not None:
        leases.finish(lease.unit)
        finished.append(lease.unit)
    assert leases.is_done
    assert sorted(finished) == sorted(units)


def test_an_exclusive_unit_waits_for_one_replica_and_the_others_go_on() -> None:
    exclusive: set[int] = set()
    leases = Leases(range(8), 2, exclusive.__contains__)
    for replica in "aabb":
        leases.lease(replica)
    exclusive.add(0)
    leases.release(0, "engine died", counts=False)
    assert leases.lease("a") is None  # is being emptied
    assert leases.lease("b") == Lease(4, 0, "b")
    leases.finish(1)
    assert leases.lease("a") == Lease(0, 1, "a")
    assert leases.lease("a") is None
    leases.finish(0)
    assert leases.lease("a") == Lease(5, 0, "a")


def test_a_replica_that_is_lost_while_it_is_emptied_keeps_no_unit_waiting() -> None:
    exclusive: set[int] = set()
    leases = Leases(range(4), 2, exclusive.__contains__)
    for replica in "aab":
        leases.lease(replica)
    exclusive.add(0)
    leases.release(0, "engine died")
    assert leases.lease("a") is None
    leases.release(1, "node lost", counts=False)
    leases.finish(2)
    assert leases.lease("b") == Lease(0, 1, "b")
