"""Capture modes and the vLLM engine arguments each of them needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gen.capture.messages import decode_spec, encode_spec
from storage.types import StateSpec

# one_pass: the worker copies each step's rows while it generates. stock: vLLM's `extract_hidden_states` speculative
# method with our KV connector (any model, either model runner; one dummy draft token a step, states in the KV pool).
# two_pass: plain generation, then one prefill of prompt and answer with capture.
CaptureMode = Literal["one_pass", "stock", "two_pass"]

CONFIG_KEY = "headrace_capture"


@dataclass(frozen=True)
class CaptureOptions:
    """What the worker process needs to know. Part of vLLM's `additional_config`, hence of its compile-cache key: a
    graph compiled for other layers is never taken from the cache."""

    mode: CaptureMode
    spec: StateSpec
    queue_bytes: int = 1 << 30  # raw bytes of finished samples that may wait for the shard writer before steps wait
    piece_bytes: int = 32 << 20  # size of one staging piece; a step's rows cross to the host piece by piece
    num_pieces: int = 4
    num_encoders: int = 0  # threads that check and encode finished samples; 0: chosen by the device
    arena_bytes: int = 0  # host memory for the states of cached prefixes; 0: prefixes are computed again

    def __post_init__(self) -> None:
        if self.mode not in get_args(CaptureMode):
            raise ValueError(f"capture.mode {self.mode!r} is not one of {', '.join(get_args(CaptureMode))}")
        for name in ("queue_bytes", "piece_bytes", "num_pieces"):
            if getattr(self, name) < 1:
                raise ValueError(f"capture.{name} {getattr(self, name)} must be positive")
        if self.arena_bytes and self.mode == "stock":
            raise ValueError("capture.prefix_arena_gib: the stock method keeps the states of cached prefixes by itself")

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "spec": encode_spec(self.spec),
            "queue_bytes": self.queue_bytes,
            "piece_bytes": self.piece_bytes,
            "num_pieces": self.num_pieces,
            "num_encoders": self.num_encoders,
            "arena_bytes": self.arena_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaptureOptions:
        return cls(**{**data, "spec": decode_spec(data["spec"])})


def capture_engine_args(mode: CaptureMode, spec: StateSpec, **options: int) -> dict[str, Any]:
    """Arguments to merge into vLLM's (Async)EngineArgs so that the engine captures `spec`'s layers.

    `options` are the sizes of CaptureOptions. `gen.engine.ENGINE_ENVIRONMENT` must be set before vLLM is imported.

    Raises ValueError for an unknown mode or a size that is not positive.
    """
    args: dict[str, Any] = {
        "worker_cls": "gen.capture.worker.CaptureWorker",
        "additional_config": {CONFIG_KEY: CaptureOptions(mode, spec, **options).to_json()},
    }
    if mode == "stock":
        args["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.layer_ids)}},
        }
        args["kv_transfer_config"] = {
            "kv_connector": "CaptureConnector",
            "kv_connector_module_path": "gen.capture.connector",
            "kv_role": "kv_producer",
        }
    return args
