"""Leases: every unit ends exactly once, attempts are bounded, and the bound says why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_jobs.generate.leases import Lease, Leases, UnitFailedError


def test_units_are_given_out_in_order_with_their_attempt() -> None:
    leases = Leases([3, 1, 2], max_attempts=2)
    assert leases.lease("a") == Lease(1, 0, "a")
    assert leases.lease("b") == Lease(2, 0, "b")
    leases.release(1, "replica lost")
    assert leases.lease("b") == Lease(1, 1, "b")
    assert leases.held_by("b") == [1, 2]
    assert leases.num_retries == 1


def test_a_unit_that_keeps_failing_stops_with_every_cause() -> None:
    leases = Leases([7], max_attempts=2)
    leases.lease("a")
    leases.release(7, "disk full")
    leases.lease("b")
    with pytest.raises(UnitFailedError, match=r"unit 7 failed 2 times: attempt 1: disk full; attempt 2: out of memory"):
        leases.release(7, "out of memory")


def test_an_engines_death_is_not_counted_against_its_units() -> None:
    leases = Leases([7], max_attempts=1)
    for attempt in range(5):
        assert leases.lease("a") == Lease(7, attempt, "a")
        leases.release(7, "engine died", counts=False)
    assert leases.num_retries == 5


def test_a_unit_that_must_be_alone_stays_so_while_its_releases_say_it() -> None:
    leases = Leases([0, 1], max_attempts=9)
    leases.lease("a")
    leases.release(0, "engine died", counts=False, exclusive=True)
    assert leases.lease("a") == Lease(0, 1, "a")
    assert leases.lease("a") is None
    leases.release(0, "disk full", exclusive=True)
    assert leases.lease("a") == Lease(0, 2, "a")
    assert leases.lease("a") is None
    assert leases.lease("b") == Lease(1, 0, "b")


@given(
    st.sets(st.integers(0, 30), min_size=1),
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["finish", "lost", "exclusive"])), max_size=200),
)
def test_no_unit_is_lost_or_leased_twice(units: set[int], steps: list[tuple[str, str]]) -> None:
    leases = Leases(units, max_attempts=1000)
    held: dict[int, str] = {}
    finished: list[int] = []
    exclusive: set[int] = set()
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
                leases.release(unit, "lost", exclusive=end == "exclusive")
                exclusive |= {unit} if end == "exclusive" else set()
    for unit in held:
        leases.finish(unit)
        finished.append(unit)
    while (lease := leases.lease("z")) is not None:
        leases.finish(lease.unit)
        finished.append(lease.unit)
    assert leases.is_done
    assert sorted(finished) == sorted(units)


def test_an_exclusive_unit_waits_for_one_replica_and_the_others_go_on() -> None:
    leases = Leases(range(8), max_attempts=2)
    for replica in "aabb":
        leases.lease(replica)
    leases.release(0, "engine died", counts=False, exclusive=True)
    assert leases.lease("a") is None  # is being emptied
    assert leases.lease("b") == Lease(4, 0, "b")
    leases.finish(1)
    assert leases.lease("a") == Lease(0, 1, "a")
    assert leases.lease("a") is None
    leases.finish(0)
    assert leases.lease("a") == Lease(5, 0, "a")


def test_a_replica_that_is_lost_while_it_is_emptied_keeps_no_unit_waiting() -> None:
    leases = Leases(range(4), max_attempts=2)
    for replica in "aab":
        leases.lease(replica)
    leases.release(0, "engine died", exclusive=True)
    assert leases.lease("a") is None
    leases.release(1, "node lost", counts=False)
    leases.finish(2)
    assert leases.lease("b") == Lease(0, 1, "b")
