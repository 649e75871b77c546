"""Reads samples out of a shard: one range per sample, memory-mapped where the file is local, checksum verified."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from storage.codec import CODECS, decode
from storage.errors import DamagedError, SchemaError
from storage.shards.checksum import check_states_checksum
from storage.store import Store
from storage.types import FileEntry, Receipt, StateSpec


def open_shard_reader(store: Store, entry: FileEntry, spec: StateSpec) -> ShardReader:
    """A reader of the shard `entry`.

    Raises FileNotFoundError, DamagedError when the file has another size than the manifest says, SchemaError for a
    codec that this code does not know.
    """
    if entry.codec not in CODECS:
        raise SchemaError(f"{entry.path}: its codec {entry.codec!r} is not known, only {list(CODECS)}")
    if entry.kind != "shard":
        raise ValueError(f"{entry.path} is a file of kind {entry.kind!r}, not a shard")
    return ShardReader(store, entry, spec)


class ShardReader:
    """Samples of one shard by their receipts. Safe to share between threads.

    A local file stays mapped for as long as the reader, or a view that it returned, is in use.
    """

    def __init__(self, store: Store, entry: FileEntry, spec: StateSpec) -> None:
        self.entry = entry
        self.spec = spec
        self._store = store
        local = store.local_path(entry.path)
        self._map: mmap.mmap | None = None
        if local is None:
            size = store.size(entry.path)
        else:
            with local.open("rb") as file:
                size = file.seek(0, 2)
                if size == entry.size and size > 0:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if size != entry.size:
            raise DamagedError(f"{entry.path}: has {size} bytes, the manifest says {entry.size}")

    def read(self, receipt: Receipt) -> np.ndarray:
        """One sample's states: bits [rows, layers, hidden].

        With codec `none` and a local file the array is a read-only view of the memory map. Raises DamagedError, naming
        file and sample, when the stored bytes are not what was written.
        """
        return self.read_many([receipt])[0]

    def read_many(self, receipts: Sequence[Receipt]) -> list[np.ndarray]:
        """Several samples, in the order of `receipts`; a remote store merges neighbouring ranges into one request."""
        for receipt in receipts:
            self._check_range(receipt)
        ranges = [(receipt.offset, receipt.nbytes) for receipt in receipts]
        if self._map is None:
            parts: Sequence[bytes | memoryview] = self._store.get_ranges(self.entry.path, ranges)
        else:
            mapped = memoryview(self._map)
            for offset, nbytes in ranges:
                # One large read per sample from a cold disk, and all of them at once, in place of 128 KiB per fault.
                start = offset - offset % mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, start, offset + nbytes - start)
            parts = [mapped[offset : offset + nbytes] for offset, nbytes in ranges]
        return [self._decode(receipt, part) for receipt, part in zip(receipts, parts, strict=True)]

    def _check_range(self, receipt: Receipt) -> None:
        if receipt.shard != self.entry.path:
            raise ValueError(f"sample {receipt.key} is in {receipt.shard}, not in {self.entry.path}")
        if receipt.rows < 0 or receipt.offset < 0 or receipt.nbytes < 0:
            raise DamagedError(f"{self._where(receipt)}: its receipt has a negative number: {receipt}")
        if receipt.offset + receipt.nbytes > self.entry.size:
            raise DamagedError(
                f"{self._where(receipt)}: its bytes [{receipt.offset}, {receipt.offset + receipt.nbytes}) lie outside "
                f"the {self.entry.size} bytes of the file"
            )

    def _decode(self, receipt: Receipt, data: bytes | memoryview) -> np.ndarray:
        where = self._where(receipt)
        states_TLH = decode(data, receipt.rows, self.spec, self.entry.codec, where=where)
        check_states_checksum(states_TLH, receipt.checksum, where)
        return states_TLH

    def _where(self, receipt: Receipt) -> str:
        return f"{self.entry.path}: sample {receipt.key}"
