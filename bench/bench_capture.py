"""Throughput of capture: plain generation against one pass, the stock method and two passes, into shards, in one run.

Three engines with the same threads, token budget and KV cache are alive together in one Ray actor and work one at a
time: vLLM as it comes, vLLM with the capture worker (one pass, two passes), and vLLM's `extract_hidden_states`. Every
round gives each way the same prompts and asks for the same number of tokens, from the call of the actor until its
result, states in closed shards; the table shows medians over the rounds and ratios to what a user would otherwise run
(plain generation, and bare prefill for the second of two passes). Prefix caching is off everywhere: it would serve the
repeated prompts of later rounds.

Below the table, what capture took in the worker: seconds of the engine's own thread, and CPU seconds of the threads
beside it. On a noisy machine these say more than the ratios.

    python -m bench.bench_capture [--model DIR] [--prompts N] [--concurrent N] [--tokens N] [--rounds N] [--eager]
                                  [--ways WAY ...]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

REPOSITORY = Path(__file__).resolve().parent.parent


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=REPOSITORY / "models" / "smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=192, help="requests of a round")
    parser.add_argument("--concurrent", type=int, default=64, help="requests in a step at most (max_num_seqs)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every answer")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="measure these only, with what they are of"
    )
    parser.add_argument("--budget", type=int, default=2048, help="tokens of one step (max_num_batched_tokens)")
    parser.add_argument("--threads", default=None, help="VLLM_CPU_OMP_THREADS_BIND of every engine; default: two cores")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path, default=None, help="also write the measurements to this file")
    return parser.parse_args()


class Bench:
    """The engines, and one method per way of working. Each returns the number of tokens it went through."""

    def __init__(self, args: argparse.Namespace, prompts: list[list[int]], spec: Any, directory: Path) -> None:
        self.args = args
        self.prompts = prompts
        self.spec = spec
        self.directory = directory
        self.answers: list[list[int]] = []  # token ids of plain generation: what the prefills read
        self._ids = itertools.count()
        self._units = itertools.count()

    async def start(self) -> None:
        from gen.capture.client import CaptureClient

        self.plain = self._engine({})
        self.capture = self._engine(
            {**self._capture_args("one_pass"), "worker_extension_cls": "bench.capture_costs.Extension"}
        )
        self.stock = self._engine(self._capture_args("stock"))
        self.clients = {
            "one_pass": CaptureClient(self.capture, self.spec, "one_pass"),
            "two_pass": CaptureClient(self.capture, self.spec, "two_pass"),
            "stock": CaptureClient(self.stock, self.spec, "stock"),
        }

    def _capture_args(self, mode: Any) -> dict[str, Any]:
        from gen.capture.config import capture_engine_args

        return capture_engine_args(mode, self.spec)

    def _engine(self, extra: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = {
            "model": str(self.args.model),
            "max_model_len": max(map(len, self.prompts)) + self.args.tokens + 1,
            "max_num_seqs": self.args.concurrent,
            "max_num_batched_tokens": self.args.budget,
            "enable_prefix_caching": False,
            "enforce_eager": self.args.eager,
            "distributed_executor_backend": "mp",
        }
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, **extra))

    async def run(self, name: str) -> int:
        """One way of working, once."""
        return await WAYS[name][0](self)

    async def costs(self) -> dict[str, float]:
        """Seconds that capture has taken in the worker of the capture engine, see `bench.capture_costs`."""
        [costs] = await self.capture.collective_rpc("capture_costs")
        return cast(dict[str, float], costs)

    async def stop(self) -> None:
        for engine in (self.plain, self.capture, self.stock):
            engine.shutdown()

    async def _request(self, engine: Any, prompt_ids: list[int], params: Any) -> list[int]:
        final = None
        async for output in engine.generate({"prompt_token_ids": prompt_ids}, params, f"bench-{next(self._ids)}"):
            final = output
        assert final is not None
        return [*prompt_ids, *final.outputs[0].token_ids]

    def _params(self, max_tokens: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )

    async def plain_generation(self) -> int:
        self.answers = await asyncio.gather(
            *(self._request(self.plain, prompt, self._params(self.args.tokens)) for prompt in self.prompts)
        )
        return sum(map(len, self.answers))

    async def bare_prefill(self) -> int:
        await asyncio.gather(*(self._request(self.plain, ids[:-1], self._params(1)) for ids in self.answers))
        return sum(map(len, self.answers))

    async def _captured(self, mode: str, engine: Any, requests: list[tuple[list[int], list[int] | None, int]]) -> int:
        """Requests are (prompt, full token ids when known, tokens to generate); all states end in closed shards."""
        from storage.types import Receipt, SampleKey, ShardTarget

        client, unit = self.clients[mode], next(self._units)
        await client.open_unit(ShardTarget(str(self.directory), "bench", unit, 0, self.spec))

        async def one(row: int) -> int:
            prompt, known, max_tokens = requests[row]
            key = SampleKey(row, 0, 0)
            ids = await self._request(engine, prompt, client.prepare(self._params(max_tokens), unit, key))
            ids = known or ids
            receipt = (await client.finish(unit, {key: ids}))[key]
            assert isinstance(receipt, Receipt), receipt
            return len(ids)

        counts = await asyncio.gather(*map(one, range(len(requests))))
        await client.close_unit(unit)
        return sum(counts)

    async def one_pass(self) -> int:
        return await self._captured("one_pass", self.capture, [(p, None, self.args.tokens) for p in self.prompts])

    async def stock_method(self) -> int:
        return await self._captured("stock", self.stock, [(p, None, self.args.tokens) for p in self.prompts])

    async def two_passes(self) -> int:
        return await self._captured("two_pass", self.capture, [(p, None, self.args.tokens) for p in self.prompts])

    async def capture_prefill(self) -> int:
        """The second pass alone: read known answers, as extract mode does."""
        return await self._captured("one_pass", self.capture, [(ids[:-1], ids, 1) for ids in self.answers])


WAYS = {
    "plain generation": (Bench.plain_generation, "plain generation"),
    "one pass": (Bench.one_pass, "plain generation"),
    "stock method": (Bench.stock_method, "plain generation"),
    "two passes": (Bench.two_passes, "plain generation"),
    "bare prefill": (Bench.bare_prefill, "bare prefill"),
    "prefill with capture": (Bench.capture_prefill, "bare prefill"),
}


Rounds = dict[str, list[tuple[int, float]]]  # (tokens, seconds) by way
Costs = dict[str, dict[str, float]]  # seconds by place, all rounds together, by way


def measure(bench: Any, num_rounds: int, wanted: Collection[str]) -> tuple[Rounds, Costs]:
    """All rounds after a warm-up; `bench` is the actor."""
    import ray

    ray.get(bench.start.remote())
    names = [name for name in WAYS if name in wanted or name in {WAYS[other][1] for other in wanted}]
    results: Rounds = {name: [] for name in names}
    costs: Costs = {name: defaultdict(float) for name in names if name in ("one pass", "prefill with capture")}
    for round_index in range(num_rounds + 1):
        # Every round starts with another way, so that no way always follows the same one.
        first = max(0, round_index - 1) % len(names)
        # The warm-up is of all: the prefills read what plain generation answered.
        for name in WAYS if round_index == 0 else names[first:] + names[:first]:
            before = ray.get(bench.costs.remote())
            started = time.perf_counter()
            tokens = ray.get(bench.run.remote(name))
            seconds = time.perf_counter() - started
            after = ray.get(bench.costs.remote())
            label = "warm-up" if round_index == 0 else f"round {round_index}"
            print(f"{label}: {name}: {tokens} tokens in {seconds:.1f} s", file=sys.stderr)
            if round_index:
                results[name].append((tokens, seconds))
            if round_index and name in costs:
                for place in after:
                    costs[name][place] += after[place] - before.get(place, 0.0)
    ray.get(bench.stop.remote())
    return results, costs


def report(results: Rounds, costs: Costs, args: argparse.Namespace) -> dict[str, Any]:
    from rich.console import Console
    from rich.table import Table

    rates = {name: [tokens / seconds for tokens, seconds in rounds] for name, rounds in results.items()}
    table = Table(title=f"{args.prompts} requests x {args.tokens} tokens, {args.rounds} rounds, medians")
    for column in ("way", "tokens/s", "lowest", "highest", "ratio", "of"):
        table.add_column(column, justify="left" if column in ("way", "of") else "right")
    summary: dict[str, Any] = {}
    for name in results:
        base = WAYS[name][1]
        # Ratios within a round, so that a drift of the machine cancels.
        ratio = statistics.median(mine / other for mine, other in zip(rates[name], rates[base], strict=True))
        summary[name] = {"tokens_per_s": rates[name], "ratio": ratio, "of": base}
        values = (statistics.median(rates[name]), min(rates[name]), max(rates[name]))
        table.add_row(name, *(f"{value:,.0f}" for value in values), f"{ratio:.3f}", base)
    Console().print(table)
    for name, places in costs.items():
        wall_s = sum(seconds for _, seconds in results[name])
        shares = {place: seconds / wall_s for place, seconds in places.items()}
        summary[name]["shares"] = shares
        listed = ", ".join(f"{place} {share:.2%}" for place, share in shares.items())
        print(f"{name}: capture's seconds as a share of the round's (the threads' are CPU seconds): {listed}")
    return summary


def main() -> None:
    args = parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = args.threads or ",".join(map(str, cores))
    os.environ.update(VLLM_USE_V2_MODEL_RUNNER="0", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
    import ray
    from transformers import AutoConfig

    from gen.chat import ChatTokenizer
    from gen.layers import resolve_layer_ids
    from gen.prompts import Prompt, read_prompts
    from storage.types import StateSpec

    config = AutoConfig.from_pretrained(args.model)
    chat = ChatTokenizer.from_directory(args.model)
    rows = [row for row in read_prompts("builtin:train") if isinstance(row, Prompt)]
    prompts = [chat.prompt_ids(row.messages) for row in itertools.islice(itertools.cycle(rows), args.prompts)]
    spec = StateSpec(resolve_layer_ids("eagle3", config.num_hidden_layers), config.hidden_size)
    with tempfile.TemporaryDirectory() as directory:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        actor = ray.remote(num_cpus=2)(Bench)
        results, costs = measure(actor.remote(args, prompts, spec, Path(directory)), args.rounds, args.ways)
        ray.shutdown()
    summary = report(results, costs, args)
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
