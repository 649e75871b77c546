"""The commit log: `log/<version>.json`, one entry a version, each chained to the one before by its digest.

An entry is one line of canonical JSON. Its digest is the sha256 of that line without the digest, and a reader
re-serialises what it parsed and compares it with the bytes it read, so a flip of any byte is found. Versions are dense
from 1, and an entry names its predecessor's digest: whoever appends has seen every entry before, which is what makes
fences and "a unit is visible once" hold.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from storage.errors import DamagedError, SchemaError, StoreError
from storage.identity import canonical_json
from storage.store import Store

SCHEMA = 2
FOLDER = "log"
KINDS = ("commit", "complete", "expired", "tombstone", "fence", "head", "compact")
_FIELDS = {"schema", "version", "kind", "writer", "time", "id", "previous", "body", "digest"}
_READ_AHEAD = 64  # entries of a remote log fetched together
_READ_THREADS = 16


@dataclass(frozen=True)
class LogEntry:
    """One entry. `previous` is the digest of the entry before, or of `dataset.json` for version 1."""

    version: int
    kind: str
    writer: str
    time: float  # unix seconds, by the writer's clock: for people, nothing is ordered by it
    id: str  # unique; tells a writer whether the entry it finds is its own
    previous: str
    body: Mapping[str, Any]
    digest: str

    def encode(self) -> bytes:
        return canonical_json({**self._content(), "digest": self.digest}) + b"\n"

    def _content(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "version": self.version,
            "kind": self.kind,
            "writer": self.writer,
            "time": self.time,
            "id": self.id,
            "previous": self.previous,
            "body": self.body,
        }


def make_entry(version: int, kind: str, writer: str, previous: str, body: Mapping[str, Any]) -> LogEntry:
    """A new entry with its time, id and digest filled in."""
    assert kind in KINDS, kind
    draft = LogEntry(version, kind, writer, round(time.time(), 3), uuid.uuid4().hex, previous, body, "")
    return LogEntry(**{**draft.__dict__, "digest": hashlib.sha256(canonical_json(draft._content())).hexdigest()})


def entry_path(version: int) -> str:
    return f"{FOLDER}/{version:020d}.json"


def entry_version(path: str) -> int | None:
    """The version that a path below `log/` names, None for anything else."""
    name = path.removeprefix(f"{FOLDER}/")
    digits = name.removesuffix(".json")
    return int(digits) if len(digits) == 20 and digits.isdigit() and entry_path(int(digits)) == path else None


def decode_entry(path: str, data: bytes) -> LogEntry:
    """Parses and checks one entry by itself. Raises SchemaError or DamagedError naming the file."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise DamagedError(f"{path}: not a log entry: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("schema"), int):
        raise DamagedError(f"{path}: not a log entry: it has no schema version")
    digest = value.get("digest")
    # Whether the bytes are whole comes first: a flipped bit must not read as "from a newer version". The digest is that
    # of the line without it; cutting it out of the bytes saves serialising the entry a second time.
    content = data[:-1].replace(f'"digest":"{digest}",'.encode(), b"", 1)
    if canonical_json(value) + b"\n" != data or hashlib.sha256(content).hexdigest() != digest:
        raise DamagedError(f"{path}: its bytes do not match its digest")
    if value["schema"] != SCHEMA:
        older = isinstance(value["schema"], int) and value["schema"] < SCHEMA
        remedy = "use the headrace that wrote it" if older else "use a newer headrace"
        raise SchemaError(f"{path}: schema version {value['schema']}, this code knows {SCHEMA}: {remedy}")
    if set(value) != _FIELDS:
        raise DamagedError(f"{path}: fields {sorted(value)} are not those of a log entry")
    if value["kind"] not in KINDS:
        raise SchemaError(f"{path}: kind {value['kind']!r} is not one of {list(KINDS)}: use a newer headrace")
    if entry_path(value["version"]) != path:
        raise DamagedError(f"{path}: holds version {value['version']}: the file was renamed or swapped")
    del value["schema"]
    return LogEntry(**value)


def check_chain(entry: LogEntry, version: int, digest: str) -> None:
    """Raises DamagedError unless `entry` follows the entry `version` with `digest`."""
    if entry.version != version + 1 or entry.previous != digest:
        raise DamagedError(
            f"{entry_path(entry.version)}: its predecessor's digest is {entry.previous[:12]}..., "
            f"but version {version} has {digest[:12]}...: an entry was replaced"
        )


class Log:
    """The entries of one data set in their store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self, version: int) -> LogEntry | None:
        """The entry of a version, None when there is none (yet)."""
        path = entry_path(version)
        try:
            return decode_entry(path, self._store.get(path))
        except FileNotFoundError:
            return None

    def read_again(self, version: int) -> LogEntry | None:
        """As `read`, where another file tells that the entry is there.

        A client of NFS that looked for a name too early goes on answering "not there" from its cache, for up to a
        minute, until it opens the folder: so that comes first.
        """
        next(self._store.list(FOLDER, start_after=entry_path(version - 1)), None)
        return self.read(version)

    def read_after(self, version: int, digest: str, until: int | None = None) -> Iterator[LogEntry]:
        """The entries after `version` (whose digest is given) in order, up to and including `until`, chain checked.

        Raises DamagedError naming an entry that is missing although later ones are there.
        """
        for versions in _batches(self._versions_after(version, until)):
            for expected, entry in zip(versions, self._read_many(versions), strict=True):
                if entry is None:
                    raise DamagedError(f"{entry_path(expected)}: missing, although later log entries exist")
                check_chain(entry, version, digest)
                version, digest = entry.version, entry.digest
                yield entry

    def append(self, entry: LogEntry) -> bool:
        """Publishes the entry as its version; False when another writer's entry has that version.

        A lost answer is resolved by reading back: when the entry there is ours, it was published.
        """
        path = entry_path(entry.version)
        try:
            if self._store.put_if_absent(path, entry.encode()):
                return True
        except StoreError:
            found = self.read(entry.version)
            if found is None:
                raise
            return found.id == entry.id
        found = self.read(entry.version)
        return found is not None and found.id == entry.id

    def _versions_after(self, version: int, until: int | None) -> range:
        last = version
        for info in self._store.list(FOLDER, start_after=entry_path(version)):
            found = entry_version(info.path)
            if found is not None:
                last = max(last, found)
        return range(version + 1, (last if until is None else min(last, until)) + 1)

    def _read_many(self, versions: range) -> list[LogEntry | None]:
        if not self._store.is_remote:
            return [self.read(version) for version in versions]
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            return list(pool.map(self.read, versions))


def _batches(versions: range) -> Iterator[range]:
    # A stray name can tell any version: the range may be longer than anything that has a len().
    start = versions.start
    while start < versions.stop:
        yield range(start, min(start + _READ_AHEAD, versions.stop))
        start += _READ_AHEAD
