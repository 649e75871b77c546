"""Merging small files, and dropping the bytes of deleted samples.

Units are grouped (`storage.compact_plan`) so that each group's shards together reach the target size. A group is
rewritten sample by sample (checksums are verified on the way), and one `compact` log entry swaps its new files for the
old ones. The old files stay for readers of older snapshots until gc removes them; with `purge` they go at once, that
being its purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage.cache import BoundedCache
from storage.checkpoint import FOLDER as CHECKPOINTS
from storage.compact_plan import Group, open_shards, plan_groups
from storage.dataset import Dataset, new_writer_id
from storage.errors import DamagedError
from storage.listing import COMPACT_WRITER
from storage.manifest import COMMITTED, EXPIRED, Manifest, ManifestFile
from storage.sample_index import SampleIndex, index_version
from storage.shards import ShardReader, open_shard_reader, open_shard_writer
from storage.snapshot import Snapshot
from storage.types import REJECTS_SCHEMA, SAMPLES_SCHEMA, Receipt, SampleKey, data_file_name
from storage.verify_deep import receipts_of
from storage.writer import Writer, write_table_file

OPEN_SHARDS = 64


@dataclass
class Compaction:
    """What compact did (or, dry, would do)."""

    uri: str
    groups: int = 0  # rewritten; dry, of the first round: what it leaves over may merge once more
    units: int = 0
    files_before: int = 0  # of these units
    files_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    purged_samples: int = 0
    removed_files: int = 0  # deleted at once, by purge
    skipped: list[str] = field(default_factory=list)  # groups that changed while they were rewritten

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compact(
    dataset: Dataset,
    target_bytes: int = 1 << 30,
    purge: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Compaction:
    """Merges files smaller than half of `target_bytes` of neighbouring units into shards of about that size.

    Goes on until there is nothing left to merge among the units that were there when it began: a second run right after
    it does nothing. With `purge` also rewrites every file that holds a deleted sample, or a sample of an expired unit
    beside live ones, and removes the old files: older snapshots can then no longer read those units.
    """
    result = Compaction(dataset.uri)
    before = snapshot = dataset.snapshot()
    scope = before.unit_states().keys()
    touched: set[int] = set()
    # What a round leaves over, the last shard of each group, may merge in the next one.
    while groups := plan_groups(snapshot, target_bytes, purge, scope):
        begun, published = result.groups, False
        for group in groups:
            result.groups += 1
            touched.update(group.units)
            published = (
                not dry_run and _try_rewrite(dataset, snapshot, group, target_bytes, purge, result)
            ) or published
            if progress is not None:
                progress(result.groups, begun + len(groups))
        if not published:
            break
        snapshot = dataset.snapshot()
    result.units = len(touched)
    result.files_before, result.bytes_before = _count(before, touched)
    if not dry_run:
        result.files_after, result.bytes_after = _count(snapshot, touched)
        if purge:
            result.removed_files = remove_purged(dataset)
    if touched and not dry_run:
        from storage.sample_table import try_update_index

        try_update_index(dataset.snapshot())
    return result


def _count(snapshot: Snapshot, units: set[int]) -> tuple[int, int]:
    """Files of these units, and their bytes."""
    sizes = [file.size for file in snapshot.files() if not units.isdisjoint(file.units)]
    return len(sizes), sum(sizes)


def _try_rewrite(
    dataset: Dataset, snapshot: Snapshot, group: Group, target_bytes: int, purge: bool, result: Compaction
) -> bool:
    """Rewrites a group; False when it changed meanwhile."""
    try:
        published = _rewrite(dataset, snapshot, group, target_bytes, purge, result)
    except (DamagedError, FileNotFoundError):
        # gc removes the files of a unit that expired meanwhile.
        if _is_unchanged(dataset.manifest(), group, snapshot):
            raise
        published = False
    if not published:
        result.skipped.append(f"units {group.units[0]} to {group.units[-1]} changed while they were rewritten")
    return published


def remove_purged(dataset: Dataset) -> int:
    """Deletes every file that holds bytes of purged samples, older compactions' too; returns how many there were."""
    tainted = {file.path for file in dataset.manifest().tainted()}
    present = [path for path in sorted(tainted) if dataset.store.exists(path)]
    # An index of samples repeats the short columns of the files it covers; without one, readers read the files.
    present += [path for path in _index_paths(dataset) if _may_cover(dataset, path, tainted)] if tainted else []
    for path in present:
        dataset.store.delete(path)
    return len(present)


def _index_paths(dataset: Dataset) -> list[str]:
    return [info.path for info in dataset.store.list(CHECKPOINTS) if index_version(info.path) is not None]


def _may_cover(dataset: Dataset, path: str, files: set[str]) -> bool:
    try:
        return not files.isdisjoint(SampleIndex.decode(path, dataset.store.get(path)).files)
    except DamagedError:
        return True  # what it repeats cannot be told, and nobody reads it
    except FileNotFoundError:
        return False  # gc was faster


def _rewrite(
    dataset: Dataset, snapshot: Snapshot, group: Group, target_bytes: int, purge: bool, result: Compaction
) -> bool:
    """Writes a group's new files and swaps them in; False, and nothing is swapped, when the group changed meanwhile."""
    writer = Writer(dataset, COMPACT_WRITER + new_writer_id())
    states = snapshot.unit_states()
    live = {unit for unit in group.units if states.get(unit) == COMMITTED}
    dropped = {t.key for t in snapshot.tombstones.values() if purge and not t.purged_at and t.unit in group.units}
    is_purge = purge and (bool(dropped) or len(live) < len(group.units))
    # Rows of expired units go whenever their file is rewritten: gc may have removed the shards that they name.
    samples, rejects = (_of_units(_read_tables(snapshot, group, kind), live) for kind in ("samples", "rejects"))
    # Shards that hold what has to go are rewritten whatever their size.
    dirty = {receipt.shard for _, receipt in receipts_of(samples) if receipt.key in dropped}
    mergeable = [file.path for file in open_shards(group, target_bytes)]
    rewritten = set(mergeable) if len(mergeable) > 1 else set()
    rewritten |= {
        f.path for f in group.of_kind("shard") if is_purge and (f.path in dirty or not live.issuperset(f.units))
    }
    kept = {file.path: file for file in group.of_kind("shard") if file.path not in rewritten}
    added, samples = _write_shards(dataset, samples, group, writer, kept, dropped, target_bytes)
    for kind, table in {"samples": samples, "rejects": rejects}.items():
        if table.num_rows:
            path = f"{kind}/" + data_file_name(group.units[0], 0, writer.id, 0, "parquet")
            entry = write_table_file(dataset.store, path, kind, table)
            added.append({**entry.to_json(), "units": sorted(set(table["unit"].to_pylist())), "full_at": 0})
    body = {
        "added": added,
        "removed": [file.path for file in group.files if file.path not in kept],
        "purge": is_purge,
        "purged": [list(key) for key in sorted(dropped)],
    }
    published = False

    def build(manifest: Manifest) -> Mapping[str, Any] | None:
        nonlocal published
        published = _is_unchanged(manifest, group, snapshot)
        return body if published else None

    dataset.append("compact", build, writer.id)
    if published:
        result.purged_samples += len(dropped)
    return published


def _is_unchanged(manifest: Manifest, group: Group, snapshot: Snapshot) -> bool:
    """Whether the group is as `snapshot` had it: a unit that expired, or another compaction, took files with it."""
    return all(manifest.file(file.path) is not None for file in group.files) and all(
        ((state := manifest.unit(unit)) is not None and state.status == EXPIRED) == (unit in snapshot.expired_units)
        for unit in group.units
    )


def _write_shards(
    dataset: Dataset,
    table: pa.Table,
    group: Group,
    writer: Writer,
    kept: Mapping[str, ManifestFile],
    dropped: set[SampleKey],
    target_bytes: int,
) -> tuple[list[dict[str, Any]], pa.Table]:
    """Copies the group's samples into new shards; returns these for the log, and the samples table for them."""
    spec = dataset.identity.states
    olds = group.of_kind("shard")
    shard_format = olds[0].shard_format if olds else "safetensors"
    codec = olds[0].codec if olds else None
    target = writer.shard_target(group.units[0], 0, shard_format=shard_format, codec=codec, target_bytes=target_bytes)
    entries_of = {file.path: file for file in olds}
    # A group can have more shards than a process may have files open.
    readers: BoundedCache[str, ShardReader] = BoundedCache(
        lambda path: open_shard_reader(dataset.store, entries_of[path], spec), OPEN_SHARDS
    )
    keep: list[bool] = []
    moved: list[Receipt] = []
    units_of: dict[str, set[int]] = {}
    with open_shard_writer(target) as shards:
        for unit, old in receipts_of(table):
            keep.append(old.key not in dropped)
            if not keep[-1]:
                continue
            new = old if old.shard in kept else shards.add(old.key, readers.get(old.shard).read(old))
            moved.append(new)
            units_of.setdefault(new.shard, set()).add(unit)
        entries = shards.close()
    table = _with_receipts(table.filter(pa.array(keep, pa.bool_())), moved)
    # All but the last were closed because the next sample did not fit.
    full_at = [target_bytes] * (len(entries) - 1) + [0]
    added = [
        {**entry.to_json(), "units": sorted(units_of[entry.path]), "full_at": full}
        for entry, full in zip(entries, full_at, strict=False)
    ]
    return added, table


def _read_tables(snapshot: Snapshot, group: Group, kind: str) -> pa.Table:
    """The group's rows as stored, deleted ones included, in order of key."""
    files = group.of_kind(kind)
    if not files:
        return (SAMPLES_SCHEMA if kind == "samples" else REJECTS_SCHEMA).empty_table()
    table = pa.concat_tables([snapshot.read_file(file) for file in files])
    return table.sort_by([(name, "ascending") for name in ("row", "turn", "n")])


def _of_units(table: pa.Table, units: set[int]) -> pa.Table:
    return table.filter(pc.is_in(table["unit"], pa.array(sorted(units), pa.int64())))


def _with_receipts(table: pa.Table, receipts: Sequence[Receipt]) -> pa.Table:
    for name in ("shard", "offset", "nbytes", "checksum"):
        position = table.schema.get_field_index(name)
        values = pa.array([getattr(receipt, name) for receipt in receipts], SAMPLES_SCHEMA.field(name).type)
        table = table.set_column(position, SAMPLES_SCHEMA.field(name), values)
    return table
