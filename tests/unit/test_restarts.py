"""Restarts of replicas: deaths count until they are explained, each once."""

from __future__ import annotations

from ray_jobs.generate.deaths import Death
from ray_jobs.generate.restarts import Restarts


def test_deaths_are_named_and_bounded_for_each_replica() -> None:
    restarts = Restarts(max_restarts=1)
    assert [restarts.start(0), restarts.start(1), restarts.start(0)] == [Death(0, 0), Death(1, 0), Death(0, 1)]
    assert restarts.allow(0, excused=False)
    assert not restarts.allow(0, excused=False)
    assert restarts.allow(1, excused=False)


def test_an_excused_death_does_not_count() -> None:
    restarts = Restarts(max_restarts=0)
    assert restarts.allow(0, excused=True)
    assert not restarts.allow(0, excused=False)


def test_a_death_that_two_units_explain_gives_one_restart_back() -> None:
    restarts = Restarts(max_restarts=1)
    deaths = frozenset({restarts.start(0)})
    assert restarts.allow(0, excused=False)
    restarts.explain(deaths)
    restarts.explain(deaths)
    assert restarts.allow(0, excused=False)
    assert not restarts.allow(0, excused=False)
