"""The samples table of a snapshot, read the cheapest way: narrow columns from the indexes, the rest from its files."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from storage.dataset import Dataset
from storage.errors import DamagedError, SchemaError
from storage.lazy_table import binds, filter_columns
from storage.manifest import EXPIRED
from storage.prefetch import prefetched
from storage.sample_index import NARROW_COLUMNS, WIDE_COLUMNS, IndexCache, SampleIndex, index_path
from storage.snapshot import Snapshot, in_order_of_unit
from storage.types import SAMPLES_SCHEMA, SampleKey

KEY_COLUMNS = ["row", "turn", "n"]
# Up to here wide columns are fetched by key, from the few files that hold them.
MAX_KEYED_ROWS = 1000
# Bounds what building one index holds in memory.
MAX_INDEX_FILES = 5000

_log = logging.getLogger(__name__)

_caches: weakref.WeakKeyDictionary[Dataset, IndexCache] = weakref.WeakKeyDictionary()
_sources: weakref.WeakKeyDictionary[Snapshot, _Sources] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class _Sources:
    """Where the narrow columns of one snapshot come from."""

    indexes: list[tuple[SampleIndex, set[str]]]  # each with the sample files to take from it
    rest: list[int] | None  # units whose files no index covers; None is all
    expired: pa.Array  # units whose rows an index may still hold
    deleted: Collection[SampleKey]

    @classmethod
    def find(cls, snapshot: Snapshot) -> _Sources:
        files = snapshot.files_table()
        files = files.filter(pc.equal(files["kind"], "samples"))
        left = dict(zip(files["path"].to_pylist(), files["digest"].to_pylist(), strict=True))
        indexes: list[tuple[SampleIndex, set[str]]] = []
        for index in _indexes(snapshot.dataset).get():
            paths = {path for path, digest in index.files.items() if left.get(path) == digest}
            if paths:
                indexes.append((index, paths))
                left = {path: digest for path, digest in left.items() if path not in paths}
        rest: list[int] | None = None
        if indexes:
            units = files.filter(pc.is_in(files["path"], pa.array(list(left), pa.string())))["units"]
            rest = sorted(set(pc.list_flatten(units).to_pylist()))
        expired = [unit for unit, state in snapshot.unit_states().items() if state == EXPIRED]
        return cls(indexes, rest, pa.array(expired, pa.int64()), snapshot.tombstones)


def _indexes(dataset: Dataset) -> IndexCache:
    with _lock:
        if dataset not in _caches:
            _caches[dataset] = IndexCache(dataset.store)
        return _caches[dataset]


def _sources_of(snapshot: Snapshot) -> _Sources:
    with _lock:
        known = _sources.get(snapshot)
    if known is None:
        known = _Sources.find(snapshot)
        # Kept once it cannot get better: an index may still come for the files that none covers.
        if not known.rest and known.indexes:
            with _lock:
                _sources[snapshot] = known
    return known


def load_samples(snapshot: Snapshot, columns: Sequence[str], where: ds.Expression | None = None) -> pa.Table:
    """At least the rows that match `where`, in no particular order.

    Token ids and texts are read for the matching rows only, when `where` tells them apart by narrow columns.
    """
    if WIDE_COLUMNS.isdisjoint(columns):
        return _narrow(snapshot, columns, where)
    if where is None or not binds(SAMPLES_SCHEMA, where, without=set(WIDE_COLUMNS)):
        return snapshot.samples(columns)
    narrow = list(dict.fromkeys([*KEY_COLUMNS, "unit", *filter_columns(SAMPLES_SCHEMA, where)]))
    found = ds.dataset(_narrow(snapshot, narrow, where)).to_table(columns=[*KEY_COLUMNS, "unit"], filter=where)
    if len(found) > MAX_KEYED_ROWS:
        return snapshot.samples(columns, units=set(found["unit"].to_pylist()))
    keys = [SampleKey(*key) for key in zip(*(found[name].to_pylist() for name in KEY_COLUMNS), strict=True)]
    return snapshot.samples(columns, units=set(found["unit"].to_pylist()), keys=keys)


def load_narrow(snapshot: Snapshot, columns: Sequence[str]) -> pa.Table:
    """All samples of the snapshot with these narrow columns ("unit" among them), in order of unit, then key."""
    return in_order_of_unit(_narrow(snapshot, columns, None))


def update_index(snapshot: Snapshot) -> list[str]:
    """Writes indexes for the sample files that none covers yet and returns their paths.

    Safe to call from several writers and at any time: an index is derived, and readers do without it. Raises
    DamagedError naming a sample file that is not what the manifest says.
    """
    covered = {path: digest for index in _indexes(snapshot.dataset).get() for path, digest in index.files.items()}
    fresh = [file for file in snapshot.files() if file.kind == "samples" and covered.get(file.path) != file.digest]
    written: list[str] = []
    for start in range(0, len(fresh), MAX_INDEX_FILES):
        files = fresh[start : start + MAX_INDEX_FILES]
        # Every row of the file, deleted ones too: an older snapshot may still see them.
        tables = prefetched(lambda file: (file, snapshot.read_file(file, NARROW_COLUMNS)), files, depth=32, threads=8)
        encoded = SampleIndex.build(tables).encode()
        path = index_path(snapshot.version, encoded)
        snapshot.dataset.store.put_if_absent(path, encoded)
        written.append(path)
    return written


def try_update_index(snapshot: Snapshot) -> bool:
    """`update_index` for a committer, whose commit stands without an index: warns instead of raising."""
    try:
        update_index(snapshot)
    except (DamagedError, SchemaError, OSError) as error:
        _log.warning("%s: no index at version %d: %s", snapshot.dataset.uri, snapshot.version, error)
        return False
    return True


def _narrow(snapshot: Snapshot, columns: Sequence[str], where: ds.Expression | None) -> pa.Table:
    sources = _sources_of(snapshot)
    hides = len(sources.expired) > 0 or len(sources.deleted) > 0
    read = list(dict.fromkeys([*columns, *KEY_COLUMNS, "unit"])) if hides else list(columns)
    parts = [_visible(sources, index.read(read, paths, where)) for index, paths in sources.indexes]
    if sources.rest is None or sources.rest:
        parts.append(snapshot.samples(read, units=sources.rest).replace_schema_metadata(None))
    schema = pa.schema([SAMPLES_SCHEMA.field(name) for name in read])
    return pa.concat_tables([schema.empty_table(), *parts]).select(list(columns))


def _visible(sources: _Sources, table: pa.Table) -> pa.Table:
    """Without the rows of deleted and expired samples, which their files may still hold."""
    if len(sources.expired):
        table = table.filter(pc.invert(pc.is_in(table["unit"], sources.expired)))
    if sources.deleted:
        rows = pa.array([key.row for key in sources.deleted], pa.int64())
        suspects = pc.is_in(table["row"], rows).to_numpy()
        keep = ~suspects
        keys = table.select(KEY_COLUMNS)
        for position in np.flatnonzero(suspects).tolist():
            keep[position] = SampleKey(**keys.slice(position, 1).to_pylist()[0]) not in sources.deleted
        table = table.filter(pa.array(keep))
    return table
