"""The KV connector of capture mode `stock`: takes a finished request's states out of vLLM's paged cache.

vLLM's `extract_hidden_states` speculative method writes the layers' states into a cache beside the KV cache. When a
request finishes, the scheduler's half of this connector keeps its blocks and names them to the worker's half with the
next step, which copies the rows to the capture service and lets the blocks go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from gen.capture.messages import UnitAttempt, decode_request
from storage.types import SampleKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True)
class FinishedRequest:
    """A request whose blocks are kept until its rows are copied."""

    request_id: str
    unit: UnitAttempt
    key: SampleKey
    block_ids: list[int]
    token_ids: list[int]  # those whose rows are in the cache


@dataclass
class CaptureMetadata(KVConnectorMetadata):
    """Scheduler to worker, with every step."""

    finished: list[FinishedRequest] = field(default_factory=list)


@dataclass(frozen=True)
class PagedSource:
    """The rows of one request in the paged cache [blocks, layers, block_size, hidden]."""

    cache: torch.Tensor
    block_ids: Sequence[int]
    token_ids: Sequence[int]

    def gather(self, low: int, high: int, states_NLH: torch.Tensor, token_ids_N: torch.Tensor) -> None:
        block_size = self.cache.shape[2]
        positions = np.arange(low, high)
        blocks = torch.from_numpy(np.asarray(self.block_ids)[positions // block_size]).to(self.cache.device)
        offsets = torch.from_numpy(positions % block_size).to(self.cache.device)
        states_NLH.copy_(self.cache[blocks, :, offsets])
        token_ids_N.copy_(torch.tensor(self.token_ids[low:high], dtype=torch.int32))


def hidden_state_group(kv_cache_config: KVCacheConfig) -> int:
    """Index of the cache group that holds the states: a group of their own, or the only group there is.

    Raises ValueError when there is no such group.
    """
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    groups = kv_cache_config.kv_cache_groups
    found = [index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if len(groups) == 1:
        return 0
    if len(found) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ValueError(f"capture mode stock cannot tell the hidden-state cache among {kinds}; use mode one_pass")
    return found[0]


class CaptureConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only: nothing is ever loaded through it."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group = hidden_state_group(kv_cache_config)
        self._finished: list[FinishedRequest] = []
        self._cache: torch.Tensor | None = None

    def get_finished_count(self) -> int:
        """Only the rank that keeps rows reports; waiting for the others would leak every block."""
        return 1

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """One token's layers adjacent, as vLLM's own connector of this method requires."""
        return "LBNHC"

    # Scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        assert num_external_tokens == 0

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a captured request until its rows are copied."""
        params = request.sampling_params
        marked = decode_request(params.extra_args) if params is not None else None
        # The last token was never read, and an aborted request may have read fewer.
        num_rows = min(request.num_computed_tokens, request.num_tokens - 1)
        if marked is None or num_rows < 1 or not block_ids:
            return False, None
        token_ids = list(request.all_token_ids[:num_rows])
        self._finished.append(FinishedRequest(request.request_id, *marked, list(block_ids), token_ids))
        return True, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # A request that was aborted before it was scheduled has no blocks in any group.
        return self.request_finished(request, block_ids[self._group] if self._group < len(block_ids) else [])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        finished, self._finished = self._finished, []
        return CaptureMetadata(finished)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        [name] = get_layers_from_vllm_config(self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches))
        self._cache = kv_caches[name]
        assert self._kv_cache_config is not None
        group = self._kv_cache_config.kv_cache_groups[self._group]
        block_size = group.kv_cache_spec.block_size
        if name not in group.layer_names or self._cache.ndim != 4 or self._cache.shape[2] != block_size:
            raise ValueError(
                f"hidden-state cache {name} of shape {tuple(self._cache.shape)} where one of group {self._group} and "
                f"of shape [blocks, layers, {block_size}, hidden] was expected: rows would be read from wrong slots"
            )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        from gen.capture.worker import process_service

        service = process_service()
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, CaptureMetadata)
        assert self._cache is not None
        if service is None or not metadata.finished:
            return None, None
        for request in metadata.finished:
            source = PagedSource(self._cache, request.block_ids, request.token_ids)
            service.take_request(request.request_id, request.unit, request.key, source, len(request.token_ids))
        # The rows are gathered on the compute stream, so whatever writes these blocks next comes after.
        return {request.request_id for request in metadata.finished}, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to load."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """The speculative method's own layer has written the states."""

    def wait_for_save(self) -> None:
        """Nothing is saved during a step."""
