"""The generating side's configuration, and what follows from it before an engine starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gen.capture.config import CaptureMode, CaptureOptions
from gen.config import CaptureConfig, ReplicasConfig, SamplingConfig, VerifierConfig
from gen.engine import check_mode, cpu_binding, engine_arguments, supported_mode
from gen.requests import sample_seed
from ray_jobs.config import load_config
from ray_jobs.generate.config import GenerateConfig
from ray_jobs.generate.room import replica_bundle
from storage import SampleKey, StateSpec

CORES = sorted(os.sched_getaffinity(0))
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_replicas_share_the_cores_without_overlap() -> None:
    bindings = [cpu_binding(index, tensor_parallel_size=1, cores=1) for index in range(len(CORES))]
    assert bindings == [str(core) for core in CORES]


def test_every_tensor_parallel_rank_has_its_own_cores() -> None:
    if len(CORES) < 2:
        pytest.skip("needs two cores")
    binding = cpu_binding(0, tensor_parallel_size=2, cores=1)
    assert binding == f"{CORES[0]}|{CORES[1]}"


def test_more_replicas_than_cores_are_refused() -> None:
    with pytest.raises(ValueError, match=r"replicas\.count"):
        cpu_binding(len(CORES), tensor_parallel_size=1, cores=1)
    with pytest.raises(ValueError, match="2 ranks x 1 cores need 2 cores"):
        cpu_binding(0, tensor_parallel_size=2, cores=0)


def test_an_arena_is_refused_where_nothing_would_read_it() -> None:
    with pytest.raises(ValidationError, match="the stock method keeps the states of cached prefixes by itself"):
        CaptureConfig(mode="stock", prefix_arena_gib=1)
    values: dict[str, Any] = {
        "verifier": {"model": "m"},
        "prompts": {"source": "p.jsonl"},
        "sampling": {"max_tokens": 8},
        "dataset": {"uri": "/d"},
        "capture": {"prefix_arena_gib": 1},
    }
    GenerateConfig.model_validate(values)
    with pytest.raises(ValidationError, match="there is no cached prefix"):
        GenerateConfig.model_validate({**values, "replicas": {"enable_prefix_caching": False}})


def test_an_arena_is_refused_for_a_model_that_only_the_stock_method_captures(
    verifier_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those of vLLM's second model runner, which does not run on every machine that tests do."""

    def refuse(_config: Any, options: CaptureOptions) -> None:
        if options.mode != "stock":
            raise ValueError("no hooks")

    verifier, replicas = VerifierConfig(model="embedded"), ReplicasConfig(kv_cache_gib=1)
    spec = StateSpec((2, 15, 27, 30), 576)
    monkeypatch.setattr("gen.capture.vllm_internals.check_supported", refuse)
    assert supported_mode(engine_arguments(verifier_dir, verifier, replicas, spec, "one_pass")) == "stock"
    with pytest.raises(ValueError, match=r"capture\.prefix_arena_gib cannot be used: only the stock method"):
        supported_mode(engine_arguments(verifier_dir, verifier, replicas, spec, "one_pass", 0.5))


def test_the_reference_case_asks_for_gpus_also_before_they_have_joined() -> None:
    config = load_config(CONFIGS / "kimi_k25.yaml", ["dataset.uri=/d"], GenerateConfig)
    assert config.replicas.device == "gpu"
    assert replica_bundle(config.replicas) == {"GPU": 8, "CPU": 1}


def test_an_engine_argument_that_would_undo_the_capture_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"speculative_config, worker_cls cannot be given here"):
        ReplicasConfig(engine_args={"worker_cls": "other", "speculative_config": {}})


@pytest.mark.parametrize(
    "values", [{"pipeline_parallel_size": 2}, {"engine_args": {"pipeline_parallel_size": 2}}], ids=["section", "args"]
)
def test_pipeline_stages_are_refused_with_the_reason(values: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match=r"do not cross pipeline stages in vLLM|do not cross pipeline stages; use"
    ):
        ReplicasConfig(**values)


def test_engine_arguments_say_what_the_sections_say() -> None:
    spec = StateSpec((2, 15, 27, 30), 576)
    arguments = engine_arguments(
        Path("model"),
        VerifierConfig(model="model", max_model_len=1024),
        ReplicasConfig(max_num_batched_tokens=256, engine_args={"block_size": 16}),
        spec,
        "one_pass",
    )
    assert arguments["model"] == "model"
    assert arguments["max_model_len"] == 1024
    assert arguments["max_num_batched_tokens"] == 256
    assert arguments["block_size"] == 16
    assert arguments["distributed_executor_backend"] == "mp"
    assert "speculative_config" not in arguments
    assert "reasoning_parser" not in arguments


def test_a_samples_seed_depends_on_its_key_and_the_runs_seed_alone() -> None:
    key = SampleKey(12, 0, 3)
    assert sample_seed(0, key) == sample_seed(0, SampleKey(12, 0, 3))
    others = {sample_seed(1, key), *(sample_seed(0, key._replace(**{name: 7})) for name in key._fields)}
    assert sample_seed(0, key) not in others
    assert len(others) == 4
    assert 0 <= sample_seed(0, key) < 2**63


def test_sampling_needs_a_length() -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        SamplingConfig()  # type: ignore[call-arg]


@pytest.mark.parametrize("mode", ["one_pass", "stock", "two_pass"])
def test_a_layout_that_cannot_be_captured_is_refused_before_a_process_starts(
    mode: CaptureMode, verifier_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    verifier = VerifierConfig(model=str(verifier_dir), max_model_len=256)
    replicas = ReplicasConfig(enforce_eager=True)
    check_mode(engine_arguments(verifier_dir, verifier, replicas, StateSpec((2, 15, 27, 30), 576), mode))
    wrong = engine_arguments(verifier_dir, verifier, replicas, StateSpec((2, 31), 576), mode)
    with pytest.raises(ValueError, match=r"layer id 31 is outside"):
        check_mode(wrong)
