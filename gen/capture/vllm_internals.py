"""Every private name of vLLM that capture touches, in one place.

The names are those of the first model runner of vLLM 0.32 (`VLLM_USE_V2_MODEL_RUNNER=0`). Each function checks what it
touches and says by name what is gone; `tests/unit/test_capture_internals.py` fails when vLLM changes one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gen.capture.arena import StepSlots
from gen.capture.config import CONFIG_KEY, CaptureOptions
from gen.capture.messages import UnitAttempt, decode_request
from gen.capture.transfer import StepSource, torch_dtype
from storage.types import SampleKey, StateSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Attributes of a model runner instance.
RUNNER_NAMES = (
    "use_aux_hidden_state_outputs",
    "execute_model_state",
    "input_batch",
    "input_ids",
    "discard_request_mask",
    "_dummy_run",
)


def platform_worker_class() -> type:
    """The worker class vLLM itself would take on this machine."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    if not current_platform.is_cuda_alike():
        raise ValueError(f"capture runs on CPU and CUDA; vLLM's platform here is {current_platform.device_name!r}")
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def read_options(config: VllmConfig) -> CaptureOptions:
    """The capture options an engine was started with (see `capture_engine_args`)."""
    additional = config.additional_config
    if not isinstance(additional, dict) or CONFIG_KEY not in additional:
        raise ValueError(f"additional_config has no {CONFIG_KEY!r}: merge capture_engine_args() into the engine's")
    return CaptureOptions.from_json(additional[CONFIG_KEY])


def check_supported(config: VllmConfig, options: CaptureOptions) -> None:
    """Refuse a model or a parallel layout whose states cannot be captured, before any weight is loaded.

    Raises ValueError with the reason.
    """
    from vllm.model_executor.model_loader.utils import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    model, parallel, spec = config.model_config, config.parallel_config, options.spec
    name = ", ".join(getattr(model.hf_config, "architectures", None) or [model.model])
    text = model.hf_text_config
    if not supports_eagle3(get_model_cls(model)):
        raise ValueError(
            f"{name} cannot be captured: vLLM's model does not hand out intermediate states (no SupportsEagle3)"
        )
    num_layers = text.num_hidden_layers
    if spec.layer_ids[-1] > num_layers:
        raise ValueError(f"layer id {spec.layer_ids[-1]} is outside {name}: its ids are 0 to {num_layers}")
    if spec.hidden_size != model.get_hidden_size():
        raise ValueError(f"hidden_size {spec.hidden_size} is not that of {name}, {model.get_hidden_size()}")
    if torch_dtype(spec) != model.dtype:
        raise ValueError(f"state dtype {spec.dtype} is not that of {name} in this engine, {model.dtype}")
    refused = {
        "pipeline_parallel_size": "intermediate states do not cross pipeline stages; use tensor parallelism",
        "data_parallel_size": "one engine per replica; start more replicas",
        "prefill_context_parallel_size": "a rank would see only its share of a prompt's tokens",
        "decode_context_parallel_size": "not tested with capture",
    }
    for field, reason in refused.items():
        if getattr(parallel, field) > 1:
            raise ValueError(f"capture does not work with {field}={getattr(parallel, field)}: {reason}")
    if options.mode == "stock":
        return
    if config.use_v2_model_runner:
        raise ValueError(
            f"capture mode {options.mode} hooks into vLLM's first model runner: set VLLM_USE_V2_MODEL_RUNNER=0 before "
            "vLLM is imported, or use capture mode `stock`"
        )
    if config.speculative_config is not None:
        raise ValueError(f"capture mode {options.mode} does not work with speculative decoding in the verifier engine")
    if parallel.use_ubatching:
        raise ValueError("capture does not work with micro-batches (enable_dbo): the states of a step come in parts")


def check_runner(runner: Any) -> None:
    """Raises RuntimeError naming what this version of vLLM's model runner lacks."""
    missing = [name for name in RUNNER_NAMES if not hasattr(runner, name)]
    if missing:
        import vllm

        raise RuntimeError(
            f"vLLM {vllm.__version__}: {type(runner).__name__} has no {', '.join(missing)}, which one-pass capture "
            "reads; use the vLLM version of requirements/, or capture mode `stock`"
        )


def request_states(runner: Any) -> None:
    """Have the model return its auxiliary states; before `load_model`, so that graphs are captured with them."""
    check_runner(runner)
    runner.use_aux_hidden_state_outputs = True


def set_layers(runner: Any, spec: StateSpec) -> None:
    """Set which layers' states the model returns; after `load_model`, before the first forward pass."""
    runner.get_model().set_aux_hidden_state_layers(spec.layer_ids)


def probe(runner: Any, spec: StateSpec) -> None:
    """Run two dummy tokens and check the number, shape and dtype of the states that come out.

    Some models silently ignore an id, the one past the last layer above all; nothing else would notice before the
    first sample.

    Raises RuntimeError.
    """
    seen: list[Any] = []
    hook = runner.get_model().register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        runner._dummy_run(2)
    finally:
        hook.remove()
    if not seen or not isinstance(seen[0], tuple) or len(seen[0]) != 2:
        raise RuntimeError(f"{type(runner.get_model()).__name__} returned no auxiliary states with its hidden states")
    check_states(seen[0][1], spec, 2)


def check_states(layers_ND: Sequence[torch.Tensor], spec: StateSpec, num_tokens: int) -> None:
    """Raises RuntimeError when a step's auxiliary states are not one [>= num_tokens, hidden] tensor per layer id."""
    if len(layers_ND) != len(spec.layer_ids):
        raise RuntimeError(
            f"the model returned states of {len(layers_ND)} layers for the ids {list(spec.layer_ids)}; "
            "it ignores some of them, and which ones cannot be known"
        )
    for layer_id, layer_ND in zip(spec.layer_ids, layers_ND, strict=True):
        if layer_ND.ndim != 2 or layer_ND.shape[0] < num_tokens or layer_ND.shape[1] != spec.hidden_size:
            raise RuntimeError(
                f"layer {layer_id}: states of shape {tuple(layer_ND.shape)} for {num_tokens} tokens of hidden size "
                f"{spec.hidden_size}"
            )
        if layer_ND.dtype != torch_dtype(spec):
            raise RuntimeError(f"layer {layer_id}: states are {layer_ND.dtype}, the data set's are {spec.dtype}")


@contextmanager
def seeded_chunks(runner: Any) -> Iterator[None]:
    """Around `sample_tokens` on CPU: keep the generators of requests whose sampled token will be thrown away out of it.

    A chunked prefill samples a token that nobody wants, after which vLLM rewinds a seeded request's generator by its
    offset. CPU generators have none, so in vLLM 0.32 a seeded prompt longer than what is left of a step's token budget
    kills the engine ("CPU Generator does not use offset"). A generator that is not used needs no rewinding.
    """
    batch = runner.input_batch
    mask = runner.discard_request_mask.np[: batch.num_reqs]
    held = {index: batch.generators.pop(index) for index in list(batch.generators) if mask[index]}
    try:
        yield
    finally:
        batch.generators.update(held)


@dataclass(frozen=True)
class NewRequest:
    """A request that enters the engine and wants its states captured."""

    request_id: str
    unit: UnitAttempt
    key: SampleKey
    max_rows: int


def new_requests(scheduler_output: SchedulerOutput, max_model_len: int) -> list[NewRequest]:
    """Requests of this step that were never scheduled before and carry a sample key."""
    found = []
    for request in scheduler_output.scheduled_new_reqs:
        params = request.sampling_params
        marked = decode_request(params.extra_args) if params is not None else None
        if params is None or marked is None:
            continue
        assert request.prompt_token_ids is not None
        max_rows = len(request.prompt_token_ids) + (params.max_tokens or max_model_len)
        found.append(NewRequest(request.req_id, *marked, max_rows=min(max_rows, max_model_len)))
    return found


def count_slots(kv_cache_config: KVCacheConfig) -> int:
    """Slots of the KV cache, by which the arena keeps states.

    Raises ValueError for a model whose layers are cached in groups of their own (sliding windows, state-space layers):
    the slots of one group do not hold every token.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(
            f"capture.prefix_arena_gib: this model's layers are cached in {len(groups)} groups, and not every token "
            "has a slot in each of them; leave it out"
        )
    return int(kv_cache_config.num_blocks) * int(groups[0].kv_cache_spec.block_size)


def read_slots(runner: Any, scheduler_output: SchedulerOutput, step: Step) -> StepSlots:
    """The slots of a step's rows, and those of the cached prefixes that requests of this step start behind."""
    table = runner.input_batch.block_table[0]
    blocks, size = table.block_table.np, table.block_size
    begins = {request.req_id for request in scheduler_output.scheduled_new_reqs}
    begins |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
    slots, prefixes = [], {}
    for row, (request_id, position, count) in enumerate(step.requests):
        first = 0 if request_id in begins else position
        positions = np.arange(first, position + count)
        request_slots = blocks[row, positions // size].astype(np.int64) * size + positions % size
        if first < position:
            prefixes[request_id] = request_slots[:position]
        slots.append(request_slots[position - first :])
    return StepSlots(np.concatenate(slots), prefixes)


@dataclass(frozen=True)
class Step:
    """What one forward pass computed, before sampling."""

    source: StepSource
    requests: list[tuple[str, int, int]]  # (request id, first position, count) in the order of the rows


def read_step(runner: Any, scheduler_output: SchedulerOutput, spec: StateSpec) -> Step | None:
    """The states of the step that the runner has just computed; None when it computed nothing.

    Call it between `execute_model` and `sample_tokens`. Raises RuntimeError when the states are not of the spec.
    """
    state = runner.execute_model_state
    if state is None or scheduler_output.total_num_scheduled_tokens == 0:
        return None
    assert state.scheduler_output is scheduler_output
    cached = scheduler_output.scheduled_cached_reqs
    positions = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    positions.update((request.req_id, request.num_computed_tokens) for request in scheduler_output.scheduled_new_reqs)
    counts = scheduler_output.num_scheduled_tokens
    # The batch orders its rows as it likes; req_ids is that order.
    requests = [(name, positions[name], counts[name]) for name in runner.input_batch.req_ids]
    assert sum(count for _, _, count in requests) == scheduler_output.total_num_scheduled_tokens
    check_states(state.aux_hidden_states, spec, scheduler_output.total_num_scheduled_tokens)
    # The sampled tokens of an asynchronous scheduler reach only the device half of the buffer.
    return Step(StepSource(state.aux_hidden_states, runner.input_ids.gpu), requests)
