"""The capture service of a worker process: rows in from the model runner, commands in from the client, shards out."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from gen.capture.config import CaptureOptions
from gen.capture.messages import (
    decode_target,
    encode_files,
    encode_receipt,
    token_digest,
)
from gen.capture.rows import RequestRows, RowStore
from gen.capture.shard_thread import ShardThread
from gen.capture.transfer import RowSource, RowTransfer
from storage.shards.check import find_bad_rows
from storage.types import SampleKey

# The stock method hands a finished request over with the next engine step; much later means never.
HANDOVER_LIMIT_S = 60.0


@dataclass
class _Waiting:
    """A finish command whose rows the engine has not handed over yet (stock mode)."""

    command: Mapping[str, Any]
    since: float


class CaptureService:
    """Lives in the TP-rank-0 worker. Steps and commands come from the engine's thread, shard writing has its own."""

    def __init__(self, options: CaptureOptions, device: torch.device) -> None:
        self.options = options
        self.store = RowStore(options.spec)
        self.transfer = RowTransfer(
            options.spec, device, piece_bytes=options.piece_bytes, num_pieces=options.num_pieces
        )
        self._shards = ShardThread(options.queue_bytes)
        self._jobs: dict[int, Future[dict[str, Any]]] = {}
        self._handover: list[_Waiting] = []
        self._failed_units: dict[int, str] = {}
        self._stats = {"samples": 0, "rows": 0, "faults": 0, "waited_ms": 0}

    # Rows

    def take_step(self, source: RowSource, step: list[tuple[str, int, int]]) -> None:
        """Take one step's rows: `step` lists (request id, first position, count) in the order of the rows."""
        self.transfer.submit(source, self.store.spans(step))

    def take_request(self, request_id: str, unit: int, key: SampleKey, source: RowSource, num_rows: int) -> None:
        """Take all rows of a request that has left the engine."""
        self.store.begin(request_id, unit, key, num_rows)
        self.take_step(source, [(request_id, 0, num_rows)])
        self.store.end(request_id)

    def preempted(self, request_id: str) -> None:
        rows = self.store.running(request_id)
        if rows is not None:
            self.transfer.then(rows.reset)

    def wait_for_room(self) -> None:
        """Hold the engine while the shard writer is behind."""
        started = time.monotonic()
        self._shards.wait_for_room()
        self._stats["waited_ms"] += round(1000 * (time.monotonic() - started))

    # Commands

    def exchange(self, commands: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Take commands in, give the answers out that are ready. Never raises: in a tensor-parallel group an exception
        of one rank leaves the other ranks' answers in their queues, for the next call to find. Errors are answers."""
        answers = []
        for command in commands:
            try:
                answers += self._take_command(command)
            except Exception:  # noqa: BLE001 - crosses the process boundary as an answer, see above
                answers.append({"ticket": command["ticket"], "error": traceback.format_exc()})
        self._retry_handovers()
        for ticket, job in list(self._jobs.items()):
            if job.done():
                answers.append(self._answer(ticket, self._jobs.pop(ticket)))
        return answers

    @staticmethod
    def _answer(ticket: int, job: Future[dict[str, Any]]) -> dict[str, Any]:
        error = job.exception()
        if error is not None:
            return {"ticket": ticket, "error": "".join(traceback.format_exception(error))}
        return {"ticket": ticket, **job.result()}

    def _take_command(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Do a command or start its job. Returns its answer when there is one already."""
        ticket, unit = command["ticket"], command["unit"]
        done = [{"ticket": ticket}]
        match command["op"]:
            case "open":
                if self.store.has_unit(unit):
                    raise ValueError(f"unit {unit} is open already")
                self._failed_units.pop(unit, None)
                self.store.open_unit(unit)
                self._jobs[ticket] = self._shards.submit(0, self._open, decode_target(command["target"]))
            case "finish":
                self._check_unit(unit)
                if not self._finish(command):
                    self._handover.append(_Waiting(command, time.monotonic()))
            case "discard":
                for key in command["keys"]:
                    self.store.discard(unit, SampleKey(*key))
                return done
            case "close":
                self._check_unit(unit)
                self.store.drop_unit(unit)
                self._jobs[ticket] = self._shards.submit(0, self._close, unit)
            case "abort":
                self.store.drop_unit(unit)
                self._jobs[ticket] = self._shards.submit(0, self._abort, unit)
            case "stats":
                held = {"held_rows": self.store.num_rows(), "queued_bytes": self._shards.queued_bytes}
                return [{"ticket": ticket, "stats": {**self._stats, **held}}]
            case op:
                raise ValueError(f"unknown capture command {op!r}")
        return []

    def _check_unit(self, unit: int) -> None:
        if not self.store.has_unit(unit):
            raise ValueError(f"unit {unit} is not open")

    # Jobs of the shard thread

    def _open(self, target: Any) -> dict[str, Any]:
        self._shards.open(target)
        return {}

    def _close(self, unit: int) -> dict[str, Any]:
        if unit in self._failed_units:
            raise RuntimeError(f"unit {unit} has failed: {self._failed_units[unit]}")
        return {"files": encode_files(self._shards.close(unit))}

    def _abort(self, unit: int) -> dict[str, Any]:
        self._shards.abort(unit)
        return {}

    def _finish(self, command: Mapping[str, Any]) -> bool:
        """Start the job of a finish command; False when the request's rows have not been handed over yet."""
        unit, key = command["unit"], SampleKey(*command["key"])
        fence = self.transfer.fence()
        rows = self.store.take(unit, key) if self.store.has_unit(unit) else None
        if rows is None and self.options.mode == "stock":
            return False
        nbytes = rows.num_rows * self.options.spec.row_bytes if rows is not None else 0
        self._jobs[command["ticket"]] = self._shards.submit(
            nbytes, self._store_sample, unit, key, rows, command["num_tokens"], command["digest"], fence
        )
        return True

    def _retry_handovers(self) -> None:
        waiting, self._handover = self._handover, []
        for item in waiting:
            if self._finish(item.command):
                continue
            if time.monotonic() - item.since < HANDOVER_LIMIT_S and self.store.has_unit(item.command["unit"]):
                self._handover.append(item)
            else:
                fault: Future[dict[str, Any]] = Future()
                fault.set_result(self._fault("not_captured", f"vLLM did not hand it over in {HANDOVER_LIMIT_S:.0f} s"))
                self._jobs[item.command["ticket"]] = fault

    def _store_sample(
        self,
        unit: int,
        key: SampleKey,
        rows: RequestRows | None,
        num_tokens: int,
        digest: str,
        fence: Future[None] | None,
    ) -> dict[str, Any]:
        """Check a sample's rows against its tokens, then encode and write them."""
        if fence is not None:
            fence.result()
        if unit in self._failed_units:
            raise RuntimeError(f"unit {unit} has failed: {self._failed_units[unit]}")
        if rows is None:
            return self._fault("not_captured", "no forward pass of a request with this sample key was seen")
        num_rows = num_tokens - 1
        if rows.fault is not None or rows.num_rows < num_rows:
            detail = rows.fault or f"{rows.num_rows} rows for {num_tokens} tokens"
            return self._fault("missing_rows", detail)
        if token_digest(rows.token_ids[:num_rows]) != digest:
            return self._fault("wrong_tokens", "the rows were computed from other tokens than the answer's")
        states_TLH = rows.states_TLH[:num_rows]
        bad = find_bad_rows(states_TLH, self.options.spec)
        if bad:
            return self._fault("bad_rows", "; ".join(str(item) for item in bad))
        try:
            receipt = self._shards.writer(unit).add(key, states_TLH)
        except BaseException as error:
            # A shard that a write failed in is not to be trusted; nothing more goes into this unit.
            self._failed_units[unit] = repr(error)
            raise
        self._stats["samples"] += 1
        self._stats["rows"] += num_rows
        return {"receipt": encode_receipt(receipt)}

    def _fault(self, reason: str, detail: str) -> dict[str, Any]:
        self._stats["faults"] += 1
        return {"fault": reason, "detail": detail}

    def shutdown(self) -> None:
        self.transfer.close()
        self._shards.shutdown()
