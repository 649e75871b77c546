"""Merging small files, and dropping the bytes of deleted samples.

Units are grouped so that each group's shards together reach the target size. A group is rewritten sample by sample
(checksums are verified on the way), and one `compact` log entry swaps its new files for the old ones. The old files
stay for readers of older snapshots until gc removes them; with `purge` they go at once, that being its purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage.cache import BoundedCache
from storage.checkpoint import FOLDER as CHECKPOINTS
from storage.dataset import Dataset, new_writer_id
from storage.errors import DamagedError
from storage.listing import COMPACT_WRITER
from storage.manifest import COMMITTED, EXPIRED, Manifest, ManifestFile
from storage.shards import ShardReader, open_shard_reader, open_shard_writer
from storage.snapshot import Snapshot
from storage.types import REJECTS_SCHEMA, SAMPLES_SCHEMA, FileEntry, Receipt, SampleKey, data_file_name
from storage.verify_deep import receipts_of
from storage.writer import Writer, write_table_file

# A samples file is read whole, to check its digest, when one of its samples is looked up: bound what that costs.
MAX_TABLE_ROWS = 16_384
MAX_TABLE_BYTES = 32 << 20
OPEN_SHARDS = 64


@dataclass(frozen=True)
class Group:
    """Units whose files are rewritten together."""

    units: tuple[int, ...]
    files: tuple[ManifestFile, ...]

    def of_kind(self, kind: str) -> list[ManifestFile]:
        return [file for file in self.files if file.kind == kind]


@dataclass
class Compaction:
    """What compact did (or, dry, would do)."""

    uri: str
    groups: int = 0
    units: int = 0
    files_before: int = 0
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

    With `purge` also rewrites every file that holds a deleted sample, or a sample of an expired unit beside live ones,
    and removes the old files: older snapshots can then no longer read those units.
    """
    snapshot = dataset.snapshot()
    groups = plan_groups(snapshot, target_bytes, purge)
    result = Compaction(dataset.uri)
    for position, group in enumerate(groups):
        result.groups += 1
        result.units += len(group.units)
        result.files_before += len(group.files)
        result.bytes_before += sum(file.size for file in group.files)
        if not dry_run:
            try:
                _rewrite(dataset, snapshot, group, target_bytes, purge, result)
            except (DamagedError, FileNotFoundError):
                # gc removes the files of a unit that expired meanwhile.
                if _is_unchanged(dataset.manifest(), group, snapshot):
                    raise
                _skip(group, result)
        if progress is not None:
            progress(position + 1, len(groups))
    if purge and not dry_run:
        result.removed_files = remove_purged(dataset)
    if groups and not dry_run:
        from storage.sample_table import try_update_index

        try_update_index(dataset.snapshot())
    return result


def plan_groups(snapshot: Snapshot, target_bytes: int, purge: bool) -> list[Group]:
    """Which units are rewritten together. Deterministic; empty when there is nothing to gain."""
    states = snapshot.unit_states()
    deleted = {t.unit for t in snapshot.tombstones.values() if not t.purged_at and states.get(t.unit) == COMMITTED}
    groups: list[Group] = []
    batch: list[Group] = []

    def close() -> None:
        merged = _merge(batch)
        if merged is not None and _is_worth(merged, target_bytes, purge, deleted, states):
            groups.append(merged)
        batch.clear()

    limits = (target_bytes * 1.25, MAX_TABLE_ROWS, MAX_TABLE_BYTES)
    sums = [0, 0, 0]
    for cluster in _clusters(snapshot):
        tables = [file for file in cluster.files if file.kind != "shard"]
        # Large shards stay where they are: only their samples' rows are merged.
        small_bytes = sum(file.size for file in cluster.of_kind("shard") if _is_small(file, target_bytes))
        sizes = (small_bytes, sum(file.num_samples for file in tables), sum(file.size for file in tables))
        if batch and any(sum_ + size > limit for sum_, size, limit in zip(sums, sizes, limits, strict=True)):
            close()
            sums = [0, 0, 0]
        batch.append(cluster)
        sums = [sum_ + size for sum_, size in zip(sums, sizes, strict=True)]
    close()
    return groups


def _is_small(shard: FileEntry, target_bytes: int) -> bool:
    return shard.size < target_bytes / 2


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
    return [info.path for info in dataset.store.list(CHECKPOINTS) if info.path.endswith(".samples")]


def _may_cover(dataset: Dataset, path: str, files: set[str]) -> bool:
    from storage.sample_index import SampleIndex

    try:
        return not files.isdisjoint(SampleIndex.decode(path, dataset.store.get(path)).files)
    except DamagedError:
        return True  # what it repeats cannot be told, and nobody reads it


def _clusters(snapshot: Snapshot) -> list[Group]:
    """Units that share a file, with all their files, in order of unit."""
    parent: dict[int, int] = {}

    def root(unit: int) -> int:
        while parent.setdefault(unit, unit) != unit:
            parent[unit] = parent[parent[unit]]
            unit = parent[unit]
        return unit

    files = snapshot.files()
    for file in files:
        for unit in file.units[1:]:
            parent[root(unit)] = root(file.units[0])
        root(file.units[0])
    units: dict[int, list[int]] = {}
    for unit in parent:
        units.setdefault(root(unit), []).append(unit)
    held: dict[int, list[ManifestFile]] = {}
    for file in files:
        held.setdefault(root(file.units[0]), []).append(file)
    found = [Group(tuple(sorted(units[key])), tuple(held[key])) for key in units]
    return sorted(found, key=lambda group: group.units)


def _merge(batch: Sequence[Group]) -> Group | None:
    if not batch:
        return None
    units = tuple(sorted(unit for group in batch for unit in group.units))
    return Group(units, tuple(file for group in batch for file in group.files))


def _is_worth(group: Group, target_bytes: int, purge: bool, deleted: set[int], states: Mapping[int, str]) -> bool:
    if purge and (not deleted.isdisjoint(group.units) or any(states.get(u) == EXPIRED for u in group.units)):
        return True
    small = [file for file in group.of_kind("shard") if _is_small(file, target_bytes)]
    return len(small) > 1 or len(group.of_kind("samples")) > 1 or len(group.of_kind("rejects")) > 1


def _rewrite(
    dataset: Dataset, snapshot: Snapshot, group: Group, target_bytes: int, purge: bool, result: Compaction
) -> None:
    """Writes a group's new files and swaps them in, unless the group changed meanwhile."""
    writer = Writer(dataset, COMPACT_WRITER + new_writer_id())
    states = snapshot.unit_states()
    live = {unit for unit in group.units if states.get(unit) == COMMITTED}
    dropped = {t.key for t in snapshot.tombstones.values() if purge and not t.purged_at and t.unit in group.units}
    is_purge = purge and (bool(dropped) or len(live) < len(group.units))
    # Rows of expired units go whenever their file is rewritten: gc may have removed the shards that they name.
    samples, rejects = (_of_units(_read_tables(snapshot, group, kind), live) for kind in ("samples", "rejects"))
    # Shards that hold what has to go are rewritten whatever their size.
    dirty = {receipt.shard for _, receipt in receipts_of(samples) if receipt.key in dropped}
    kept = {
        file.path: file
        for file in group.of_kind("shard")
        if not _is_small(file, target_bytes)
        and not (is_purge and (file.path in dirty or not live.issuperset(file.units)))
    }
    added, samples = _write_shards(dataset, samples, group, writer, kept, dropped, target_bytes)
    for kind, table in {"samples": samples, "rejects": rejects}.items():
        if table.num_rows:
            path = f"{kind}/" + data_file_name(group.units[0], 0, writer.id, 0, "parquet")
            entry = write_table_file(dataset.store, path, kind, table)
            added.append((entry, tuple(sorted(set(table["unit"].to_pylist())))))
    removed = [file.path for file in group.files if file.path not in kept]
    body = {
        "added": [{**entry.to_json(), "units": list(units)} for entry, units in added],
        "removed": removed,
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
        result.files_after += len(added) + len(kept)
        result.bytes_after += sum(e.size for e, _ in added) + sum(f.size for f in kept.values())
        result.purged_samples += len(dropped)
    else:
        _skip(group, result)


def _is_unchanged(manifest: Manifest, group: Group, snapshot: Snapshot) -> bool:
    """Whether the group is as `snapshot` had it: a unit that expired, or another compaction, took files with it."""
    return all(manifest.file(file.path) is not None for file in group.files) and all(
        ((state := manifest.unit(unit)) is not None and state.status == EXPIRED) == (unit in snapshot.expired_units)
        for unit in group.units
    )


def _skip(group: Group, result: Compaction) -> None:
    result.skipped.append(f"units {group.units[0]} to {group.units[-1]} changed while they were rewritten")


def _write_shards(
    dataset: Dataset,
    table: pa.Table,
    group: Group,
    writer: Writer,
    kept: Mapping[str, ManifestFile],
    dropped: set[SampleKey],
    target_bytes: int,
) -> tuple[list[tuple[FileEntry, tuple[int, ...]]], pa.Table]:
    """Copies the group's samples into new shards; returns these with their units, and the samples table for them."""
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
    return [(entry, tuple(sorted(units_of[entry.path]))) for entry in entries], table


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
