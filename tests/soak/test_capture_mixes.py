"""Random mixes of requests for many minutes on each of several engines, every sample compared with Hugging Face.

`HEADRACE_SOAK_MINUTES` (default 3) is the time for each engine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from capture_engine import MAX_MODEL_LEN, SMOLLM_SPEC, Engine
from capture_mixes import Mix, example_prompts, metric, mixes, run_mix, smollm_reference
from capture_reference import Reference
from hypothesis import HealthCheck, given, seed, settings

from gen.capture.config import CaptureMode

SECONDS = 60 * float(os.environ.get("HEADRACE_SOAK_MINUTES", "3"))
SEED = 20261130
ENGINES: dict[str, tuple[CaptureMode, dict[str, Any]]] = {
    "prefix_arena": ("one_pass", {"arena_bytes": 1 << 30}),
    "prefix_cache_not_read": ("one_pass", {}),
    "no_prefix_cache_small_chunks": ("one_pass", {"enable_prefix_caching": False, "max_num_batched_tokens": 64}),
    "stock": ("stock", {"max_num_seqs": 16, "num_gpu_blocks_override": 96}),
}


@pytest.fixture(scope="module")
def reference(verifier_dir: Path) -> Reference:
    return smollm_reference(verifier_dir)


@pytest.mark.timeout(4 * SECONDS + 1200)
@pytest.mark.parametrize("name", ENGINES)
def test_random_mixes_for_long(name: str, verifier_dir: Path, reference: Reference, tmp_path: Path) -> None:
    mode, arguments = ENGINES[name]
    small = {"max_num_batched_tokens": 128, "max_num_seqs": 64, "block_size": 32, "num_gpu_blocks_override": 48}
    engine = Engine(
        verifier_dir,
        SMOLLM_SPEC,
        mode,
        tmp_path,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        **{**small, **arguments},
    )
    questions = example_prompts(verifier_dir)
    num_mixes = num_samples = 0
    before = {name: metric(name) for name in ("num_preemptions", "prefix_cache_hits")}

    @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(mix=mixes(24, 60, two_passes=mode == "one_pass"))
    def try_mix(mix: Mix) -> None:
        nonlocal num_mixes, num_samples
        if time.monotonic() > deadline:
            return
        num_samples += run_mix(engine, mix, questions, reference)
        num_mixes += 1

    deadline = time.monotonic() + SECONDS
    try:
        round_number = 0
        while time.monotonic() < deadline:
            seed(SEED + round_number)(try_mix)()
            round_number += 1
    finally:
        counts = ", ".join(f"{metric(name) - value} {name}" for name, value in before.items())
        engine.close()
        print(f"{name}: {num_mixes} mixes, {num_samples} samples, {counts}")
    assert num_samples > 0
