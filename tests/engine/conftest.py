"""Real vLLM engines, shared by the tests of this tier: one start costs 20 to 35 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from capture_engine import MAX_MODEL_LEN, SMOLLM_SPEC, Engine
from capture_mixes import example_prompts, smollm_reference
from capture_reference import Reference


@pytest.fixture(scope="session")
def reference(verifier_dir: Path) -> Reference:
    return smollm_reference(verifier_dir)


@pytest.fixture(scope="session")
def prompts(verifier_dir: Path) -> list[list[int]]:
    return example_prompts(verifier_dir)


@pytest.fixture(scope="session")
def smollm_engine(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SmolLM2 with a token budget and a KV cache that are both too small for 64 requests at once."""
    engine = Engine(
        verifier_dir,
        SMOLLM_SPEC,
        "one_pass",
        tmp_path_factory.mktemp("smollm"),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=128,
        max_num_seqs=64,
        block_size=32,
        num_gpu_blocks_override=48,
        arena_bytes=1 << 30,
        enforce_eager=True,
    )
    yield engine
    engine.close()
