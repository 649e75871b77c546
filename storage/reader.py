"""Samples of one snapshot with their hidden states: by key, by unit, one after another.

Reads are ranged: a sample costs its own bytes of its shard. Where samples lie is read once, as narrow columns of the
samples table; token ids are read unit by unit when a sample of the unit is first asked for, and kept within a bound.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from storage.cache import BoundedCache
from storage.errors import DamagedError
from storage.manifest import COMMITTED
from storage.sample_table import load_narrow
from storage.shards import ShardReader, open_shard_reader
from storage.snapshot import Snapshot
from storage.types import Receipt, SampleKey

if TYPE_CHECKING:
    import torch

LOCATION_COLUMNS = ["row", "turn", "n", "unit", "num_tokens", "shard", "offset", "nbytes", "rows", "checksum"]
CONTENT_COLUMNS = ["row", "turn", "n", "token_ids", "loss_spans"]

OPEN_SHARDS = 128
TOKEN_CACHE_BYTES = 1 << 30


class SampleNotFoundError(KeyError):
    """The snapshot holds no such sample."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, eq=False)
class LoadedSample:
    """One sample as training reads it; T tokens, L layers, hidden size H."""

    key: SampleKey
    token_ids: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]; True where the loss counts the token
    states_TLH: NDArray[Any]  # [T - 1, L, H], bits of `dtype` as uint16 or uint32; may be a read-only memory map
    dtype: str  # "bfloat16", "float16" or "float32"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def states_torch(self) -> torch.Tensor:
        """The states as a torch tensor [T - 1, L, H] of `dtype`, sharing memory: do not write into it."""
        import torch

        _spend_torch_warning()
        return torch.from_numpy(self.states_TLH).view(getattr(torch, self.dtype))

    def truncated(self, num_tokens: int) -> LoadedSample:
        """The first `num_tokens` tokens of the sample and their states."""
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            loss_mask=self.loss_mask[:num_tokens],
            states_TLH=self.states_TLH[: max(num_tokens - 1, 0)],
        )


@cache
def _spend_torch_warning() -> None:
    """torch warns, once in a process, about read-only memory because it cannot guard it; nothing here writes."""
    import torch

    read_only = np.zeros(1, np.uint16)
    read_only.flags.writeable = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        torch.from_numpy(read_only)


def spans_to_mask(num_tokens: int, spans: Iterable[tuple[int, int]]) -> NDArray[np.bool_]:
    """bool [num_tokens], True inside the half-open `spans`."""
    mask = np.zeros(num_tokens, np.bool_)
    for start, end in spans:
        mask[start:end] = True
    return mask


class Locations:
    """Where the samples of a snapshot lie: narrow columns as arrays, one element per sample."""

    def __init__(self, table: pa.Table) -> None:
        table = table.combine_chunks()
        self.rows = _int64(table["row"])
        self.turns = _int64(table["turn"])
        self.ns = _int64(table["n"])
        self.units = _int64(table["unit"])
        self.num_tokens = _int64(table["num_tokens"])
        self._offsets = _int64(table["offset"])
        self._nbytes = _int64(table["nbytes"])
        self._state_rows = _int64(table["rows"])
        shards = _one_array(table["shard"]).dictionary_encode()
        self.shard_names: list[str] = shards.dictionary.to_pylist()
        self.shard_ids = shards.indices.to_numpy()
        self._checksums = _one_array(table["checksum"])
        self._order = np.lexsort([self.ns, self.turns, self.rows])
        self._sorted_rows = self.rows[self._order]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def keys(self) -> NDArray[np.int64]:
        """[N, 3]: row, turn, n."""
        return np.stack([self.rows, self.turns, self.ns], axis=1)

    def key(self, index: int) -> SampleKey:
        return SampleKey(int(self.rows[index]), int(self.turns[index]), int(self.ns[index]))

    def receipt(self, index: int) -> Receipt:
        return Receipt(
            key=self.key(index),
            shard=self.shard_names[self.shard_ids[index]],
            offset=int(self._offsets[index]),
            nbytes=int(self._nbytes[index]),
            rows=int(self._state_rows[index]),
            checksum=self._checksums[index].as_py(),
        )

    def find(self, key: SampleKey) -> int | None:
        """The index of `key`, None when there is none."""
        first = np.searchsorted(self._sorted_rows, key.row, "left")
        last = np.searchsorted(self._sorted_rows, key.row, "right")
        for index in self._order[first:last]:
            if self.turns[index] == key.turn and self.ns[index] == key.n:
                return int(index)
        return None


class SampleReader:
    """Reads samples of one snapshot. Safe to share between threads.

    Every sample's checksum is verified as it is read; a difference raises DamagedError naming file and sample.

    Args:
        snapshot: what is visible.
        units: restricts the reader to some units, whose rows of the samples table alone are then read.
        open_shards: the most shards kept open.
        token_cache_bytes: about how much memory the token ids of recently read units may take.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        units: Collection[int] | None = None,
        *,
        open_shards: int = OPEN_SHARDS,
        token_cache_bytes: int = TOKEN_CACHE_BYTES,
    ) -> None:
        self.snapshot = snapshot
        self.spec = snapshot.dataset.identity.states
        self._units = None if units is None else frozenset(units)
        table = load_narrow(snapshot, LOCATION_COLUMNS) if units is None else snapshot.samples(LOCATION_COLUMNS, units)
        self.locations = Locations(table)
        self._shards: BoundedCache[str, ShardReader] = BoundedCache(self._open_shard, open_shards)
        self._contents: BoundedCache[int, _UnitContent] = BoundedCache(
            self._load_content, token_cache_bytes, lambda content: content.nbytes
        )

    def __len__(self) -> int:
        return len(self.locations)

    def keys(self) -> Iterator[SampleKey]:
        """Keys in the order of `__iter__`: unit by unit, in order of key."""
        return (self.locations.key(index) for index in range(len(self)))

    def read(self, key: SampleKey) -> LoadedSample:
        """One sample. Raises SampleNotFoundError, or DamagedError for bytes that are not what was committed."""
        return self.read_at([self._index(key)])[0]

    def read_many(self, keys: Sequence[SampleKey]) -> list[LoadedSample]:
        """Several samples, in the order of `keys`; reads from one shard are merged where they are neighbours."""
        return self.read_at([self._index(key) for key in keys])

    def iter_unit(self, unit: int) -> Iterator[LoadedSample]:
        """The samples of one unit, one at a time.

        Raises ValueError for a pending or an expired unit, and for one that this reader was not made for.
        """
        if self._units is not None and unit not in self._units:
            raise ValueError(f"unit {unit} is not one of the units {sorted(self._units)[:10]} that this reader is for")
        status = self.snapshot.unit_states().get(unit, "pending")
        if status != COMMITTED:
            raise ValueError(f"unit {unit} of {self.snapshot.dataset.uri} has no samples to read: it is {status}")
        for index in np.flatnonzero(self.locations.units == unit).tolist():
            yield self.read_at([index])[0]

    def __iter__(self) -> Iterator[LoadedSample]:
        for index in range(len(self)):
            yield self.read_at([index])[0]

    def read_at(self, indices: Sequence[int]) -> list[LoadedSample]:
        """The samples at positions `indices` of `locations`."""
        by_shard: dict[int, list[int]] = {}
        for slot, index in enumerate(indices):
            by_shard.setdefault(int(self.locations.shard_ids[index]), []).append(slot)
        samples: list[LoadedSample | None] = [None] * len(indices)
        for shard_id, slots in by_shard.items():
            path = self.locations.shard_names[shard_id]
            receipts = [self.locations.receipt(indices[slot]) for slot in slots]
            try:
                shard = self._shards.get(path)
                states = [shard.read(receipts[0])] if len(slots) == 1 else shard.read_many(receipts)
            except FileNotFoundError:
                raise self.snapshot.missing(self.snapshot.shard_entry(path)) from None
            for slot, receipt, states_TLH in zip(slots, receipts, states, strict=True):
                samples[slot] = self._with_content(receipt, int(self.locations.units[indices[slot]]), states_TLH)
        return [sample for sample in samples if sample is not None]

    def _with_content(self, receipt: Receipt, unit: int, states_TLH: NDArray[Any]) -> LoadedSample:
        token_ids, mask = self._contents.get(unit).content(receipt.key)
        if len(token_ids) != len(states_TLH) + 1:
            raise DamagedError(
                f"{receipt.shard}: sample {receipt.key} has {len(states_TLH)} rows for {len(token_ids)} tokens"
            )
        return LoadedSample(receipt.key, token_ids, mask, states_TLH, self.spec.dtype)

    def _index(self, key: SampleKey) -> int:
        index = self.locations.find(key)
        if index is None:
            raise SampleNotFoundError(
                f"sample {key} is not in version {self.snapshot.version} of {self.snapshot.dataset.uri}: "
                "it was rejected, deleted, expired or is not there yet (headrace query tells which)"
            )
        return index

    def _open_shard(self, path: str) -> ShardReader:
        return open_shard_reader(self.snapshot.dataset.store, self.snapshot.shard_entry(path), self.spec)

    def _load_content(self, unit: int) -> _UnitContent:
        return _UnitContent(self.snapshot.samples(columns=CONTENT_COLUMNS, units=[unit]))


class _UnitContent:
    """Token ids and loss spans of the samples of one unit, as flat arrays with bounds."""

    def __init__(self, table: pa.Table) -> None:
        keys = zip(*(_int64(table[name]).tolist() for name in ("row", "turn", "n")), strict=True)
        self._positions = {SampleKey(*key): position for position, key in enumerate(keys)}
        values, self._token_bounds = _flat_list(table["token_ids"])
        self._token_ids = values.to_numpy()
        spans, self._span_bounds = _flat_list(table["loss_spans"])
        self._spans = np.stack([spans.field("start").to_numpy(), spans.field("end").to_numpy()], axis=1)
        # A key and its place in the dictionary take about 250 bytes.
        self.nbytes = self._token_ids.nbytes + self._spans.nbytes + 250 * len(self._positions)

    def content(self, key: SampleKey) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids [T] and loss mask [T] of one sample."""
        position = self._positions[key]
        first, last = self._token_bounds[position : position + 2]
        spans = self._spans[self._span_bounds[position] : self._span_bounds[position + 1]].tolist()
        return self._token_ids[first:last], spans_to_mask(int(last - first), spans)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _int64(column: pa.ChunkedArray) -> NDArray[np.int64]:
    return _one_array(column).to_numpy().astype(np.int64, copy=False)


def _flat_list(column: pa.ChunkedArray) -> tuple[pa.Array, NDArray[np.int64]]:
    """A list column as flat values and bounds [N + 1] into them."""
    array = _one_array(column)
    bounds = array.offsets.to_numpy().astype(np.int64)
    return array.flatten(), bounds - bounds[0]
