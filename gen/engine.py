"""Starting a vLLM engine for capture: environment, arguments, and what is recorded about it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen.config import ReplicasConfig, VerifierConfig
from storage import StateSpec

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from gen.capture.config import CaptureMode

# vLLM takes its second model runner where Triton works; capture hooks into the first one, on CPU and CUDA alike.
ENGINE_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class EngineInfo:
    """What may differ between the commits of one data set, and is therefore recorded with each."""

    vllm_version: str
    tensor_parallel_size: int
    attention_backend: str
    capture_mode: str
    calibration: str  # speeds that the mode was chosen by; empty where it was configured
    node: str
    max_model_len: int
    max_num_batched_tokens: int

    def as_info(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


def cpu_binding(index: int, tensor_parallel_size: int, cores: int) -> str:
    """vLLM's `VLLM_CPU_OMP_THREADS_BIND` for one of the replicas of this node: `cores` of its own for each TP rank.

    Left to itself vLLM keeps cores for its front end and every engine takes the same ones. `index` counts the node's
    replicas.

    Raises ValueError when this node has not that many cores.
    """
    available = sorted(os.sched_getaffinity(0))
    needed = (index + 1) * tensor_parallel_size * max(cores, 1)
    if needed > len(available) or cores < 1:
        raise ValueError(
            f"replicas: {index + 1} replicas on a node x {tensor_parallel_size} ranks x {max(cores, 1)} cores need "
            f"{needed} cores, this one has {len(available)}; lower replicas.count or replicas.cores"
        )
    first = index * tensor_parallel_size
    groups = [available[rank * cores : (rank + 1) * cores] for rank in range(first, first + tensor_parallel_size)]
    return "|".join(",".join(map(str, group)) for group in groups)


def set_environment(replicas: ReplicasConfig, cpu_binding: str | None) -> None:
    """Set what vLLM reads from the environment; before vLLM is imported."""
    os.environ.update(ENGINE_ENVIRONMENT)
    if cpu_binding is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cpu_binding
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(replicas.kv_cache_gib)


def engine_arguments(
    directory: Path,
    verifier: VerifierConfig,
    replicas: ReplicasConfig,
    spec: StateSpec,
    mode: CaptureMode,
    prefix_arena_gib: float | None = None,
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs for one replica that captures in `mode`."""
    from gen.capture.config import capture_engine_args

    arguments: dict[str, Any] = {
        "model": str(directory),
        "dtype": verifier.dtype,
        "kv_cache_dtype": verifier.kv_cache_dtype,
        "trust_remote_code": verifier.trust_remote_code,
        "tensor_parallel_size": replicas.tensor_parallel_size,
        "max_num_seqs": replicas.max_num_seqs,
        "gpu_memory_utilization": replicas.gpu_memory_utilization,
        "enforce_eager": replicas.enforce_eager,
        "enable_prefix_caching": replicas.enable_prefix_caching,
        # Inside a Ray placement group vLLM would take its Ray executor for TP > 1; a replica that fits a node is
        # tested with `mp`.
        "distributed_executor_backend": "mp",
    }
    optional: Mapping[str, Any] = {
        "max_model_len": verifier.max_model_len,
        "max_num_batched_tokens": replicas.max_num_batched_tokens,
        "reasoning_parser": verifier.reasoning_parser,
    }
    arguments.update({name: value for name, value in optional.items() if value is not None})
    arguments.update(replicas.engine_args)
    sizes = {} if prefix_arena_gib is None else {"arena_bytes": int(prefix_arena_gib * 2**30)}
    arguments.update(capture_engine_args(mode, spec, **sizes))
    return arguments


def supported_mode(arguments: Mapping[str, Any]) -> CaptureMode:
    """The mode that `auto` starts an engine with: one_pass where vLLM's model and runner can be hooked, else stock.

    `arguments` are those of one_pass. Nothing is loaded. Raises ValueError with the reasons when neither works.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    from gen.capture.vllm_internals import check_supported, read_options

    config = AsyncEngineArgs(**arguments).create_engine_config()
    options = read_options(config)
    try:
        check_supported(config, options)
    except ValueError as reason:
        try:
            check_supported(config, replace(options, mode="stock", arena_bytes=0))
        except ValueError as stock_reason:
            raise ValueError(f"capture.mode one_pass: {reason}; stock: {stock_reason}") from stock_reason
        if options.arena_bytes:
            raise ValueError(
                f"capture.prefix_arena_gib cannot be used: only the stock method captures this model ({reason})"
            ) from reason
        return "stock"
    return "one_pass"


def check_mode(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError with the reason when an engine with these arguments could not capture. Nothing is loaded.

    The worker refuses too, but of what a worker process raises its parent learns only that it ended.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    from gen.capture.vllm_internals import check_supported, read_options

    config = AsyncEngineArgs(**arguments).create_engine_config()
    check_supported(config, read_options(config))


def start_engine(arguments: Mapping[str, Any]) -> AsyncLLM:
    """Start vLLM. Blocks until the weights are loaded (minutes for a large verifier)."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def describe_engine(engine: AsyncLLM, capture_mode: str, calibration: str) -> EngineInfo:
    """Read the facts of a running engine."""
    import platform

    import vllm

    config = engine.vllm_config
    backend = config.attention_config.backend
    return EngineInfo(
        vllm_version=vllm.__version__,
        tensor_parallel_size=config.parallel_config.tensor_parallel_size,
        attention_backend=backend.name if backend is not None else "automatic",
        capture_mode=capture_mode,
        calibration=calibration,
        node=platform.node(),
        max_model_len=config.model_config.max_model_len,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
    )
