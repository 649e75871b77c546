"""Ask vLLM's own code about drafts, in a process of its own.

The process parses the verifier's and the draft's configuration as an engine would (ModelConfig, SpeculativeConfig),
reads the layer ids with the code of both model runners, builds the draft alone and lets vLLM's loader fill it. The
verifier's weights are never touched. A process of its own because vLLM wants its distributed groups, environment
variables and logging to itself; one process serves any number of drafts because importing vLLM takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROBE_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    # The check runs beside whatever uses the machine's accelerators.
    "CUDA_VISIBLE_DEVICES": "",
}
TIMEOUT_S = 600
# Importing torch, transformers and vLLM makes millions of objects that live to the end: without the garbage collector
# looking through them again and again it takes a fifth less.
LAUNCH = "import gc; gc.disable(); from draft.validate.probe_process import main; main()"


@dataclass(frozen=True)
class EngineReport:
    """What vLLM made of one draft.

    transformers_class: what transformers.AutoConfig makes of config.json; transformers_error: why it refuses it (both
    None for a nested file, which is no transformers configuration).
    config_error: why ModelConfig or SpeculativeConfig refused it. load_error: why building or loading failed.
    parsed: the fields of the draft's hf_config that the draft model reads. unfilled: parameters that the loader left
    untouched. altered: parameters that do not hold what the file holds (a silently narrowed tensor). ignored: tensors
    of the file that no parameter takes. rope_difference: the largest difference between vLLM's table of cosines and
    sines and that of transformers, which training uses; None where there is none to compare.
    """

    vllm_version: str = ""
    transformers_class: str | None = None
    transformers_error: str | None = None
    config_error: str | None = None
    architecture: str | None = None
    parsed: dict[str, Any] = field(default_factory=dict)
    layer_ids_v1: list[int] | None = None
    layer_ids_v2: list[int] | None = None
    load_error: str | None = None
    unfilled: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    rope_difference: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class ProbeFailedError(RuntimeError):
    """The process ended without an answer, or gave none in time."""


class Probe:
    """A running probe process. Start it early: it imports vLLM while the caller does other work."""

    def __init__(self, pairs: Sequence[tuple[Path, Path]]) -> None:
        """`pairs`: verifier and draft directories."""
        self._pairs = [(str(verifier.resolve()), str(draft.resolve())) for verifier, draft in pairs]
        self._answer = tempfile.NamedTemporaryFile(prefix="headrace-probe-", suffix=".json")  # noqa: SIM115
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # Answers go to a file and output to another: vLLM and what it imports print as they like.
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, json.dumps(self._pairs), self._answer.name],
            env={**os.environ, **PROBE_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def reports(self, timeout_s: float = TIMEOUT_S) -> list[EngineReport]:
        """Wait for the process and return one report for each pair. Raises ProbeFailedError."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ProbeFailedError(f"vLLM did not answer within {timeout_s:.0f} s about {self._pairs}") from error
        finally:
            self.close()
        answer = Path(self._answer.name).read_text()
        if self._process.returncode or not answer:
            self._log.seek(0)
            tail = self._log.read().decode(errors="replace")[-2000:]
            raise ProbeFailedError(f"the process that asks vLLM ended with code {self._process.returncode}:\n{tail}")
        return [EngineReport(**report) for report in json.loads(answer)]

    def close(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
