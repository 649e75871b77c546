"""Which prompt engines die of: found by running suspects alone, within bounds.

A unit in which engines have died more than once by chance is done with its suspects alone in the engine, one after the
other, and then the rest together; when an engine dies of the rest, all of it runs alone. An engine that dies with one
prompt alone in it has died of that prompt, which is rejected; the rest of its unit is kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from gen.isolation import ENGINE_DIED, OUT_OF_MEMORY, Answer, EngineLostError, FatalTurn, Isolation
from ray_jobs.errors import JobError


class FatalPromptsError(JobError):
    """More prompts killed their engines than the job may reject for it."""


class Death(NamedTuple):
    """The death of one engine: of a replica that was started so many times before."""

    replica: int
    start: int


@dataclass(frozen=True)
class Verdict:
    """A prompt is rejected for killing engines."""

    row: int
    fatal: FatalTurn
    deaths: frozenset[Death]  # that it explains


@dataclass
class _History:
    """What engines' deaths have taught about one unit."""

    deaths: set[Death] = field(default_factory=set)  # since the last verdict
    alone_deaths: Counter[tuple[int, int]] = field(default_factory=Counter)  # by (row, turn)
    alone: frozenset[Answer] | None = frozenset()
    fatal: dict[int, FatalTurn] = field(default_factory=dict)


class Deaths:
    """The deaths of engines in the units of one job."""

    def __init__(self, max_unit_deaths: int, max_prompt_deaths: int, max_fatal_prompts: int) -> None:
        self._max_unit_deaths = max_unit_deaths
        self._max_prompt_deaths = max_prompt_deaths
        self._max_fatal_prompts = max_fatal_prompts
        self._units: dict[int, _History] = {}
        self.num_fatal_prompts = 0

    def isolation(self, unit: int) -> Isolation:
        """How the unit is to be done now."""
        history = self._units.get(unit)
        return Isolation() if history is None else Isolation(history.alone, dict(history.fatal))

    def must_be_alone(self, unit: int) -> bool:
        """Whether the unit's replica must hold no other."""
        return unit in self._units and self.isolation(unit).is_exclusive

    def died(self, unit: int, death: Death, error: EngineLostError) -> Verdict | None:
        """An engine died with this unit in it. Returns a verdict when this tells which prompt did it.

        Raises FatalPromptsError when that makes more prompts than may be rejected.
        """
        if not error.suspects:
            return None  # between two answers, or before or after all of them: nothing is learnt about the unit
        history = self._units.setdefault(unit, _History())
        history.deaths.add(death)
        culprit = error.culprit
        if culprit is not None:
            history.alone_deaths[culprit.row, culprit.turn] += 1
            count = history.alone_deaths[culprit.row, culprit.turn]
            if count >= self._max_prompt_deaths:
                reason = OUT_OF_MEMORY if error.out_of_memory else ENGINE_DIED
                times = "once" if count == 1 else f"{count} times"
                detail = f"with turn {culprit.turn} of row {culprit.row} alone in it, {times}: {error}"
                return self._convict(history, culprit.row, FatalTurn(culprit.turn, reason, detail))
            history.alone = frozenset({(culprit.row, culprit.n)})
        elif history.alone:
            history.alone = None  # the suspects survived alone, and the rest did not survive together
        elif len(history.deaths) >= self._max_unit_deaths:
            history.alone = frozenset((key.row, key.n) for key in error.suspects)
        return None

    def _convict(self, history: _History, row: int, fatal: FatalTurn) -> Verdict:
        verdict = Verdict(row, fatal, frozenset(history.deaths))
        history.fatal[row] = fatal
        history.deaths.clear()
        history.alone_deaths.clear()
        history.alone = frozenset()
        self.num_fatal_prompts += 1
        if self.num_fatal_prompts > self._max_fatal_prompts:
            raise FatalPromptsError(
                f"{self.num_fatal_prompts} prompts killed their engines, {self._max_fatal_prompts} may be rejected for "
                f"it (replicas.max_fatal_prompts); the last one: {fatal.detail}"
            )
        return verdict
