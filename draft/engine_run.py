"""One vLLM engine over a list of prompts, in a process of its own: `python -m draft.engine_run REQUEST ANSWER`.

A process per engine gives the next one all of its cores and memory, and lets everything that vLLM and its children
print go to a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LOG_TAIL_LINES = 30
POLL_S = 0.5
WARM_UP_TOKENS = 8


class EngineFailedError(RuntimeError):
    """The engine's process ended without an answer."""


@dataclass(frozen=True)
class EngineRequest:
    """Everything that one engine is to do."""

    model: str
    prompts: list[list[int]]  # token ids
    max_tokens: int
    temperature: float
    seed: int
    engine_args: dict[str, Any]
    speculative_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class EngineAnswer:
    """What one engine did."""

    outputs: list[list[int]]  # token ids of the answers, in the order of the prompts
    histograms: list[list[int]] | None  # per prompt, drafts by number of accepted tokens; None without a draft
    draft_tokens: list[int] | None  # per prompt
    load_s: float
    generate_s: float
    vllm_version: str


def engine_environment(tensor_parallel_size: int = 1) -> dict[str, str]:
    """Environment of the engine's process. On CPU every engine of a comparison gets the same cores, one group a rank.

    Left alone, vLLM keeps cores back for its front end, differently with and without a draft. What the caller's
    environment already says is kept.
    """
    cores = sorted(os.sched_getaffinity(0))
    per_rank = max(1, len(cores) // tensor_parallel_size)
    groups = [cores[rank * per_rank : (rank + 1) * per_rank] for rank in range(tensor_parallel_size)]
    defaults = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, group)) for group in groups),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return defaults | dict(os.environ)


def run_engine(
    request: EngineRequest,
    log_file: Path,
    *,
    environment: Mapping[str, str] | None = None,
    tick: Callable[[], None] | None = None,
) -> EngineAnswer:
    """Run an engine to its end. `tick` is called about twice a second meanwhile.

    Raises EngineFailedError with the end of the log.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    request_file, answer_file = log_file.with_suffix(".request.json"), log_file.with_suffix(".answer.json")
    request_file.write_text(json.dumps(asdict(request)))
    answer_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "draft.engine_run", str(request_file), str(answer_file)]
    if environment is None:
        environment = engine_environment(int(request.engine_args.get("tensor_parallel_size", 1)))
    with log_file.open("wb") as log:
        # A session of its own: an interrupt is for the driver, which then ends the engine with all its children.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment), start_new_session=True
        )
        try:
            while process.poll() is None:
                if tick is not None:
                    tick()
                try:
                    process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            _end_session(process)
    if process.returncode != 0 or not answer_file.is_file():
        tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
        raise EngineFailedError(f"vLLM ended with code {process.returncode}; the end of {log_file}:\n{tail}")
    return EngineAnswer(**json.loads(answer_file.read_text()))


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the engine's process and whatever it started; all gone is the normal case."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _generate(request: EngineRequest) -> EngineAnswer:
    import vllm
    from vllm import LLM, SamplingParams, TokensPrompt

    began = time.monotonic()
    speculative: dict[str, Any] = {}
    if request.speculative_config is not None:
        speculative = {
            "speculative_config": request.speculative_config,
            "per_request_spec_decode_metrics": "summary",
            "disable_log_stats": False,
        }
    llm = LLM(model=request.model, **request.engine_args, **speculative)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in request.prompts]
    sampling = SamplingParams(temperature=request.temperature, max_tokens=request.max_tokens, seed=request.seed)
    # The first forward passes pay for lazy set-up that is no part of serving.
    warm_up = SamplingParams(temperature=request.temperature, max_tokens=WARM_UP_TOKENS, seed=request.seed)
    llm.generate(prompts[:1], warm_up, use_tqdm=False)
    load_s = time.monotonic() - began

    before = _counters(llm) if speculative else {}
    began = time.monotonic()
    results = llm.generate(prompts, sampling, use_tqdm=False)
    generate_s = time.monotonic() - began
    histograms, draft_tokens = None, None
    if speculative:
        counts = [result.outputs[0].spec_decode_metrics for result in results]
        num_positions = request.speculative_config["num_speculative_tokens"] if request.speculative_config else 0
        # An answer of one token is never drafted for and has no counts.
        histograms = [list(count.histogram) if count else [0] * (num_positions + 1) for count in counts]
        draft_tokens = [count.num_draft_tokens if count else 0 for count in counts]
        _check_totals(histograms, draft_tokens, before, _counters(llm))
    outputs = [list(result.outputs[0].token_ids) for result in results]
    return EngineAnswer(outputs, histograms, draft_tokens, load_s, generate_s, vllm.__version__)


COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "draft tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted tokens": "vllm:spec_decode_num_accepted_tokens",
}


def _counters(llm: Any) -> dict[str, int]:
    """vLLM's own totals since the engine started."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTERS.values()}
    return {word: int(values.get(name, 0)) for word, name in COUNTERS.items()}


def _check_totals(
    histograms: Sequence[Sequence[int]], draft_tokens: Sequence[int], before: dict[str, int], after: dict[str, int]
) -> None:
    """The counts of the requests must add up to the engine's: two ways to the same number."""
    mine = {
        "drafts": sum(map(sum, histograms)),
        "draft tokens": sum(draft_tokens),
        "accepted tokens": sum(j * drafts for histogram in histograms for j, drafts in enumerate(histogram)),
    }
    engine = {word: after[word] - before[word] for word in mine}
    if mine != engine:
        raise RuntimeError(f"counts per request {mine} do not add up to the engine's {engine}")


def main() -> None:
    request_file, answer_file = map(Path, sys.argv[1:])
    answer = _generate(EngineRequest(**json.loads(request_file.read_text())))
    temporary = answer_file.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(answer)))
    temporary.replace(answer_file)


if __name__ == "__main__":
    main()
