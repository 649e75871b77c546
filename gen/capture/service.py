"""The capture service of a worker process: rows in from the model runner, commands in from the client, shards out."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from gen.capture.arena import CachedPrefix, PrefixArena, StepSlots
from gen.capture.config import CaptureOptions
from gen.capture.messages import (
    UnitAttempt,
    decode_target,
    encode_files,
    encode_receipt,
    token_digest,
)
from gen.capture.rows import RequestRows, RowStore
from gen.capture.shard_thread import ShardThread
from gen.capture.transfer import RowSource, RowTransfer
from storage.shards import EncodedSample, encode_sample
from storage.shards.check import find_bad_rows
from storage.types import SampleKey

# The stock method hands a finished request over with the next engine step; much later means never.
HANDOVER_LIMIT_S = 60.0
# One core encodes some 700 MB of states a second: 12,000 tokens of the reference verifier, whose prefill is faster than
# that. On a CPU verifier every thread takes a core from the forward pass, and one keeps up by far.
_NUM_ENCODERS = {"cpu": 1, "cuda": 4}


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
        self._shards = ShardThread(options.queue_bytes, options.num_encoders or _NUM_ENCODERS.get(device.type, 4))
        self._jobs: dict[int, Future[dict[str, Any]]] = {}
        self._handover: list[_Waiting] = []
        self._failed_units: dict[UnitAttempt, str] = {}
        self._codecs: dict[UnitAttempt, str] = {}

    # Rows

    def take_step(self, source: RowSource, step: list[tuple[str, int, int]]) -> None:
        """Take one step's rows: `step` lists (request id, first position, count) in the order of the rows."""
        self.transfer.submit(source, self.store.spans(step))

    def use_arena(self, num_slots: int) -> None:
        """Keep the states of everything in vLLM's KV cache, which has so many slots.

        Raises ValueError when they need more memory than they may take.
        """
        self.transfer.use_arena(PrefixArena(num_slots, self.options.spec, self.options.arena_bytes))

    def take_step_with_slots(self, source: RowSource, step: list[tuple[str, int, int]], slots: StepSlots) -> None:
        """As `take_step`, with an arena: rows of requests that are not captured are kept as well."""
        prefixes = [
            CachedPrefix(rows, slots_N)
            for request_id, slots_N in slots.prefixes.items()
            if (rows := self.store.running(request_id)) is not None
        ]
        self.transfer.submit_all(source, self.store.spans(step), slots.slots_N, prefixes)

    def take_request(
        self, request_id: str, unit: UnitAttempt, key: SampleKey, source: RowSource, num_rows: int
    ) -> None:
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
        self._shards.wait_for_room()

    # Commands

    def exchange(self, commands: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Take commands in, give the answers out that are ready. Never raises: in a tensor-parallel group an exception
        of one rank leaves the other ranks' answers in their queues, for the next call to find. Errors are answers."""
        answers = []
        for command in commands:
            try:
                self._take_command(command)
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

    def _take_command(self, command: Mapping[str, Any]) -> None:
        """Start the job of a command, whose result is its answer."""
        ticket, unit = command["ticket"], UnitAttempt(*command["unit"])
        match command["op"]:
            case "open":
                if self.store.has_unit(unit):
                    raise ValueError(f"{unit} is open already")
                target = decode_target(command["target"])
                self.store.open_unit(unit)
                self._codecs[unit] = target.codec
                self._jobs[ticket] = self._shards.submit(0, self._open, target)
            case "finish":
                self._check_unit(unit)
                if not self._finish(command):
                    self._handover.append(_Waiting(command, time.monotonic()))
            case "close":
                self._check_unit(unit)
                self.store.drop_unit(unit)
                self._jobs[ticket] = self._shards.submit(0, self._close, unit)
            case "abort":
                self.store.drop_unit(unit)
                self._jobs[ticket] = self._shards.submit(0, self._abort, unit)
            case op:
                raise ValueError(f"unknown capture command {op!r}")

    def _check_unit(self, unit: UnitAttempt) -> None:
        if not self.store.has_unit(unit):
            raise ValueError(f"{unit} is not open")

    # Jobs of the shard thread

    def _open(self, target: Any) -> dict[str, Any]:
        self._shards.open(target)
        return {}

    def _close(self, unit: UnitAttempt) -> dict[str, Any]:
        self._check_not_failed(unit)
        del self._codecs[unit]
        return {"files": encode_files(self._shards.close(unit))}

    def _abort(self, unit: UnitAttempt) -> dict[str, Any]:
        self._failed_units.pop(unit, None)
        self._codecs.pop(unit, None)
        self._shards.abort(unit)
        return {}

    def _finish(self, command: Mapping[str, Any]) -> bool:
        """Start the job of a finish command; False when the request's rows have not been handed over yet."""
        unit, key = UnitAttempt(*command["unit"]), SampleKey(*command["key"])
        fence = self.transfer.fence()
        rows = self.store.take(unit, key) if self.store.has_unit(unit) else None
        if rows is None and self.options.mode == "stock":
            return False
        nbytes = rows.num_rows * self.options.spec.row_bytes if rows is not None else 0
        num_tokens, digest = command["num_tokens"], command["digest"]
        self._jobs[command["ticket"]] = self._shards.submit_encoded(
            nbytes,
            lambda: self._encode_sample(rows, num_tokens, digest, fence),
            lambda encoded: self._write_sample(unit, key, encoded),
        )
        return True

    def _retry_handovers(self) -> None:
        waiting, self._handover = self._handover, []
        for item in waiting:
            if self._finish(item.command):
                continue
            if time.monotonic() - item.since < HANDOVER_LIMIT_S and self.store.has_unit(
                UnitAttempt(*item.command["unit"])
            ):
                self._handover.append(item)
            else:
                fault: Future[dict[str, Any]] = Future()
                fault.set_result(self._fault("not_captured", f"vLLM did not hand it over in {HANDOVER_LIMIT_S:.0f} s"))
                self._jobs[item.command["ticket"]] = fault

    def _encode_sample(
        self, rows: RequestRows | None, num_tokens: int, digest: str, fence: Future[None] | None
    ) -> EncodedSample | dict[str, Any]:
        """Check a sample's rows against its tokens, and encode them; or the answer that says what is wrong."""
        if fence is not None:
            fence.result()
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
        return encode_sample(states_TLH, self.options.spec, self._codecs[rows.unit])

    def _write_sample(
        self, unit: UnitAttempt, key: SampleKey, sample: EncodedSample | dict[str, Any]
    ) -> dict[str, Any]:
        self._check_not_failed(unit)
        if isinstance(sample, dict):
            return sample
        try:
            receipt = self._shards.writer(unit).add_encoded(key, sample)
        except BaseException as error:
            # A shard that a write failed in is not to be trusted; nothing more goes into this unit.
            self._failed_units[unit] = repr(error)
            raise
        return {"receipt": encode_receipt(receipt)}

    def _check_not_failed(self, unit: UnitAttempt) -> None:
        if unit in self._failed_units:
            raise RuntimeError(f"{unit} has failed: {self._failed_units[unit]}")

    @staticmethod
    def _fault(reason: str, detail: str) -> dict[str, Any]:
        return {"fault": reason, "detail": detail}

    def shutdown(self) -> None:
        self.transfer.close()
        self._shards.shutdown()
