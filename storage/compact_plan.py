"""Which units compact rewrites together: pure, from the manifest alone, and empty once there is nothing to gain.

Every rewrite leaves its group with fewer open shards, samples files or rejects files, or with nothing to purge. So
compacting again and again comes to an end, whatever the sizes of the samples and the room that a shard format has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from storage.manifest import COMMITTED, EXPIRED, ManifestFile
from storage.snapshot import Snapshot

# A samples file is read whole, to check its digest, when one of its samples is looked up: bound what that costs.
MAX_TABLE_ROWS = 16_384
MAX_TABLE_BYTES = 32 << 20


@dataclass(frozen=True)
class Group:
    """Units whose files are rewritten together."""

    units: tuple[int, ...]
    files: tuple[ManifestFile, ...]

    def of_kind(self, kind: str) -> list[ManifestFile]:
        return [file for file in self.files if file.kind == kind]


def plan_groups(
    snapshot: Snapshot, target_bytes: int, purge: bool, units: Collection[int] | None = None
) -> list[Group]:
    """Neighbouring units whose open shards together reach about `target_bytes`. Deterministic.

    `units` leaves out every file that holds another unit.
    """
    states = snapshot.unit_states()
    deleted = {t.unit for t in snapshot.tombstones.values() if not t.purged_at and states.get(t.unit) == COMMITTED}
    groups: list[Group] = []
    batch: list[Group] = []

    def close() -> None:
        merged = _merged(batch)
        if _is_worth(merged, target_bytes, purge, deleted, states):
            groups.append(merged)
        batch.clear()

    limits = (target_bytes * 1.25, MAX_TABLE_ROWS, MAX_TABLE_BYTES)
    sums = [0, 0, 0]
    wanted = None if units is None else set(units)
    for cluster in _clusters(snapshot.files()):
        if wanted is not None and not wanted.issuperset(cluster.units):
            continue
        tables = [file for file in cluster.files if file.kind != "shard"]
        # Large shards stay where they are: only their samples' rows are merged.
        open_bytes = sum(file.size for file in open_shards(cluster, target_bytes))
        sizes = (open_bytes, sum(file.num_samples for file in tables), sum(file.size for file in tables))
        if batch and any(sum_ + size > limit for sum_, size, limit in zip(sums, sizes, limits, strict=True)):
            close()
            sums = [0, 0, 0]
        batch.append(cluster)
        sums = [sum_ + size for sum_, size in zip(sums, sizes, strict=True)]
    close()
    return groups


def open_shards(group: Group, target_bytes: int) -> list[ManifestFile]:
    """Shards that more samples would fit into: below half of the target, and not found full at it before.

    A shard can be full far below its target: the header of a safetensors file has room for some 700 samples.
    """
    return [file for file in group.of_kind("shard") if file.size < target_bytes / 2 and file.full_at < target_bytes]


def _is_worth(group: Group, target_bytes: int, purge: bool, deleted: set[int], states: Mapping[int, str]) -> bool:
    if purge and (not deleted.isdisjoint(group.units) or any(states.get(u) == EXPIRED for u in group.units)):
        return True
    mergeable = (open_shards(group, target_bytes), group.of_kind("samples"), group.of_kind("rejects"))
    return any(len(files) > 1 for files in mergeable)


def _clusters(files: list[ManifestFile]) -> list[Group]:
    """Units that share a file, with all their files, in order of unit."""
    parent: dict[int, int] = {}

    def root(unit: int) -> int:
        while parent.setdefault(unit, unit) != unit:
            parent[unit] = parent[parent[unit]]
            unit = parent[unit]
        return unit

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


def _merged(batch: Iterable[Group]) -> Group:
    batch = list(batch)
    units = tuple(sorted(unit for group in batch for unit in group.units))
    return Group(units, tuple(file for group in batch for file in group.files))
