"""Which prompt an engine died of: the bookkeeping of a driver, played against engines that die as prompts say."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen.isolation import EngineLostError, FatalTurn, Isolation
from ray_jobs.generate.deaths import Death, Deaths, FatalPromptsError
from storage import SampleKey

UNIT = 7
DEATHS = (Death(0, start) for start in itertools.count())


def lost(*suspects: SampleKey, alone: bool = False, out_of_memory: bool = False) -> EngineLostError:
    return EngineLostError("the engine died: EngineDeadError", out_of_memory, suspects, alone)


def key(row: int, turn: int = 0, n: int = 0) -> SampleKey:
    return SampleKey(row, turn, n)


def test_a_prompt_is_blamed_when_it_was_alone() -> None:
    deaths = Deaths(max_unit_deaths=2, max_prompt_deaths=1, max_fatal_prompts=8)
    assert deaths.isolation(UNIT) == Isolation()
    assert deaths.died(UNIT, Death(0, 0), lost(key(1), key(2), key(3))) is None
    assert not deaths.isolation(UNIT).is_exclusive
    assert deaths.died(UNIT, Death(1, 0), lost(key(2), key(3))) is None
    assert deaths.isolation(UNIT) == Isolation(frozenset({(2, 0), (3, 0)}))
    assert deaths.isolation(UNIT).is_exclusive
    verdict = deaths.died(UNIT, Death(0, 1), lost(key(3), alone=True))
    assert verdict is not None
    assert (verdict.row, verdict.deaths) == (3, {Death(0, 0), Death(1, 0), Death(0, 1)})
    assert verdict.fatal.reason == "engine_died"
    assert "turn 0 of row 3 alone in it, once: the engine died" in verdict.fatal.detail
    isolation = deaths.isolation(UNIT)
    assert not isolation.is_exclusive
    assert isolation.fatal == {3: verdict.fatal}
    assert deaths.isolation(UNIT + 1) == Isolation()


def test_a_prompt_that_does_not_fit_alone_is_said_to_be_out_of_memory() -> None:
    deaths = Deaths(1, 2, 8)
    assert deaths.died(UNIT, next(DEATHS), lost(key(1), key(2), out_of_memory=True)) is None
    assert deaths.died(UNIT, next(DEATHS), lost(key(2, turn=1, n=4), alone=True, out_of_memory=True)) is None
    assert deaths.isolation(UNIT).alone == frozenset({(2, 4)})  # it goes first, and the rest as before
    verdict = deaths.died(UNIT, next(DEATHS), lost(key(2, turn=1, n=4), alone=True, out_of_memory=True))
    assert verdict is not None
    assert verdict.fatal == FatalTurn(1, "out_of_memory", verdict.fatal.detail)
    assert "turn 1 of row 2 alone in it, 2 times: the engine died" in verdict.fatal.detail


def test_suspects_that_survive_alone_have_the_whole_unit_done_alone() -> None:
    deaths = Deaths(1, 1, 8)
    deaths.died(UNIT, next(DEATHS), lost(key(1)))
    assert deaths.isolation(UNIT).alone == frozenset({(1, 0)})
    deaths.died(UNIT, next(DEATHS), lost(key(4), key(5)))
    assert deaths.isolation(UNIT).alone is None
    assert deaths.isolation(UNIT).runs_alone((99, 0))


@pytest.mark.parametrize("alone", [False, True])
def test_a_death_with_nothing_in_the_engine_teaches_nothing(alone: bool) -> None:
    deaths = Deaths(1, 1, 8)
    assert deaths.died(UNIT, next(DEATHS), lost(alone=alone)) is None
    assert deaths.isolation(UNIT) == Isolation()


def test_prompts_that_kill_are_bounded() -> None:
    deaths = Deaths(1, 1, max_fatal_prompts=1)
    for row in (1, 2):
        deaths.died(UNIT, next(DEATHS), lost(key(row)))
        if row == 1:
            assert deaths.died(UNIT, next(DEATHS), lost(key(row), alone=True)) is not None
    with pytest.raises(FatalPromptsError, match=r"2 prompts killed their engines, 1 may be rejected .*row 2"):
        deaths.died(UNIT, next(DEATHS), lost(key(2), alone=True))


@given(
    num_rows=st.integers(1, 8),
    killers=st.sets(st.integers(0, 7)),
    width=st.integers(1, 4),
    bounds=st.tuples(st.integers(1, 3), st.integers(1, 2)),
)
def test_every_killer_is_found_and_nobody_else_is_rejected(
    num_rows: int, killers: set[int], width: int, bounds: tuple[int, int]
) -> None:
    """An engine takes `width` prompts at once and dies when a killer is among them."""
    killers = {row for row in killers if row < num_rows}
    deaths = Deaths(*bounds, max_fatal_prompts=8)
    explained: set[Death] = set()
    num_deaths = 0

    def attempt() -> EngineLostError | None:
        isolation = deaths.isolation(UNIT)
        rows = [row for row in range(num_rows) if row not in isolation.fatal]
        for row in rows:
            if isolation.runs_alone((row, 0)) and row in killers:
                return lost(key(row), alone=True)
        together = [row for row in rows if not isolation.runs_alone((row, 0))]
        for start in range(0, len(together), width):
            batch = together[start : start + width]
            if killers & set(batch):
                return lost(*map(key, batch))
        return None

    while (error := attempt()) is not None:
        num_deaths += 1
        assert num_deaths <= len(killers) * sum(bounds)
        verdict = deaths.died(UNIT, next(DEATHS), error)
        if verdict is not None:
            explained |= verdict.deaths
    assert set(deaths.isolation(UNIT).fatal) == killers
    assert len(explained) == num_deaths


def test_a_death_in_two_units_is_one_death() -> None:
    deaths = Deaths(2, 1, 8)
    for start in range(2):
        deaths.died(1, Death(0, start), lost(key(1)))
        deaths.died(2, Death(0, start), lost(key(2)))
    verdicts = [deaths.died(unit, Death(0, 1 + unit), lost(key(row), alone=True)) for unit, row in ((1, 1), (2, 2))]
    explained = frozenset[Death]().union(*(verdict.deaths for verdict in verdicts if verdict is not None))
    assert explained == {Death(0, start) for start in range(4)}
