"""What an engine's death says about the prompts that were in it, and how a unit is done in which engines have died.

An engine's death is not a prompt's fault until it happens with that prompt alone in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from storage import SampleKey

# Rejects of prompts that an engine died of.
ENGINE_DIED = "engine_died"
OUT_OF_MEMORY = "out_of_memory"

# One of the answers to a prompt, with all its turns: (row, n).
Answer = tuple[int, int]


@dataclass(frozen=True)
class FatalTurn:
    """A turn of a prompt that an engine died of, alone in it: rejected in every answer to that prompt."""

    turn: int
    reason: str
    detail: str


@dataclass(frozen=True)
class Isolation:
    """How a unit is done in which engines have died (picklable)."""

    alone: frozenset[Answer] | None = frozenset()  # have the engine to themselves, one by one; None: all of the unit
    fatal: Mapping[int, FatalTurn] = field(default_factory=dict)  # by row

    @property
    def is_exclusive(self) -> bool:
        """Whether the replica must hold no other unit meanwhile."""
        return self.alone is None or bool(self.alone)

    def runs_alone(self, answer: Answer) -> bool:
        return self.alone is None or answer in self.alone


class EngineDiedError(RuntimeError):
    """The engine died during a unit; the cause is chained."""

    def __init__(self, suspects: tuple[SampleKey, ...], alone: bool) -> None:
        super().__init__(suspects, alone)
        self.suspects = suspects  # samples that were in the engine
        self.alone = alone  # whether the unit was at its answers that run alone


class EngineLostError(RuntimeError):
    """The engine of a replica is dead; the replica must be replaced."""

    def __init__(
        self, detail: str, out_of_memory: bool, suspects: tuple[SampleKey, ...] = (), alone: bool = False
    ) -> None:
        # All arguments go to the base class, so that the error survives pickling.
        super().__init__(detail, out_of_memory, suspects, alone)
        self.detail = detail
        self.out_of_memory = out_of_memory
        self.suspects = suspects  # as of EngineDiedError, of the unit whose call raises this
        self.alone = alone

    @property
    def culprit(self) -> SampleKey | None:
        """The sample that was alone in the engine when it died."""
        return self.suspects[0] if self.alone and len(self.suspects) == 1 else None

    def __str__(self) -> str:
        return f"{self.detail} (out of memory)" if self.out_of_memory else self.detail
