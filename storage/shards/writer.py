"""Writes a unit's samples to shards: checksum, encode, append, close at the target size, digest, publish.

A sample is encoded and appended within `add`, so the memory in use is that of one sample. A full shard is digested,
synced and published by threads while the next one is being written.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from storage.codec import check_codec, check_states, encode
from storage.digest import file_digest
from storage.errors import StoreError
from storage.shards.checksum import states_checksum
from storage.shards.format import ShardFile
from storage.shards.parquet_file import ParquetFile
from storage.shards.safetensors_file import SafetensorsFile
from storage.store import Store, open_store
from storage.types import FileEntry, Receipt, SampleKey, ShardTarget, StateSpec

SHARD_FORMATS: dict[str, type[ShardFile]] = {"safetensors": SafetensorsFile, "parquet": ParquetFile}


def open_shard_writer(target: ShardTarget) -> ShardWriter:
    """A writer of the shards of one unit. Nothing is created before the first sample.

    Raises ValueError for an unknown shard format or codec.
    """
    return ShardWriter(open_store(target.uri), target)


@dataclass(frozen=True)
class EncodedSample:
    """One sample's states as they are stored, and what is known of them."""

    data: memoryview
    rows: int
    raw_bytes: int
    checksum: str


def encode_sample(states_TLH: np.ndarray, spec: StateSpec, codec: str) -> EncodedSample:
    """The part of `ShardWriter.add` that needs no writer: any number of threads may do it ahead, for `add_encoded`.

    Raises ValueError for another shape or dtype than that of `spec`.
    """
    check_states(states_TLH, spec)
    states_TLH = np.ascontiguousarray(states_TLH)
    data = encode(states_TLH, spec, codec)
    return EncodedSample(data, len(states_TLH), states_TLH.nbytes, states_checksum(states_TLH))


@dataclass
class _OpenShard:
    path: str
    local: Path
    file: ShardFile
    num_samples: int = 0
    rows: int = 0
    raw_bytes: int = 0


class ShardWriter:
    """The shards of one unit by one writer. Not for several threads at a time.

    After an error in `add` the unit's shards are of no use: `abort` (the context manager does it) removes them.
    """

    def __init__(self, store: Store, target: ShardTarget) -> None:
        check_codec(target.codec)
        if target.shard_format not in SHARD_FORMATS:
            raise ValueError(f"shard_format {target.shard_format!r} is not one of {sorted(SHARD_FORMATS)}")
        if target.target_bytes < 1:
            raise ValueError(f"target_bytes {target.target_bytes} must be positive")
        self.target = target
        self._store = store
        self._format = SHARD_FORMATS[target.shard_format]
        self._shard: _OpenShard | None = None
        self._sequence = 0
        self._keys: set[SampleKey] = set()
        self._finished: list[Future[FileEntry]] = []
        self._failed = False
        self._closed = False
        # A checksum beside the encoding, and for one full shard at a time its sync with its digest beside it.
        self._threads = ThreadPoolExecutor(3, thread_name_prefix="shard-writer")

    def add(self, key: SampleKey, states_TLH: np.ndarray) -> Receipt:
        """Stores one sample's states: bits [rows, layers, hidden] of the target's spec (uint16 or uint32).

        Raises ValueError for another shape or dtype or a key that was added before; StoreError, naming file and sample,
        when the disk refuses (for example because it is full).
        """
        self._check_open()
        check_states(states_TLH, self.target.spec)
        self._check_new(key)
        states_TLH = np.ascontiguousarray(states_TLH)
        self._failed = True  # until this sample is in
        checksum = self._threads.submit(states_checksum, states_TLH)
        data = encode(states_TLH, self.target.spec, self.target.codec)
        return self._append(key, data, len(states_TLH), states_TLH.nbytes, checksum.result)

    def add_encoded(self, key: SampleKey, sample: EncodedSample) -> Receipt:
        """Stores one sample that `encode_sample` made for the target's spec and codec. Raises as `add` does."""
        self._check_open()
        self._check_new(key)
        return self._append(key, sample.data, sample.rows, sample.raw_bytes, lambda: sample.checksum)

    def close(self) -> list[FileEntry]:
        """Publishes the last shard and returns an entry for every shard, in order; [] when there was no sample.

        Raises StoreError when a shard cannot be published; `abort` then removes what there is.
        """
        self._check_open()
        self._failed = True  # until everything is published
        if self._shard is not None:
            self._finish()
        entries = [future.result() for future in self._finished]
        self._failed = False
        self._closed = True
        self._threads.shutdown()
        return entries

    def abort(self) -> None:
        """Removes every shard of this writer, published ones included: no commit names them. Nothing after `close`."""
        if self._closed:
            return
        if self._shard is not None:
            self._shard.file.abort()
            self._shard.local.unlink(missing_ok=True)
            self._shard = None
        self._closed = True
        self._threads.shutdown()
        for future in self._finished:
            if future.exception() is None:
                self._store.delete(future.result().path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._closed:
                self.close()
        finally:
            self.abort()

    def _check_open(self) -> None:
        if self._failed or self._closed:
            raise RuntimeError(f"unit {self.target.unit}: the shard writer is {'closed' if self._closed else 'failed'}")

    def _check_new(self, key: SampleKey) -> None:
        if key in self._keys:
            raise ValueError(f"sample {key}: is in the shards of unit {self.target.unit} already")

    def _append(
        self, key: SampleKey, data: memoryview, rows: int, raw_bytes: int, checksum: Callable[[], str]
    ) -> Receipt:
        self._failed = True  # until this sample is in
        shard = self._shard
        if shard is not None and (
            shard.file.size + len(data) > self.target.target_bytes or not shard.file.has_room(key, rows, len(data))
        ):
            self._finish()
            shard = None
        if shard is None:
            shard = self._open(len(data))
        with _naming(f"sample {key} could not be written", shard.path):
            offset = shard.file.append(key, data, rows, checksum)
        shard.num_samples += 1
        shard.rows += rows
        shard.raw_bytes += raw_bytes
        receipt = Receipt(key, shard.path, offset, len(data), rows, checksum())
        self._keys.add(key)
        self._failed = False
        return receipt

    def _open(self, first_nbytes: int) -> _OpenShard:
        path = self.target.shard_path(self._sequence, self._format.suffix)
        self._sequence += 1
        with _naming("a shard could not be created", path):
            local = self._store.staging_file(path)
            try:
                file = self._format(local, self.target, first_nbytes)
            except FileExistsError:
                raise  # not ours to remove
            except BaseException:
                local.unlink(missing_ok=True)
                raise
            self._shard = _OpenShard(path, local, file)
        return self._shard

    def _finish(self) -> None:
        shard = self._shard
        assert shard is not None
        with _naming("the shard could not be finished", shard.path):
            shard.file.finish()
        if self._finished:
            # One at a time, or a fast producer would fill the memory with unsynced pages. Raises what went wrong there.
            self._finished[-1].result()
        self._shard = None
        self._finished.append(self._threads.submit(self._publish, shard))

    def _publish(self, shard: _OpenShard) -> FileEntry:
        try:
            with _naming("the shard could not be published", shard.path):
                # A header in front is written last, so the digest is a pass of its own: over cached pages, during the
                # sync.
                digest = self._threads.submit(file_digest, shard.local)
                if not self._store.is_remote:
                    _sync(shard.local)
                size = shard.local.stat().st_size
                entry = FileEntry(
                    shard.path, size, digest.result(), "shard", shard.num_samples, shard.rows, shard.raw_bytes,
                    self.target.shard_format, self.target.codec,
                )  # fmt: skip
                self._store.put_file(shard.path, shard.local)
        except BaseException:
            shard.local.unlink(missing_ok=True)
            raise
        return entry


@contextlib.contextmanager
def _naming(what: str, path: str) -> Iterator[None]:
    """Turns an error of the operating system, which knows a file descriptor at best, into one that names the shard."""
    try:
        yield
    except StoreError:
        raise
    except FileExistsError as error:
        raise StoreError(errno.EEXIST, f"{what}: it exists; a repeated attempt needs another number", path) from error
    except OSError as error:
        raise StoreError(error.errno or errno.EIO, f"{what}: {error.strerror or error}", path) from error


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
