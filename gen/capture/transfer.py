"""A step's rows on their way from the model's outputs to the requests' buffers in host memory.

Rows travel in pieces. A piece is a staging buffer [piece_rows, layers, hidden] on the device with a twin in pinned host
memory; on CPU the two are the same tensor. The model's auxiliary outputs are gathered into the device half on the
compute stream (a device-to-device copy, so the next step may reuse its buffers), cross to the host half on a side
stream, and are scattered to the requests by a thread that waits for the copy. A piece is used again only when its rows
are scattered: a slow host makes the engine wait, and neither device nor host memory grows with the length of a request.

Measured on CPU. The CUDA path shares everything but the stream, the events and the pinned memory, and was never run.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from gen.capture.arena import CachedPrefix, PrefixArena
from gen.capture.rows import Span
from storage.types import StateSpec


class RowSource(Protocol):
    """Rows on the device, to be gathered in any contiguous range."""

    def gather(self, low: int, high: int, states_NLH: torch.Tensor, token_ids_N: torch.Tensor) -> None:
        """Copy rows `low` to `high` and the tokens they were computed from into staging tensors, on the current
        stream. Afterwards the source may be overwritten by work queued on that stream."""


@dataclass(frozen=True)
class StepSource:
    """The auxiliary outputs of one step: one [at least N, hidden] tensor per layer id."""

    layers_ND: Sequence[torch.Tensor]
    token_ids_N: torch.Tensor

    def gather(self, low: int, high: int, states_NLH: torch.Tensor, token_ids_N: torch.Tensor) -> None:
        for index, layer_ND in enumerate(self.layers_ND):
            states_NLH[:, index].copy_(layer_ND[low:high])
        token_ids_N.copy_(self.token_ids_N[low:high])


_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BIT_DTYPES = {2: torch.uint16, 4: torch.uint32}


def torch_dtype(spec: StateSpec) -> torch.dtype:
    return _TORCH_DTYPES[spec.dtype]


class _Piece:
    """One staging buffer: the device half and its host twin (the same tensors on CPU)."""

    def __init__(self, num_rows: int, spec: StateSpec, device: torch.device) -> None:
        shape = (num_rows, len(spec.layer_ids), spec.hidden_size)
        self.states = torch.empty(shape, dtype=torch_dtype(spec), device=device)
        self.token_ids = torch.empty(num_rows, dtype=torch.int32, device=device)
        if device.type == "cpu":
            host_states, host_token_ids = self.states, self.token_ids
        else:
            host_states = torch.empty(shape, dtype=self.states.dtype, pin_memory=True)
            host_token_ids = torch.empty(num_rows, dtype=torch.int32, pin_memory=True)
        self.host_states = host_states
        self.host_token_ids = host_token_ids
        # numpy has no bf16: the same memory as bits
        self.host_states_np = host_states.view(_BIT_DTYPES[host_states.element_size()]).numpy()
        self.host_token_ids_np = host_token_ids.numpy()


class RowTransfer:
    """Moves rows from a step's outputs to the requests' buffers.

    `threaded` scatters in a thread, as the CUDA path needs (it must wait for the copy without holding up the step); on
    CPU the rows are there already and scattering in place costs the forward pass no core.
    """

    def __init__(
        self,
        spec: StateSpec,
        device: torch.device,
        *,
        piece_bytes: int = 32 << 20,
        num_pieces: int = 4,
        threaded: bool | None = None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._piece_rows = max(1, piece_bytes // spec.row_bytes)
        self._free: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
        for _ in range(num_pieces):
            self._free.put(_Piece(self._piece_rows, spec, device))
        if threaded is None:
            threaded = device.type != "cpu"
        self._scatterer = ThreadPoolExecutor(1, thread_name_prefix="capture-scatter") if threaded else None
        self._in_flight: list[Future[None]] = []
        self._side_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arena: PrefixArena | None = None

    def use_arena(self, arena: PrefixArena) -> None:
        """Keep every row of `submit_all` in the arena as well; before the first step."""
        self._arena = arena

    def submit_all(
        self, source: RowSource, spans: Sequence[Span], slots_N: np.ndarray, prefixes: Sequence[CachedPrefix]
    ) -> None:
        """As `submit`, for all rows of a step, whose keys and values are in these slots of the KV cache."""
        arena = self._arena
        assert arena is not None
        self._check_in_flight()
        for prefix in prefixes:
            self._in_order(prefix.announce)
        for low in range(0, len(slots_N), self._piece_rows):
            high = min(low + self._piece_rows, len(slots_N))
            inside = [span for span in spans if span.first < high and span.first + span.count > low]
            self._send(source, low, high, inside, slots_N[low:high])
        for prefix in prefixes:
            self._in_order(partial(prefix.fill, arena))

    def submit(self, source: RowSource, spans: Sequence[Span]) -> None:
        """Send rows on their way; `spans` ascend. The source may be overwritten by the next step on the same stream.

        Raises what went wrong with earlier rows.
        """
        self._check_in_flight()
        if not spans:
            return
        end = spans[-1].first + spans[-1].count
        for low in range(spans[0].first, end, self._piece_rows):
            high = min(low + self._piece_rows, end)
            inside = [span for span in spans if span.first < high and span.first + span.count > low]
            if inside:
                self._send(source, low, high, inside)

    def _send(
        self, source: RowSource, low: int, high: int, spans: Sequence[Span], slots_N: np.ndarray | None = None
    ) -> None:
        piece = self._free.get()
        count = high - low
        source.gather(low, high, piece.states[:count], piece.token_ids[:count])
        event = self._start_copy(piece, count)

        def scatter() -> None:
            if event is not None:
                event.synchronize()
            if slots_N is not None and self._arena is not None:
                self._arena.write(slots_N, piece.host_states_np[:count], piece.host_token_ids_np[:count])
            for span in spans:
                first, last = max(span.first, low), min(span.first + span.count, high)
                span.rows.put(
                    span.position + first - span.first,
                    piece.host_states_np[first - low : last - low],
                    piece.host_token_ids_np[first - low : last - low],
                )
            self._free.put(piece)

        self._in_order(scatter)

    def _start_copy(self, piece: _Piece, count: int) -> torch.cuda.Event | None:
        if self._side_stream is None:
            return None
        self._side_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side_stream):
            piece.host_states[:count].copy_(piece.states[:count], non_blocking=True)
            piece.host_token_ids[:count].copy_(piece.token_ids[:count], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._side_stream)
        return event

    def _in_order(self, action: Callable[[], None]) -> None:
        if self._scatterer is None:
            action()
        else:
            self._in_flight.append(self._scatterer.submit(action))

    def then(self, action: Callable[[], None]) -> None:
        """Run an action on requests' buffers after all rows submitted so far."""
        self._in_order(action)

    def fence(self) -> Future[None] | None:
        """Done when all rows submitted so far are in their buffers; None when they are already."""
        return self._in_flight[-1] if self._in_flight else None

    def _check_in_flight(self) -> None:
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.pop(0).result()

    def close(self) -> None:
        if self._scatterer is not None:
            self._scatterer.shutdown()
