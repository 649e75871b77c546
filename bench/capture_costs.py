"""Where capture's time goes, counted in the worker process. Imported there, through vLLM's `worker_extension_cls`.

Wall times of two runs on a busy machine differ by more than capture costs; these counters do not.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

from gen.capture.worker import CaptureWorker

# vLLM's own, which CaptureWorker goes on to.
VllmWorker = next(base for base in CaptureWorker.__mro__[1:] if "execute_model" in vars(base))

_seconds: defaultdict[str, float] = defaultdict(float)


def _timed(owner: type, label: str) -> None:
    """Adds the wall time of the owner's `execute_model` to a counter."""
    original = vars(owner)["execute_model"]

    def execute_model(self: Any, *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(self, *args)
        finally:
            _seconds[label] += time.perf_counter() - started

    owner.execute_model = execute_model  # type: ignore[attr-defined]


_timed(CaptureWorker, "with_capture")
_timed(VllmWorker, "without")


class Extension:
    """Adds one method to the worker."""

    def capture_costs(self) -> dict[str, float]:
        """Seconds since the start: of the engine's thread in capture, and CPU seconds of capture's own threads.

        Not of the threads that digest and sync shards, which end with their unit: some 0.2 s for a GB stored.
        """
        costs = {"engine thread": _seconds["with_capture"] - _seconds["without"]}
        for thread in threading.enumerate():
            if thread.name.startswith("capture-") and thread.ident is not None:
                name = thread.name.partition("_")[0].removeprefix("capture-") + " thread"
                costs[name] = costs.get(name, 0.0) + time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        return costs
