"""A real vLLM engine with capture for tests that are not coroutines. Import this before vLLM."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

# Before vLLM is imported. Two cores are shared by all engines of a session; only one of them works at a time.
CORES = sorted(os.sched_getaffinity(0))[:2]
os.environ.update(
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, CORES)),
    TOKENIZERS_PARALLELISM="false",
)

from gen.capture.client import CaptureClient  # noqa: E402
from gen.capture.config import CaptureMode, capture_engine_args  # noqa: E402
from gen.capture.messages import CaptureFault  # noqa: E402
from storage.shards import open_shard_reader  # noqa: E402
from storage.store import open_store  # noqa: E402
from storage.types import Receipt, SampleKey, ShardTarget, StateSpec  # noqa: E402

MAX_MODEL_LEN = 256
SMOLLM_SPEC = StateSpec((2, 15, 27, 30), 576)

T = TypeVar("T")


class Engine:
    """An AsyncLLM with capture in an event loop of its own, for tests that are not coroutines."""

    def __init__(
        self,
        model: Path,
        spec: StateSpec,
        mode: CaptureMode,
        directory: Path,
        *,
        arena_bytes: int = 0,
        **arguments: Any,
    ) -> None:
        self.spec = spec
        self.directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._request_ids = itertools.count()
        self.units = itertools.count()
        arguments.update(model=str(model), **capture_engine_args(mode, spec, arena_bytes=arena_bytes))
        self.engine = self.run(self._start(arguments), timeout=300)
        self.mode: CaptureMode = mode
        self.client = self.new_client(mode)

    def new_client(self, mode: CaptureMode, *, read_prefix_cache: bool = True) -> CaptureClient:
        return CaptureClient(self.engine, self.spec, mode, read_prefix_cache=read_prefix_cache)

    @staticmethod
    async def _start(arguments: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float = 240) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def target(self, unit: int) -> ShardTarget:
        return ShardTarget(str(self.directory), "test", unit, 0, self.spec)

    async def generate(
        self, prompt_ids: Sequence[int], params: Any, unit: int, key: SampleKey, client: CaptureClient | None = None
    ) -> list[int]:
        """Send one request marked for capture; returns prompt and answer."""
        (client or self.client).prepare(params, unit, key)
        final = None
        request_id = f"{unit}-{key.name}-{next(self._request_ids)}"
        async for output in self.engine.generate({"prompt_token_ids": list(prompt_ids)}, params, request_id):
            final = output
        assert final is not None
        return [*prompt_ids, *final.outputs[0].token_ids]

    def capture(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Any], client: CaptureClient | None = None
    ) -> tuple[dict[SampleKey, list[int]], dict[SampleKey, Any]]:
        """Answer these prompts in one unit; returns token ids and states read back from the closed shards."""
        client = client or self.client
        unit = next(self.units)

        async def work() -> tuple[dict[SampleKey, list[int]], dict[SampleKey, Receipt | CaptureFault], Any]:
            await client.open_unit(self.target(unit))
            keys = [SampleKey(row, 0, 0) for row in range(len(prompts))]

            async def one(index: int) -> tuple[list[int], Receipt | CaptureFault]:
                token_ids = await self.generate(prompts[index], params[index], unit, keys[index], client)
                return token_ids, (await client.finish(unit, {keys[index]: token_ids}))[keys[index]]

            answers = await asyncio.gather(*map(one, range(len(prompts))))
            files = await client.close_unit(unit)
            return (
                {key: ids for key, (ids, _) in zip(keys, answers, strict=True)},
                {key: receipt for key, (_, receipt) in zip(keys, answers, strict=True)},
                files,
            )

        token_ids, receipts, files = self.run(work())
        return token_ids, self.read(receipts, files)

    def read(self, receipts: dict[SampleKey, Receipt | CaptureFault], files: Sequence[Any]) -> dict[SampleKey, Any]:
        """States by key, checksums verified, out of closed shards."""
        readers = {entry.path: open_shard_reader(open_store(str(self.directory)), entry, self.spec) for entry in files}
        states = {}
        for key, receipt in receipts.items():
            assert isinstance(receipt, Receipt), receipt
            states[key] = readers[receipt.shard].read(receipt)
        return states

    def close(self) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _stop(self) -> None:
        self.engine.shutdown()


def sampling(max_tokens: int, seed: int, **options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, **options)
