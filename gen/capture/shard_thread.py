"""The shard writers of all open units, driven by one thread beside the forward pass, with encoders beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from gen.capture.messages import UnitAttempt
from storage.shards import ShardWriter, open_shard_writer
from storage.types import FileEntry, ShardTarget

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E")


class ShardThread:
    """Runs jobs in order in one thread and bounds the bytes that wait for it.

    What a sample needs before it is written (checks, encoding) is done ahead by `num_encoders` threads.
    """

    def __init__(self, max_queued_bytes: int, num_encoders: int = 1) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="capture-shards")
        self._encoders = ThreadPoolExecutor(num_encoders, thread_name_prefix="capture-encode")
        self._max_queued_bytes = max_queued_bytes
        self._queued_bytes = 0
        self._room = threading.Condition()
        self._writers: dict[UnitAttempt, ShardWriter] = {}

    def submit(self, nbytes: int, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a job that holds `nbytes` of host memory until it is done. Its error is the future's."""
        with self._room:
            self._queued_bytes += nbytes
        future = self._thread.submit(job, *args, **kwargs)
        future.add_done_callback(lambda _: self._release(nbytes))
        return future

    def submit_encoded(self, nbytes: int, encode: Callable[[], E], write: Callable[[E], T]) -> Future[T]:
        """Queue `write` of what `encode` returns: encoders work side by side, writes keep the order of submission."""
        encoded = self._encoders.submit(encode)
        return self.submit(nbytes, lambda: write(encoded.result()))

    def _release(self, nbytes: int) -> None:
        with self._room:
            self._queued_bytes -= nbytes
            self._room.notify_all()

    def wait_for_room(self) -> None:
        """Block while more than the allowed bytes wait. The threads depend on nobody else, so this ends."""
        with self._room:
            self._room.wait_for(lambda: self._queued_bytes <= self._max_queued_bytes)

    # The rest runs in the thread, through `submit`.

    def open(self, target: ShardTarget) -> None:
        self._writers[UnitAttempt(target.unit, target.attempt)] = open_shard_writer(target)

    def writer(self, unit: UnitAttempt) -> ShardWriter:
        return self._writers[unit]

    def close(self, unit: UnitAttempt) -> list[FileEntry]:
        files = self._writers[unit].close()
        # Only now: when the last shard cannot be published, `abort` removes the others through this writer.
        del self._writers[unit]
        return files

    def abort(self, unit: UnitAttempt) -> None:
        writer = self._writers.pop(unit, None)
        if writer is not None:
            writer.abort()

    def shutdown(self) -> None:
        """Abandon what is queued and the shards of every unit that is still open."""
        # The thread first: it waits for encoders.
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._encoders.shutdown(wait=True, cancel_futures=True)
        for unit in list(self._writers):
            self.abort(unit)
