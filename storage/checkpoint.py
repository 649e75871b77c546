"""Checkpoints of the log: the folded state every so many entries, so that opening reads one file and a short tail.

A checkpoint is derived. It carries the digests of its data set and of the log entry it stands for: one that was copied
from another data set, or that stands for another entry, is passed over like a damaged one, with a warning that names
it, and gc offers to remove it. One from a newer schema is refused. One that stands for an entry that is not there any
more tells that the log lost its newest entries. `verify --deep` folds the log again and compares.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Sequence

import pyarrow as pa

from storage.errors import DamagedError, LostEntriesError, SchemaError
from storage.log import Log, entry_path
from storage.manifest import FILES_SCHEMA, RETIRED_SCHEMA, TOMBSTONES_SCHEMA, UNITS_SCHEMA, Manifest, Tables
from storage.store import Store
from storage.types import FileEntry

SCHEMA = 2
FOLDER = "checkpoints"
# Entries between checkpoints. Folding 1,000 entries takes about 0.1 s; a checkpoint of 100,000 units is some 15 MB.
INTERVAL = 1000
_MAGIC = b"headrace checkpoint"
_TABLES = {
    "files": FILES_SCHEMA,
    "units": UNITS_SCHEMA,
    "tombstones": TOMBSTONES_SCHEMA,
    "retired": RETIRED_SCHEMA,
}

_log = logging.getLogger(__name__)


class UnusableCheckpointError(DamagedError):
    """The checkpoint is damaged or not of this log; the log itself is what counts."""


def checkpoint_path(version: int) -> str:
    return f"{FOLDER}/{version:020d}.arrow"


def checkpoint_version(path: str) -> int | None:
    """The version that a path below `checkpoints/` names, None for anything else."""
    digits = path.removeprefix(f"{FOLDER}/").removesuffix(".arrow")
    return int(digits) if digits.isdigit() and checkpoint_path(int(digits)) == path else None


def encode_checkpoint(manifest: Manifest) -> bytes:
    """One line (magic, schema version, sha256 of it and the rest), one line of JSON, then the Arrow IPC streams."""
    tables = manifest.tables()
    streams: dict[str, bytes] = {}
    for name, schema in _TABLES.items():
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, schema, options=options) as writer:
            writer.write_table(getattr(tables, name).cast(schema))
        streams[name] = sink.getvalue()
    header = {
        "root": manifest.root,
        "version": manifest.version,
        "digest": manifest.digest,
        "complete_at": manifest.complete_at,
        "head": manifest.head.to_json() if manifest.head else None,
        "fenced": manifest.fenced,
        "streams": {name: len(stream) for name, stream in streams.items()},
    }
    rest = json.dumps(header, sort_keys=True).encode("ascii") + b"\n" + b"".join(streams.values())
    return b"%s %d %s\n" % (_MAGIC, SCHEMA, _digest(b"%d" % SCHEMA, rest)) + rest


def _digest(schema: bytes, rest: bytes) -> bytes:
    return hashlib.sha256(schema + b"\n" + rest).hexdigest().encode("ascii")


def decode_checkpoint(path: str, data: bytes) -> Manifest:
    """Raises DamagedError or SchemaError naming the file."""
    line, _, rest = data.partition(b"\n")
    start, _, digest = line.rpartition(b" ")
    magic, _, schema = start.rpartition(b" ")
    if magic != _MAGIC or digest != _digest(schema, rest):
        raise DamagedError(f"{path}: its bytes do not match its digest")
    if int(schema) < SCHEMA:
        raise DamagedError(f"{path}: schema version {int(schema)} is no longer read, the current one is {SCHEMA}")
    if int(schema) > SCHEMA:
        raise SchemaError(f"{path}: schema version {int(schema)}, this code knows {SCHEMA}: use a newer headrace")
    line, _, payload = rest.partition(b"\n")
    header = json.loads(line)
    if checkpoint_path(header["version"]) != path:
        raise DamagedError(f"{path}: holds version {header['version']}: the file was renamed or swapped")
    tables: dict[str, pa.Table] = {}
    offset = 0
    for name in _TABLES:
        length = header["streams"][name]
        tables[name] = pa.ipc.open_stream(pa.py_buffer(memoryview(payload)[offset : offset + length])).read_all()
        offset += length
    head = FileEntry.from_json(header["head"]) if header["head"] else None
    version = header["version"]
    return Manifest(
        header["root"],
        version,
        header["digest"],
        header["complete_at"],
        head,
        header["fenced"],
        Tables(**tables),
        base_version=version,
    )


def checkpoint_versions(store: Store) -> list[int]:
    """Versions that have a checkpoint, ascending."""
    found = (checkpoint_version(info.path) for info in store.list(FOLDER))
    return sorted(version for version in found if version is not None)


def read_checkpoint(store: Store, log: Log, root: str, version: int) -> Manifest:
    """The checkpoint of a version, of the data set `root` and of the very entry that its log has.

    Raises UnusableCheckpointError, FileNotFoundError and SchemaError for the checkpoint; LostEntriesError when the log
    has no such version any more, DamagedError naming the log entry when that is damaged.
    """
    path = checkpoint_path(version)
    try:
        manifest = decode_checkpoint(path, store.get(path))
    except DamagedError as error:
        raise UnusableCheckpointError(str(error)) from error
    if manifest.root != root:
        raise UnusableCheckpointError(f"{path}: belongs to another data set")
    entry = log.read(version) or log.read_again(version)
    if entry is None:
        raise LostEntriesError(version, path)
    if entry.digest != manifest.digest:
        raise UnusableCheckpointError(f"{path}: stands for another entry than {entry_path(version)}")
    return manifest


def newest_checkpoint(store: Store, log: Log, root: str, until: int | None = None) -> Manifest | None:
    """The state at the newest usable checkpoint not after `until`, None when there is none; see `read_checkpoint`."""
    for version in reversed(checkpoint_versions(store)):
        if until is not None and version > until:
            continue
        try:
            return read_checkpoint(store, log, root, version)
        except (UnusableCheckpointError, FileNotFoundError) as error:
            _log.warning("%s: checkpoint passed over, the log is read instead: %s", store.uri, error)
    return None


def write_checkpoint(store: Store, manifest: Manifest, *, even_if_recent: bool = False) -> bool:
    """Publishes a checkpoint, unless there is one of the last INTERVAL versions.

    False when there is, and, with a warning, when the store fails: the log stands without it.
    """
    try:
        oldest = manifest.version if even_if_recent else manifest.version - INTERVAL + 1
        if any(oldest <= version <= manifest.version for version in checkpoint_versions(store)):
            return False
        store.put_if_absent(checkpoint_path(manifest.version), encode_checkpoint(manifest))
    except OSError as error:
        # The entry it follows is committed: failing the commit now would tell its writer the opposite.
        _log.warning("%s: no checkpoint at version %d: %s", store.uri, manifest.version, error)
        return False
    return True


def superfluous(versions: Sequence[int]) -> list[int]:
    """Checkpoints that time travel can do without: from the rest, a version of any age costs at most as many entries
    to fold as half of its age, or INTERVAL if that is more.

    So the number that stay grows with the logarithm of the log's length. The newest one always stays.
    """
    gone: list[int] = []
    ascending = sorted(versions)
    for position in range(len(ascending) - 2, -1, -1):
        age = ascending[-1] - ascending[position]
        older = ascending[position - 1] if position else 0
        newer = next(version for version in ascending[position + 1 :] if version not in gone)
        if newer - older <= max(age // 2, INTERVAL):
            gone.append(ascending[position])
    return gone
