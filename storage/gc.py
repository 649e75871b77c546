"""Removing what no snapshot needs: first a fence, then the files.

A file that the log does not name may belong to a writer that is still at work, or to one that sleeps and will wake. So
gc leaves the files of writers that were active lately alone, fences the others, and only removes files that can never
be committed: of a fenced writer, or of a unit that is visible already. Files that were visible once go when they were
purged or expired, and when their replacement by compact is older than readers of old snapshots are given.

Checkpoints and indexes of samples are thinned out to a number that grows with the logarithm of the data set's, so what
gc reads (it checks those that stay) is bounded. Every version can still be read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from storage.checkpoint import UnusableCheckpointError, checkpoint_path, read_checkpoint, superfluous
from storage.dataset import Dataset
from storage.errors import DamagedError
from storage.listing import Inventory, can_be_committed, find_lost_entries, take_inventory
from storage.manifest import Manifest
from storage.sample_index import SampleIndex, without_repeats

if TYPE_CHECKING:
    from storage.store_s3 import S3Store

DAY_S = 86_400.0


@dataclass(frozen=True)
class Removal:
    """One file that gc removes (or removed)."""

    path: str
    size: int
    reason: str  # "orphan", "expired", "purged", "compacted", "scrap", "checkpoint", "index" or "upload"
    writer: str | None = None
    upload_id: str | None = None


@dataclass
class Collection:
    """What gc found; with `applied` what it did."""

    uri: str
    applied: bool = False
    removals: list[Removal] = field(default_factory=list)
    fenced: list[str] = field(default_factory=list)  # writers that a fence was (or would be) appended for
    active: list[str] = field(default_factory=list)  # writers with orphans that are too young to judge
    kept_for_readers: int = 0  # files that compact replaced, too young to remove
    foreign: list[str] = field(default_factory=list)  # files of nobody: never removed
    notes: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(removal.size for removal in self.removals)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "num_bytes": self.num_bytes}


def collect(
    dataset: Dataset,
    apply: bool = False,
    older_than_s: float = DAY_S,
    keep_superseded_s: float = 7 * DAY_S,
    on_removed: Callable[[Removal], None] | None = None,
) -> Collection:
    """Finds garbage, and with `apply` fences its writers and removes it.

    Args:
        older_than_s: a writer none of whose files changed and none of whose commits happened for so long counts as
            gone. Longer than the longest unit takes, or gc fences a writer that is at work (which then fails loudly).
        keep_superseded_s: how long readers of old snapshots keep the files that compact replaced.

    Raises LostEntriesError when the log is known to lack its newest entries: what they made visible looks like garbage.
    """
    # Listing first: what is listed and not in the later manifest was not visible when the manifest was read.
    listing = list(dataset.store.list())
    manifest = dataset.manifest()
    inventory = take_inventory(listing, manifest, dataset.units_path)
    lost = find_lost_entries(dataset, inventory, manifest)
    if lost is not None:
        raise lost
    cutoff = datetime.now(UTC) - timedelta(seconds=older_than_s)
    result = Collection(dataset.uri, foreign=[info.path for info in inventory.foreign])
    quiet = _quiet_writers(inventory, manifest, cutoff)
    result.active = sorted({origin.writer for _, origin in inventory.orphans} - quiet)
    doomed = [(info, origin) for info, origin in inventory.orphans if origin.writer in quiet]
    result.fenced = sorted({origin.writer for info, origin in doomed if can_be_committed(info, origin, manifest)})
    # An active writer's files of a unit that is visible already are garbage too, once they are old.
    doomed += [
        (info, origin)
        for info, origin in inventory.orphans
        if origin.writer not in quiet and info.last_modified < cutoff and not can_be_committed(info, origin, manifest)
    ]
    result.removals = [Removal(info.path, info.size, "orphan", origin.writer) for info, origin in doomed]
    result.removals += _retired(inventory, manifest, keep_superseded_s, result)
    result.removals += [Removal(i.path, i.size, "scrap") for i in inventory.scraps if i.last_modified < cutoff]
    result.removals += _useless_checkpoints(dataset, inventory)
    result.removals += _useless_indexes(dataset, inventory, manifest)
    result.removals += _abandoned_uploads(dataset, cutoff, result)
    if apply:
        _apply(dataset, result, on_removed or (lambda removal: None))
    return result


def _apply(dataset: Dataset, result: Collection, on_removed: Callable[[Removal], None]) -> None:
    if result.fenced:
        dataset.fence(result.fenced)
    # After the fence nothing that was an orphan before it can become visible; before it, it could have.
    manifest = dataset.manifest()
    visible = set(manifest.files_table()["path"].to_pylist()) | ({manifest.head.path} if manifest.head else set())
    # Committed and replaced by compact since the look: the next run judges it as a replaced file.
    replaced = manifest.retired().keys()
    result.removals = [
        removal
        for removal in result.removals
        if removal.path not in visible and not (removal.reason == "orphan" and removal.path in replaced)
    ]
    for removal in result.removals:
        if removal.upload_id is not None:
            _abort_upload(dataset, removal.path, removal.upload_id)
        else:
            dataset.store.delete(removal.path)
        on_removed(removal)
    result.applied = True


def _quiet_writers(inventory: Inventory, manifest: Manifest, cutoff: datetime) -> set[str]:
    """Writers with orphans whose last sign of life (a file, a commit) is before `cutoff`."""
    last: dict[str, datetime] = {}
    for info, origin in inventory.orphans:
        last[origin.writer] = max(info.last_modified, last.get(origin.writer, info.last_modified))
    units = manifest.units_table()
    for writer, seconds in zip(units["writer"].to_pylist(), units["time"].to_pylist(), strict=True):
        if writer in last:
            last[writer] = max(last[writer], datetime.fromtimestamp(seconds, UTC))
    return {writer for writer, moment in last.items() if moment < cutoff}


def _retired(
    inventory: Inventory, manifest: Manifest, keep_superseded_s: float, result: Collection
) -> Iterator[Removal]:
    tainted = {retired.path for retired in manifest.tainted()}
    for info, retired in inventory.retired:
        if info.path in tainted:
            yield Removal(info.path, info.size, "purged")
        elif retired.reason == "compacted" and time.time() - retired.time < keep_superseded_s:
            result.kept_for_readers += 1
        else:
            yield Removal(info.path, info.size, retired.reason)


def _useless_checkpoints(dataset: Dataset, inventory: Inventory) -> Iterator[Removal]:
    """Those that readers pass over, and those that time travel can do without."""
    gone = set(superfluous(list(inventory.checkpoints)))
    useless: list[int] = []
    for version in inventory.checkpoints.keys() - gone:
        try:
            read_checkpoint(dataset.store, dataset.log, dataset.root_digest, version)
        except (UnusableCheckpointError, FileNotFoundError):
            useless.append(version)
    # One that is of no use may have made a good one look superfluous: then the next run thins out.
    useless += [] if useless else gone
    yield from (Removal(checkpoint_path(v), inventory.checkpoints[v].size, "checkpoint") for v in sorted(useless))


def _useless_indexes(dataset: Dataset, inventory: Inventory, manifest: Manifest) -> Iterator[Removal]:
    """Those that readers pass over, that others repeat, that no stored file needs, or that repeat a purged sample."""
    tainted = {retired.path for retired in manifest.tainted()}
    stored = inventory.visible.keys() | {info.path for info, _ in inventory.retired}
    useful: dict[str, SampleIndex] = {}
    for path, info in inventory.indexes.items():
        try:
            index = SampleIndex.decode(path, dataset.store.get(path))
        except (DamagedError, FileNotFoundError):
            yield Removal(path, info.size, "index")
            continue
        if index.root != manifest.root or not tainted.isdisjoint(index.files) or stored.isdisjoint(index.files):
            yield Removal(path, info.size, "index")
        else:
            useful[path] = index
    kept = without_repeats(useful.values())
    yield from (Removal(p, inventory.indexes[p].size, "index") for p in useful if useful[p] not in kept)


def _abandoned_uploads(dataset: Dataset, cutoff: datetime, result: Collection) -> list[Removal]:
    """Multipart uploads that began before `cutoff` and never ended; their path is the key in the bucket."""
    if not dataset.store.is_remote:
        return []
    client = _boto3_client(result)
    if client is None:
        return []
    store = _s3(dataset)
    pages = client.get_paginator("list_multipart_uploads").paginate(
        Bucket=store.bucket, Prefix=f"{store.prefix}/" if store.prefix else ""
    )
    uploads = [upload for page in pages for upload in page.get("Uploads", []) if upload["Initiated"] < cutoff]
    return [Removal(upload["Key"], 0, "upload", upload_id=upload["UploadId"]) for upload in uploads]


def _abort_upload(dataset: Dataset, key: str, upload_id: str) -> None:
    client = _boto3_client(None)
    assert client is not None
    client.abort_multipart_upload(Bucket=_s3(dataset).bucket, Key=key, UploadId=upload_id)


def _s3(dataset: Dataset) -> S3Store:
    from storage.store_s3 import S3Store

    assert isinstance(dataset.store, S3Store)
    return dataset.store


def _boto3_client(result: Collection | None) -> Any:
    # The object-store client has no call for this, and boto3 is a large dependency for one call: used when installed.
    try:
        import boto3
    except ImportError:
        if result is not None:
            result.notes.append(
                "abandoned multipart uploads were not looked for: install boto3, or set a lifecycle rule on the bucket"
            )
        return None
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return boto3.client("s3", endpoint_url=endpoint)
