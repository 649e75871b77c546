"""The Ray actor that holds one verifier replica."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from gen import memory
from gen.engine import EngineInfo
from gen.isolation import EngineDiedError, EngineLostError, Isolation
from gen.outcome import DOES_NOT_FIT, UnitOutcome
from gen.prompts import BadRow, Prompt
from gen.replica import Replica, ReplicaSpec
from storage import Dataset, ShardTarget, UnitFiles, Writer


class UnitError(RuntimeError):
    """A unit failed on a replica that lives on. Says what and why in one line; the replica's log has the traceback."""


class ReplicaActor:
    """One replica in its own process. Units run side by side; the driver decides which, and commits what comes back."""

    def __init__(self, spec: ReplicaSpec, dataset_uri: str, log_file: str) -> None:
        _redirect_output(Path(log_file))
        self._spec = spec
        self._log_file = Path(log_file)
        self._log_start = self._log_file.stat().st_size
        self._ran_out_of_memory: bool | None = None  # known once the engine is dead
        self._replica = Replica(spec)
        self._dataset = Dataset.open(dataset_uri)

    async def node(self) -> str:
        """Ray's id of the node that this actor was placed on."""
        return ray.get_runtime_context().get_node_id()

    async def start(self, index_on_node: int, num_on_node: int) -> EngineInfo:
        """Load the verifier. As Replica.start.

        Raises EngineLostError when the engine does not start, and ValueError when the configuration is wrong, so that
        it never will.
        """
        try:
            return await self._replica.start(index_on_node, num_on_node)
        except Exception as error:  # noqa: BLE001 - crosses to the driver as an error that Ray can pickle
            out_of_memory = self._died_of_memory()
            traceback.print_exc()
            if isinstance(error, ValueError):
                raise ValueError(str(error)) from None
            raise EngineLostError(f"the engine did not start: {describe_error(error)}", out_of_memory) from None

    async def run_unit(
        self,
        unit: int,
        attempt: int,
        rows: list[Prompt | BadRow],
        shard_options: dict[str, Any],
        isolation: Isolation,
    ) -> dict[str, Any]:
        """Answer one unit, write its files, and return what the driver needs to commit it.

        Returns a dictionary: `files` (the unit's files as JSON), `capture_faults` (by reason), and counts of samples,
        tokens and seconds.

        Raises EngineLostError when the engine died, else UnitError.
        """
        # A writer for each attempt: gc may fence one that has been quiet for long, and then only this attempt is lost.
        writer = self._dataset.writer()
        target: ShardTarget = writer.shard_target(unit, attempt, **shard_options)
        try:
            outcome = await self._replica.run_unit(rows, target, isolation)
            files = await asyncio.to_thread(self._write_unit, writer, unit, attempt, outcome)
        except Exception as error:  # noqa: BLE001 - crosses to the driver as an error that Ray can pickle
            out_of_memory = self._replica.is_dead and self._died_of_memory()
            traceback.print_exc()
            if isinstance(error, EngineDiedError):
                detail = f"the engine died: {describe_error(error.__cause__ or error)}"
                raise EngineLostError(detail, out_of_memory, error.suspects, error.alone) from None
            if self._replica.is_dead:
                raise EngineLostError(f"the engine died: {describe_error(error)}", out_of_memory) from None
            raise UnitError(describe_error(error)) from None
        return {
            "files": files.to_json(),
            "num_samples": len(outcome.samples),
            "num_rejects": len(outcome.rejects),
            "num_prompt_tokens": outcome.num_prompt_tokens,
            "num_output_tokens": outcome.num_output_tokens,
            "capture_faults": dict(outcome.capture_faults),
            "num_does_not_fit": sum(reject.reason == DOES_NOT_FIT for reject in outcome.rejects),
            "num_tightened": outcome.num_tightened,
            "seconds": outcome.seconds,
        }

    @staticmethod
    def _write_unit(writer: Writer, unit: int, attempt: int, outcome: UnitOutcome) -> UnitFiles:
        try:
            return writer.write_unit(unit, attempt, outcome.samples, outcome.rejects, outcome.shards)
        except OSError:
            # On a full disk the shards of every further try would lie there until gc comes. The first error is told.
            with suppress(OSError, ValueError):
                writer.discard(outcome.shards)
            raise

    def _died_of_memory(self) -> bool:
        """Looked up once, before the tracebacks of the engine's requests push what vLLM said out of the log's end."""
        if self._ran_out_of_memory is None:
            self._ran_out_of_memory = memory.died_of_memory(
                self._log_file, self._log_start, self._replica.oom_kills_before
            )
        return self._ran_out_of_memory

    async def stop(self) -> None:
        """End the engine's processes; the actor itself is ended by the driver."""
        self._replica.stop()


def describe_error(error: BaseException) -> str:
    """Type and last line of an error; of a group, those of its members, each once.

    Printed as it is, an exception group ends in a ruled line, and a capture error in the worker's traceback.
    """
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(dict.fromkeys(describe_error(member) for member in error.exceptions))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _redirect_output(log_file: Path) -> None:
    """Send this process's output, and that of the engine processes it starts, to a file."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
