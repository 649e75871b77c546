"""The samples table of a snapshot, read the cheapest way: narrow columns from the indexes, the rest from its files."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from storage.dataset import Dataset
from storage.errors import DamagedError, SchemaError
from storage.lazy_table import binds, filter_columns
from storage.prefetch import prefetched
from storage.sample_index import NARROW_COLUMNS, WIDE_COLUMNS, IndexCache, SampleIndex, index_path, without_repeats
from storage.snapshot import Snapshot, in_order_of_unit
from storage.types import SAMPLES_SCHEMA, SampleKey

KEY_COLUMNS = ["row", "turn", "n"]
# Up to here wide columns are fetched by key, from the few files that hold them.
MAX_KEYED_ROWS = 1000
# Bound what building one index holds in memory: a row of narrow columns takes some 300 bytes.
MAX_INDEX_FILES = 5000
MAX_INDEX_ROWS = 500_000
# So many indexes of one order of magnitude (to this base) become one.
MERGED_INDEXES = 8

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
        for index in without_repeats(_indexes(snapshot.dataset).get()):
            paths = {path for path, digest in index.files.items() if left.get(path) == digest}
            if paths:
                indexes.append((index, paths))
                left = {path: digest for path, digest in left.items() if path not in paths}
        rest: list[int] | None = None
        if indexes:
            units = files.filter(pc.is_in(files["path"], pa.array(list(left), pa.string())))["units"]
            rest = sorted(set(pc.list_flatten(units).to_pylist()))
        return cls(indexes, rest, pa.array(sorted(snapshot.expired_units), pa.int64()), snapshot.tombstones)


def _indexes(dataset: Dataset) -> IndexCache:
    with _lock:
        if dataset not in _caches:
            _caches[dataset] = IndexCache(dataset.store, dataset.root_digest)
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


def iter_samples(snapshot: Snapshot, columns: Sequence[str], where: ds.Expression | None) -> Iterator[pa.Table]:
    """At least the rows that match `where`, in no particular order, some at a time: memory holds a few files' rows.

    Token ids and texts are read for the matching rows only, when `where` tells them apart by narrow columns.
    """
    if WIDE_COLUMNS.isdisjoint(columns):
        yield from _narrow(snapshot, columns, where)
        return
    units: set[int] | None = None
    keys: list[SampleKey] | None = None
    if where is not None and binds(SAMPLES_SCHEMA, where, without=WIDE_COLUMNS):
        read = list(dict.fromkeys([*KEY_COLUMNS, "unit", *filter_columns(SAMPLES_SCHEMA, where)]))
        found = pa.concat_tables(
            [table.filter(where).select([*KEY_COLUMNS, "unit"]) for table in _narrow(snapshot, read, where)]
            or [pa.schema([SAMPLES_SCHEMA.field(name) for name in [*KEY_COLUMNS, "unit"]]).empty_table()]
        )
        units = set(found["unit"].to_pylist())
        if len(found) <= MAX_KEYED_ROWS:
            keys = [SampleKey(*key) for key in zip(*(found[name].to_pylist() for name in KEY_COLUMNS), strict=True)]
    yield from snapshot.iter_samples(columns, units, keys)


def load_narrow(snapshot: Snapshot, columns: Sequence[str]) -> pa.Table:
    """All samples of the snapshot with these narrow columns, in order of unit, then key."""
    read = list(dict.fromkeys([*columns, "unit"]))
    schema = pa.schema([SAMPLES_SCHEMA.field(name) for name in read])
    table = pa.concat_tables([schema.empty_table(), *_narrow(snapshot, read, None)])
    return in_order_of_unit(table).select(list(columns))


def update_index(snapshot: Snapshot) -> list[str]:
    """Writes indexes for the sample files that none covers yet, merges small ones, and returns the new paths.

    Safe to call from several writers and at any time: an index is derived, and readers do without it. Raises
    DamagedError naming a sample file that is not what the manifest says.
    """
    dataset = snapshot.dataset
    covered = {path: digest for index in _indexes(dataset).get() for path, digest in index.files.items()}
    fresh = [file for file in snapshot.files() if file.kind == "samples" and covered.get(file.path) != file.digest]
    written: list[str] = []
    for start in range(0, len(fresh), MAX_INDEX_FILES):
        files = fresh[start : start + MAX_INDEX_FILES]
        # Every row of the file, deleted ones too: an older snapshot may still see them.
        tables = prefetched(lambda file: snapshot.read_file(file, NARROW_COLUMNS), files, depth=32, threads=8)
        named = ((file.path, file.digest, table) for file, table in zip(files, tables, strict=True))
        written.append(_write_index(snapshot, SampleIndex.build(dataset.root_digest, snapshot.version, named)))
    return written + _merge_indexes(snapshot)


def _merge_indexes(snapshot: Snapshot) -> list[str]:
    """Merges indexes of like size, so that a data set of any age has a few; gc removes those that were merged."""
    dataset = snapshot.dataset
    wanted = set(snapshot.files_table()["path"].to_pylist()) | snapshot.superseded_files()
    tiers: dict[int, list[SampleIndex]] = {}
    for index in without_repeats(_indexes(dataset).get()):
        if index.num_rows < MAX_INDEX_ROWS and not wanted.isdisjoint(index.files):
            tiers.setdefault(int(math.log(index.num_rows + 1, MERGED_INDEXES)), []).append(index)
    written: list[str] = []
    for members in tiers.values():
        if len(members) >= MERGED_INDEXES:
            tables = (item for index in members for item in index.tables(wanted))
            written.append(_write_index(snapshot, SampleIndex.build(dataset.root_digest, snapshot.version, tables)))
    return written


def _write_index(snapshot: Snapshot, index: SampleIndex) -> str:
    encoded = index.encode()
    path = index_path(snapshot.version, encoded)
    snapshot.dataset.store.put_if_absent(path, encoded)
    return path


def try_update_index(snapshot: Snapshot) -> bool:
    """`update_index` for a committer, whose commit stands without an index: warns instead of raising."""
    try:
        update_index(snapshot)
    except (DamagedError, SchemaError, OSError) as error:
        _log.warning("%s: no index at version %d: %s", snapshot.dataset.uri, snapshot.version, error)
        return False
    return True


def _narrow(snapshot: Snapshot, columns: Sequence[str], where: ds.Expression | None) -> Iterator[pa.Table]:
    sources = _sources_of(snapshot)
    hides = len(sources.expired) > 0 or len(sources.deleted) > 0
    read = list(dict.fromkeys([*columns, *KEY_COLUMNS, "unit"])) if hides else list(columns)
    for index, paths in sources.indexes:
        for table in index.read(read, paths, where):
            yield _visible(sources, table).select(list(columns))
    if sources.rest is None or sources.rest:
        for table in snapshot.iter_samples(columns, units=sources.rest):
            yield table.replace_schema_metadata(None)


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
