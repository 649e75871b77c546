"""What is stored under a data set, sorted by what the log says about it: the ground that verify and gc stand on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from storage.checkpoint import checkpoint_path, checkpoint_version, decode_checkpoint
from storage.dataset import DATASET_FILE, Dataset
from storage.errors import DamagedError, LostEntriesError
from storage.log import entry_version
from storage.manifest import Manifest, Retired
from storage.sample_index import SampleIndex, index_version
from storage.store import STAGING, ObjectInfo
from storage.types import FileOrigin, parse_data_file_name

DATA_FOLDERS = ("shards", "samples", "rejects", "head")
# Ids of compacting writers. Their files are named after units that are visible already, so that rule "a file of a
# visible unit can never be committed" does not hold for them.
COMPACT_WRITER = "compact_"


@dataclass
class Inventory:
    """Every stored file once, by role."""

    log: dict[int, ObjectInfo] = field(default_factory=dict)
    checkpoints: dict[int, ObjectInfo] = field(default_factory=dict)
    indexes: dict[str, ObjectInfo] = field(default_factory=dict)  # of samples: derived, like checkpoints
    visible: dict[str, ObjectInfo] = field(default_factory=dict)
    retired: list[tuple[ObjectInfo, Retired]] = field(default_factory=list)
    orphans: list[tuple[ObjectInfo, FileOrigin]] = field(default_factory=list)  # unfinished files in staging too
    scraps: list[ObjectInfo] = field(default_factory=list)  # temporary files and unit plans that lost a race
    foreign: list[ObjectInfo] = field(default_factory=list)  # nothing of ours has such a name


def take_inventory(files: Iterable[ObjectInfo], manifest: Manifest, units_path: str) -> Inventory:
    """Sorts a listing. The manifest must be read after the listing was: an orphan was then never visible."""
    inventory = Inventory()
    visible = set(manifest.files_table()["path"].to_pylist())
    if manifest.head is not None:
        visible.add(manifest.head.path)
    visible |= {DATASET_FILE, units_path}
    retired = manifest.retired()
    for info in files:
        path = info.path
        folder, _, rest = path.partition("/")
        if path in visible:
            inventory.visible[path] = info
        elif path in retired:
            inventory.retired.append((info, retired[path]))
        elif (version := entry_version(path)) is not None:
            inventory.log[version] = info
        elif (version := checkpoint_version(path)) is not None:
            inventory.checkpoints[version] = info
        elif index_version(path) is not None:
            inventory.indexes[path] = info
        elif folder in DATA_FOLDERS and (origin := parse_data_file_name(rest)) is not None:
            inventory.orphans.append((info, origin))
        elif folder == STAGING:
            staged = parse_data_file_name(rest)
            if staged is not None:
                inventory.orphans.append((info, staged))
            else:
                inventory.scraps.append(info)
        elif folder == path and path.startswith("units-") and path.endswith(".parquet"):
            inventory.scraps.append(info)
        else:
            inventory.foreign.append(info)
    return inventory


def can_be_committed(info: ObjectInfo, origin: FileOrigin, manifest: Manifest) -> bool:
    """Whether a writer that comes back could still make this orphan visible."""
    if origin.writer in manifest.fenced:
        return False
    folder = info.path.removeprefix(f"{STAGING}/").partition("/")[0]
    is_of_unit = folder != "head" and not origin.writer.startswith(COMPACT_WRITER)
    return not (is_of_unit and manifest.has_unit(origin.unit))


def find_lost_entries(dataset: Dataset, inventory: Inventory, manifest: Manifest) -> LostEntriesError | None:
    """The error for a log without its newest entries, when a checkpoint or an index was written after them.

    Both are listed before the manifest is read, so none of them can be newer.
    """
    named = {checkpoint_path(version): version for version in inventory.checkpoints}
    named |= {path: index_version(path) or 0 for path in inventory.indexes}
    for path in sorted((path for path in named if named[path] > manifest.version), key=lambda path: -named[path]):
        if _root_of(dataset, path) == manifest.root:
            return LostEntriesError(named[path], path)
    return None


def _root_of(dataset: Dataset, path: str) -> str | None:
    """The data set that a checkpoint or an index says it is of; None when it cannot be read."""
    try:
        data = dataset.store.get(path)
        is_index = index_version(path) is not None
        return SampleIndex.decode(path, data).root if is_index else decode_checkpoint(path, data).root
    except (DamagedError, FileNotFoundError):
        return None
