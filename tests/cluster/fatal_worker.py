"""An engine that dies when tests want it to. Imported in its worker process, through vLLM's `worker_extension_cls`.

`HEADRACE_TEST_FATAL_TOKENS` (ids with commas): a request whose prompt holds them in a row kills the worker when it is
scheduled. `HEADRACE_TEST_STEP_TOKENS`: a step of more tokens runs out of memory; with `HEADRACE_TEST_FILL_MEMORY` by
filling it until the kernel kills the worker, else by an allocation that fails.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import torch

from gen.capture.worker import CaptureWorker

FATAL = [int(token) for token in os.environ.get("HEADRACE_TEST_FATAL_TOKENS", "").split(",") if token]
STEP_TOKENS = int(os.environ.get("HEADRACE_TEST_STEP_TOKENS", 1 << 30))
PIECE_BYTES = 64 << 20

execute_model = CaptureWorker.execute_model


def holds(token_ids: Sequence[int], wanted: Sequence[int]) -> bool:
    return any(list(token_ids[i : i + len(wanted)]) == wanted for i in range(len(token_ids)))


def run_out_of_memory() -> None:
    if "HEADRACE_TEST_FILL_MEMORY" not in os.environ:
        torch.empty(1 << 60, dtype=torch.uint8)
    pieces = []
    while True:
        pieces.append(torch.ones(PIECE_BYTES, dtype=torch.uint8))


def dying(self: CaptureWorker, scheduler_output: Any) -> Any:
    prompts = [request.prompt_token_ids for request in scheduler_output.scheduled_new_reqs]
    if FATAL and any(holds(prompt, FATAL) for prompt in prompts):
        os.kill(os.getpid(), signal.SIGKILL)
    if scheduler_output.total_num_scheduled_tokens > STEP_TOKENS:
        run_out_of_memory()
    return execute_model(self, scheduler_output)


CaptureWorker.execute_model = dying  # type: ignore[method-assign]


class Extension:
    """Adds nothing: naming it has this module imported."""
