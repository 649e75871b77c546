"""The shard writers of all open units, driven by one thread beside the forward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from storage.shards import ShardWriter, open_shard_writer
from storage.types import FileEntry, ShardTarget

P = ParamSpec("P")
T = TypeVar("T")


class ShardThread:
    """Runs jobs in order in one thread and bounds the bytes that wait for it."""

    def __init__(self, max_queued_bytes: int) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="capture-shards")
        self._max_queued_bytes = max_queued_bytes
        self._queued_bytes = 0
        self._room = threading.Condition()
        self._writers: dict[int, ShardWriter] = {}

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def submit(self, nbytes: int, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a job that holds `nbytes` of host memory until it is done. Its error is the future's."""
        with self._room:
            self._queued_bytes += nbytes
        future = self._thread.submit(job, *args, **kwargs)
        future.add_done_callback(lambda _: self._release(nbytes))
        return future

    def _release(self, nbytes: int) -> None:
        with self._room:
            self._queued_bytes -= nbytes
            self._room.notify_all()

    def wait_for_room(self) -> None:
        """Block while more than the allowed bytes wait. The thread depends on nobody else, so this ends."""
        with self._room:
            self._room.wait_for(lambda: self._queued_bytes <= self._max_queued_bytes)

    # The rest runs in the thread, through `submit`.

    def open(self, target: ShardTarget) -> None:
        self._writers[target.unit] = open_shard_writer(target)

    def writer(self, unit: int) -> ShardWriter:
        return self._writers[unit]

    def close(self, unit: int) -> list[FileEntry]:
        return self._writers.pop(unit).close()

    def abort(self, unit: int) -> None:
        writer = self._writers.pop(unit, None)
        if writer is not None:
            writer.abort()

    def shutdown(self) -> None:
        """Abandon what is queued and the shards of every unit that is still open."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        for unit in list(self._writers):
            self.abort(unit)
