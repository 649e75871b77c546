"""The replica's side of capture: one client per engine, any number of units at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gen.capture.config import CONFIG_KEY, CaptureMode, CaptureOptions
from gen.capture.messages import (
    REQUEST_ARG,
    CaptureError,
    CaptureFault,
    UnitAttempt,
    decode_files,
    decode_receipt,
    encode_request,
    encode_target,
    token_digest,
)
from storage.types import FileEntry, Receipt, SampleKey, ShardTarget, StateSpec

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


# How soon a client asks again for an answer that somebody waits for and nothing speaks against asking for: that to
# opening or closing a unit, or any while no request is in the engine. Doubles up to `exchange_interval_s`.
FIRST_INTERVAL_S = 0.002


class CaptureClient:
    """Talks to the capture worker of one engine. All methods belong to one event loop.

    Commands and answers of all units travel together in one call between two engine steps, at most one every
    `exchange_interval_s`: a call empties the pipeline of an asynchronous scheduler, so there must be few.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        spec: StateSpec,
        mode: CaptureMode,
        *,
        exchange_interval_s: float = 0.05,
        read_prefix_cache: bool = True,
    ) -> None:
        """`read_prefix_cache` takes what is in vLLM's prefix cache where capture can: with the stock method, or with an
        arena (`CaptureOptions.arena_bytes`)."""
        self._engine = engine
        self._spec = spec
        self._mode = mode
        self._interval_s = exchange_interval_s
        additional = engine.vllm_config.additional_config
        assert isinstance(additional, dict)
        options = CaptureOptions.from_json(additional[CONFIG_KEY])
        self._reads_cache = read_prefix_cache and (mode == "stock" or options.arena_bytes > 0)
        self._attempts: dict[int, int] = {}  # of the units that are open
        self._in_engine: set[tuple[int, SampleKey]] = set()  # prepared, not finished
        self._tickets = itertools.count()
        self._outbox: list[dict[str, Any]] = []
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}  # ticket -> operation and its answer
        self._pump: asyncio.Task[None] | None = None
        self._prefills = itertools.count()

    async def check(self) -> None:
        """Raises ValueError with the reason when the engine cannot capture as it was configured."""
        for refusal in await self._engine.collective_rpc("capture_refusal"):
            if refusal is not None:
                raise ValueError(refusal)

    def prepare(self, params: SamplingParams, unit: int, key: SampleKey) -> SamplingParams:
        """Mark a request's sampling parameters for capture (in place; returned for convenience). The unit is open.

        One request per answer: several answers to a prompt are several requests with their own `key.n` and seed.

        Raises ValueError for `n` above 1 or beam search.
        """
        if params.n != 1:
            raise ValueError(f"n={params.n}: send one request per answer, each with its own sample key and seed")
        if self._mode == "two_pass":
            self._in_engine.add((unit, key))
            return params
        return self._mark(params, unit, key)

    def _mark(self, params: SamplingParams, unit: int, key: SampleKey) -> SamplingParams:
        self._in_engine.add((unit, key))
        params.extra_args = {**(params.extra_args or {}), REQUEST_ARG: encode_request(self._attempt(unit), key)}
        if not self._reads_cache:
            # A prefix-cache hit has no forward pass and hence no rows.
            params.skip_reading_prefix_cache = True
        return params

    async def open_unit(self, target: ShardTarget) -> None:
        """Start the shards of a unit; before the first of its requests is sent.

        A unit that could not be opened is aborted before it is opened again.

        Raises ValueError when the target's geometry is not the engine's, CaptureError when the unit is open already.
        """
        if target.spec != self._spec:
            raise ValueError(f"target of unit {target.unit} has {target.spec}, the engine captures {self._spec}")
        unit = UnitAttempt(target.unit, target.attempt)
        if unit.unit in self._attempts:
            raise CaptureError(f"unit {unit.unit} is open already, as attempt {self._attempts[unit.unit]}")
        self._attempts[unit.unit] = unit.attempt
        await self._command("open", unit, target=encode_target(target))

    def _attempt(self, unit: int) -> UnitAttempt:
        if unit not in self._attempts:
            raise CaptureError(f"unit {unit} is not open")
        return UnitAttempt(unit, self._attempts[unit])

    async def finish(
        self, unit: int, samples: Mapping[SampleKey, Sequence[int]]
    ) -> dict[SampleKey, Receipt | CaptureFault]:
        """Store the states of finished answers; call it with each request's full token ids (prompt and answer).

        A sample of T tokens ends as T - 1 rows in a shard, which is readable once the unit is closed, or as a
        CaptureFault, after which the key may be generated again.

        Raises CaptureError when the unit's shards cannot be written.
        """
        results = await asyncio.gather(*(self._finish(unit, key, ids) for key, ids in samples.items()))
        return dict(zip(samples, results, strict=True))

    async def _finish(self, unit: int, key: SampleKey, token_ids: Sequence[int]) -> Receipt | CaptureFault:
        if len(token_ids) < 2:
            raise ValueError(f"sample {key}: {len(token_ids)} tokens; a sample has a prompt and an answer")
        if self._mode == "two_pass":
            await self._prefill(unit, key, token_ids)
        self._in_engine.discard((unit, key))
        answer = await self._command(
            "finish", self._attempt(unit), key=list(key), num_tokens=len(token_ids), digest=token_digest(token_ids[:-1])
        )
        if "fault" in answer:
            return CaptureFault(key, answer["fault"], answer["detail"])
        return decode_receipt(answer["receipt"])

    async def _prefill(self, unit: int, key: SampleKey, token_ids: Sequence[int]) -> None:
        """The second pass: read prompt and answer, except the last token, whose state nobody wants."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = self._mark(
            SamplingParams(max_tokens=1, temperature=0.0, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False),
            unit,
            key,
        )
        request_id = f"capture-{unit}-{key.name}-{next(self._prefills)}"
        async for _ in self._engine.generate({"prompt_token_ids": list(token_ids[:-1])}, params, request_id):
            pass

    async def extract(self, unit: int, key: SampleKey, token_ids: Sequence[int]) -> Receipt | CaptureFault:
        """Read given tokens (a conversation with its answers) and store their states; nothing is generated.

        Raises as `finish` does.
        """
        if self._mode != "two_pass":
            await self._prefill(unit, key, token_ids)
        return (await self.finish(unit, {key: token_ids}))[key]

    async def close_unit(self, unit: int) -> list[FileEntry]:
        """Close the unit's shards: only now are its samples' bytes readable. What was not finished is dropped."""
        files = decode_files((await self._command("close", self._attempt(unit)))["files"])
        self._forget(unit)
        return files

    async def abort_unit(self, unit: int) -> None:
        """Drop the unit, its rows and its shards. Allowed in any state, also for a unit that was never opened."""
        if unit in self._attempts:
            await self._command("abort", self._forget(unit))

    def _forget(self, unit: int) -> UnitAttempt:
        self._in_engine = {item for item in self._in_engine if item[0] != unit}
        return UnitAttempt(unit, self._attempts.pop(unit))

    async def _command(self, op: str, unit: UnitAttempt, **arguments: Any) -> dict[str, Any]:
        ticket = next(self._tickets)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = (op, future)
        self._outbox.append({"ticket": ticket, "op": op, "unit": list(unit), **arguments})
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._exchange())
        answer = await future
        if "error" in answer:
            raise CaptureError(f"{unit}: {op} failed in the capture worker: {answer['error']}")
        return answer

    async def _exchange(self) -> None:
        """Carry commands to the worker and answers back until nothing is outstanding."""
        quick_s = FIRST_INTERVAL_S
        try:
            while self._waiting:
                # Let every command that is about to be given in this turn of the loop come along.
                await asyncio.sleep(0)
                commands, self._outbox = self._outbox, []
                replies = await self._engine.collective_rpc("capture_exchange", args=(commands,))
                for answer in next(reply for reply in replies if reply is not None):
                    _, future = self._waiting.pop(answer["ticket"])
                    if not future.done():
                        future.set_result(answer)
                if self._waiting:
                    # Samples finish all the time and can wait; opening and closing are rare and hold up a whole unit.
                    quick = not self._in_engine or any(op != "finish" for op, _ in self._waiting.values())
                    await asyncio.sleep(min(quick_s, self._interval_s) if quick else self._interval_s)
                    quick_s = 2 * quick_s if quick else FIRST_INTERVAL_S
        except BaseException as error:
            # Whoever waits for an answer must learn that none will come; the error goes on to each of them.
            waiting, self._waiting, self._outbox = self._waiting, {}, []
            for _, future in waiting.values():
                if not future.done():
                    future.set_exception(CaptureError(f"the capture worker does not answer: {error!r}"))
            if not isinstance(error, Exception):
                raise
