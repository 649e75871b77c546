"""vLLM's worker with capture: it takes each step's rows before they are sampled from, and serves the client's commands.

Named through vLLM's `worker_cls`; runs in every rank of a replica, and only TP rank 0 keeps rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gen.capture import vllm_internals as internals
from gen.capture.service import CaptureService

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    PlatformWorker = internals.platform_worker_class()


# The KV connector of the stock method lives in the same process and finds the service here.
_services: list[CaptureService] = []


def process_service() -> CaptureService | None:
    """The capture service of this process; None in the ranks that keep no rows."""
    return _services[-1] if _services else None


class CaptureWorker(PlatformWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._capture = internals.read_options(self.vllm_config)
        self._service: CaptureService | None = None
        self._refusal: str | None = None
        internals.check_supported(self.vllm_config, self._capture)

    @property
    def _hooks_runner(self) -> bool:
        return self._capture.mode != "stock"

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        if self._hooks_runner:
            internals.request_states(self.model_runner)
        super().load_model(load_dummy_weights=load_dummy_weights)
        if self._hooks_runner:
            internals.set_layers(self.model_runner, self._capture.spec)
        if self.rank == 0:
            assert self.device is not None
            # Before vLLM measures what is left for the KV cache: the staging buffers are on the device.
            self._service = CaptureService(self._capture, self.device)
            _services.append(self._service)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        if self._service is not None and self._capture.arena_bytes:
            try:
                self._service.use_arena(internals.count_slots(kv_cache_config))
            except ValueError as error:
                # Raised here it would be an engine that does not start, and the parent would not learn why.
                self._refusal = str(error)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if self._hooks_runner:
            internals.probe(self.model_runner, self._capture.spec)
        return times

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        service = self._service
        if service is None:
            return super().execute_model(scheduler_output)
        service.wait_for_room()
        if not self._hooks_runner:
            return super().execute_model(scheduler_output)
        for request_id in scheduler_output.finished_req_ids:
            service.store.end(request_id)
        for request_id in scheduler_output.preempted_req_ids or ():
            service.preempted(request_id)
        for request in internals.new_requests(scheduler_output, self.model_config.max_model_len):
            service.store.begin(request.request_id, request.unit, request.key, request.max_rows)
        output = super().execute_model(scheduler_output)
        step = internals.read_step(self.model_runner, scheduler_output, self._capture.spec)
        if step is not None and self._capture.arena_bytes:
            slots = internals.read_slots(self.model_runner, scheduler_output, step)
            service.take_step_with_slots(step.source, step.requests, slots)
        elif step is not None:
            service.take_step(step.source, step.requests)
        return output

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        if self.current_platform.is_cpu() and not self.use_v2_model_runner:
            with internals.seeded_chunks(self.model_runner):
                return super().sample_tokens(grammar_output)
        return super().sample_tokens(grammar_output)

    def capture_exchange(self, commands: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """Called by CaptureClient through `collective_rpc`; only the rank that keeps rows answers."""
        return self._service.exchange(commands) if self._service is not None else None

    def capture_refusal(self) -> str | None:
        """Why this engine must not be used, found out after its weights were loaded."""
        return self._refusal

    def shutdown(self) -> None:
        if self._service is not None:
            _services.remove(self._service)
            self._service.shutdown()
            self._service = None
        super().shutdown()
