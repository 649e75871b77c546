"""Drafts really load into vLLM beside the embedded verifier and speculate, in both forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draft.checkpoint import write_checkpoint
from draft.config import DraftConfig
from draft.export import export
from draft.serve import speculative_config
from draft.vocab import mapping_from_targets

NUM_TOKENS = 24
PROMPT = "The capital of France is"

# A process of its own for each engine: vLLM's CPU worker binds threads and allocators for the life of a process.
SERVE = """
import json, sys
from vllm import LLM, SamplingParams

verifier, speculative, prompt, num_tokens = json.loads(sys.argv[1])
llm = LLM(
    verifier,
    speculative_config=speculative,
    enforce_eager=True,
    max_model_len=256,
    max_num_seqs=4,
    dtype="bfloat16",
    disable_log_stats=False,
)
[output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=num_tokens), use_tqdm=False)
counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
answer = {
    "token_ids": list(output.outputs[0].token_ids),
    "drafts": counters.get("vllm:spec_decode_num_drafts", 0),
    "draft_tokens": counters.get("vllm:spec_decode_num_draft_tokens", 0),
}
print("ANSWER" + json.dumps(answer))
"""


def serve(verifier: Path, speculative: dict[str, object] | None) -> dict[str, object]:
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    question = json.dumps([str(verifier), speculative, PROMPT, NUM_TOKENS])
    done = subprocess.run(
        [sys.executable, "-c", SERVE, question], env=environment, capture_output=True, text=True, timeout=500
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    assert answers, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0
    return json.loads(answers[-1].removeprefix("ANSWER"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, verifier_dir: Path) -> Path:
    """An untrained draft: what it proposes is nearly always refused, so that outputs are the verifier's own."""
    config = DraftConfig.from_verifier(verifier_dir, draft_vocab_size=4096)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        for name, shape in config.tensor_shapes().items()
    }
    mapping = mapping_from_targets(torch.arange(4096).numpy() * 12, config.vocab_size)
    tensors |= {"d2t": torch.from_numpy(mapping.d2t), "t2d": torch.from_numpy(mapping.t2d)}
    return write_checkpoint(tmp_path_factory.mktemp("draft") / "checkpoint", config, tensors, {})


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_draft_loads_and_speculates(tmp_path: Path, verifier_dir: Path, checkpoint: Path, form: str) -> None:
    draft = export(checkpoint, tmp_path / "draft", form)  # type: ignore[arg-type]
    served = serve(verifier_dir, speculative_config(draft, 3))
    assert len(served["token_ids"]) == NUM_TOKENS
    assert served["drafts"] >= NUM_TOKENS / 4
    assert served["draft_tokens"] == 3 * served["drafts"]


def test_model_config_has_no_task_field(verifier_dir: Path) -> None:
    """Drafts are parsed through SpeculativeConfig (runner "draft"): `task` is gone from ModelConfig."""
    from pydantic import ValidationError
    from vllm.config import ModelConfig

    with pytest.raises((TypeError, ValidationError), match="task"):
        ModelConfig(model=str(verifier_dir), task="draft")  # type: ignore[call-arg]
