"""Is a data set what its log says it is?

Fast: the log is whole, every visible file is stored with its size, every expected sample is accounted for. Deep: also
every entry of the chain, every file's digest, every row of the samples tables against its shard, and every sample's
states against their checksum. What a dead writer left is reported as a notice: it is no fault, gc removes it.

Nothing but the log says what the log holds. Newest entries that vanished are noticed when something was written after
them that names their version: a checkpoint (every 1,000 versions, and with `complete`) or an index of samples (with the
checkpoints, and after compact). Entries that vanished since then leave a data set that looks as it did before them: the
files that they made visible show up as orphans, which is what a dead writer leaves too.
"""

from __future__ import annotations

import os

from storage.checkpoint import UnusableCheckpointError, checkpoint_path, checkpoint_versions, read_checkpoint
from storage.dataset import Dataset
from storage.errors import DamagedError, LostEntriesError
from storage.listing import Inventory, find_lost_entries, take_inventory
from storage.log import entry_path
from storage.manifest import Manifest, ManifestFile
from storage.snapshot import Snapshot
from storage.types import FileEntry
from storage.verify_deep import check_deep
from storage.verify_report import Finding, Progress, Report

__all__ = ["Finding", "Progress", "Report", "verify"]

_STATE_KEYS = {"files": ["path"], "units": ["unit"], "tombstones": ["row", "turn", "n"], "retired": ["path"]}


def verify(uri: str | os.PathLike[str], deep: bool = False, progress: Progress | None = None) -> Report:
    """Checks the newest version of a data set.

    Damage is reported, not raised. Raises FileNotFoundError when there is no data set, SchemaError when a part is of
    another schema, StoreError when the store itself fails.
    """
    report = Report(os.fspath(uri), deep=deep)
    try:
        dataset = Dataset.open(uri)
        report.uri = dataset.uri
        listing = list(dataset.store.list())
        manifest = _fold_log(dataset, report) if deep else dataset.manifest()
    except DamagedError as error:
        # Without its identity and log nothing else of a data set can be judged.
        report.error("log", _path_of(error), str(error))
        return report
    report.version = manifest.version
    inventory = take_inventory(listing, manifest, dataset.units_path)
    snapshot = Snapshot(dataset, manifest)
    _check_log_listing(dataset, inventory, manifest, report)
    lost = find_lost_entries(dataset, inventory, manifest)
    if lost is not None:
        report.error("log", _path_of(lost), str(lost))
    present = _check_files(snapshot, manifest, inventory, report)
    _check_accounting(snapshot, manifest, report)
    _note_leftovers(inventory, report)
    if deep:
        check_deep(snapshot, manifest, present, inventory, report, progress or (lambda what, done, total: None))
    return report


def _path_of(error: DamagedError) -> str:
    return str(error).partition(": ")[0]


def _fold_log(dataset: Dataset, report: Report) -> Manifest:
    """Folds the whole log from its first entry; compares every checkpoint on the way."""
    manifest = Manifest.empty(dataset.root_digest)
    stored = set(checkpoint_versions(dataset.store))
    for entry in dataset.log.read_after(0, dataset.root_digest):
        manifest.apply(entry)
        if entry.version in stored:
            stored.discard(entry.version)
            manifest = manifest.rebased()
            _check_checkpoint(dataset, entry.version, manifest, report)
    for version in sorted(stored):
        _check_checkpoint(dataset, version, None, report)
    return manifest


def _check_checkpoint(dataset: Dataset, version: int, expected: Manifest | None, report: Report) -> None:
    """Compares a checkpoint with what the log adds up to at its version (None when the log has no such version)."""
    path = checkpoint_path(version)
    try:
        found = read_checkpoint(dataset.store, dataset.log, dataset.root_digest, version)
    except LostEntriesError:
        pass  # reported with what else tells of them
    except UnusableCheckpointError as error:
        report.error("checkpoint", path, str(error))
    except FileNotFoundError:
        pass  # gc thins them out
    else:
        if expected is not None and not _same_state(found, expected):
            report.error("checkpoint", path, "is not what the log adds up to at this version")


def _same_state(a: Manifest, b: Manifest) -> bool:
    plain = [(m.root, m.version, m.digest, m.complete_at, m.head, m.fenced) for m in (a, b)]
    if plain[0] != plain[1]:
        return False
    pairs = [
        (getattr(a.base, name).sort_by([(key, "ascending") for key in keys]), getattr(b.base, name), keys)
        for name, keys in _STATE_KEYS.items()
    ]
    return all(left.equals(right.sort_by([(key, "ascending") for key in keys])) for left, right, keys in pairs)


def _check_log_listing(dataset: Dataset, inventory: Inventory, manifest: Manifest, report: Report) -> None:
    for version in range(1, manifest.version + 1):
        # An entry that is newer than the listing is looked for once more.
        if version not in inventory.log and not dataset.store.exists(entry_path(version)):
            report.error("missing", entry_path(version), "this log entry is missing")


def _check_files(
    snapshot: Snapshot, manifest: Manifest, inventory: Inventory, report: Report
) -> list[ManifestFile | FileEntry]:
    """Compares the manifest with the listing; returns the files that are there with their size."""
    present: list[ManifestFile | FileEntry] = []
    entries: list[ManifestFile | FileEntry] = list(manifest.files())
    if manifest.head is not None:
        entries.append(manifest.head)
    for entry in entries:
        unit = entry.unit if isinstance(entry, ManifestFile) else None
        info = inventory.visible.get(entry.path)
        report.num_files += 1
        report.num_bytes += entry.size
        if info is None:
            # Not in the listing, which was taken before the manifest was read: it may be newer.
            try:
                size = snapshot.dataset.store.size(entry.path)
            except FileNotFoundError:
                report.absent(snapshot.missing(entry), "missing", entry.path, f"{entry.kind} file is missing", unit)
                continue
        else:
            size = info.size
        if size != entry.size:
            report.error("size", entry.path, f"{size} bytes, the manifest says {entry.size}", unit)
            continue
        present.append(entry)
    return present


def _check_accounting(snapshot: Snapshot, manifest: Manifest, report: Report) -> None:
    accounting = snapshot.accounting()
    if not accounting.balances:
        report.error("accounting", "log", f"expected samples do not add up: {accounting}")
    plans = snapshot.dataset.units_table
    expected = dict(zip(plans["unit"].to_pylist(), plans["expected_samples"].to_pylist(), strict=True))
    units = manifest.units_table()
    columns = (units[name].to_pylist() for name in ("unit", "num_samples", "num_rejects", "version"))
    for unit, num_samples, num_rejects, version in zip(*columns, strict=True):
        if unit not in expected:
            report.error("accounting", entry_path(version), f"unit {unit} is not in the plan", unit)
        elif num_samples + num_rejects != expected[unit]:
            detail = f"{num_samples} samples and {num_rejects} rejects for {expected[unit]} expected keys"
            report.error("accounting", entry_path(version), detail, unit)


def _note_leftovers(inventory: Inventory, report: Report) -> None:
    for info, origin in inventory.orphans:
        report.notice("orphan", info.path, f"{info.size} bytes of writer {origin.writer}, never committed", origin.unit)
    for info, retired in inventory.retired:
        report.notice("superseded", info.path, f"{info.size} bytes, {retired.reason} at version {retired.version}")
    for info in inventory.scraps:
        report.notice("scrap", info.path, f"{info.size} bytes, temporary")
    for info in inventory.foreign:
        report.notice("foreign", info.path, f"{info.size} bytes, no file of a data set has such a name")
