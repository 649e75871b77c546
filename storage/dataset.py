"""A data set: `dataset.json` says what it is, the log says what is in it.

dataset.json            identity, schema version, unit plan file; written once
units-<digest>.parquet  the unit plans
log/<version>.json      the commit log; readers trust it alone
checkpoints/            the folded log, every 1,000 versions and at the end; indexes of samples
shards/ samples/ rejects/ head/    data files, named after unit, attempt and writer
staging/                unfinished files of a local data set
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage import checkpoint
from storage.digest import file_digest
from storage.errors import CompleteError, ContentionError, DamagedError, FencedError, IdentityError, SchemaError
from storage.identity import Identity, canonical_json
from storage.log import Log, LogEntry, make_entry
from storage.manifest import COMMITTED, Manifest
from storage.store import Store, check_path, open_store
from storage.types import FileEntry, SampleKey, UnitPlan, data_file_name

if TYPE_CHECKING:
    from storage.snapshot import Snapshot
    from storage.writer import Writer

SCHEMA = 1
FORMAT = "headrace data set"
DATASET_FILE = "dataset.json"
# A lost race means that another writer got on. 1,000 losses in a row mean that something else is wrong.
MAX_RACES = 1000
_WRITER_ID = re.compile(r"[A-Za-z0-9_]{1,64}")
_UNITS_SCHEMA = pa.schema([pa.field(field.name, pa.int64(), nullable=False) for field in fields(UnitPlan)])
_COPY_BYTES = 16 << 20


def new_writer_id() -> str:
    """A writer id nobody else has: time and 64 random bits."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}x{secrets.token_hex(8)}"


class Dataset:
    """An open data set. Threads may share it; another process opens it again by its URI."""

    def __init__(self, store: Store, identity: Identity, units: pa.Table, root_digest: str, units_path: str) -> None:
        """Use `create` or `open`."""
        self.store = store
        self.uri = store.uri
        self.identity = identity
        self.log = Log(store)
        self.units_table = units
        self.units_path = units_path
        self.root_digest = root_digest
        self._writer_id = new_writer_id()
        self._lock = threading.Lock()
        self._latest: Manifest | None = None

    @classmethod
    def create(cls, uri: str | os.PathLike[str], identity: Identity, units: Sequence[UnitPlan]) -> Dataset:
        """Makes a data set, or opens the one there when it has this very identity.

        Raises IdentityError (a ValueError) naming each field that differs, and ValueError for units that are not
        numbered from 0 in order of their prompts.
        """
        _check_units(units)
        identity = identity.with_units(units)
        store = open_store(uri)
        if not store.exists(DATASET_FILE):
            table = pa.Table.from_pylist([asdict(unit) for unit in units], schema=_UNITS_SCHEMA)
            sink = io.BytesIO()
            pq.write_table(table, sink, compression="zstd")
            data = sink.getvalue()
            digest = hashlib.sha256(data).hexdigest()
            path = f"units-{digest[:16]}.parquet"
            store.put_if_absent(path, data)
            content = {
                "format": FORMAT,
                "schema": SCHEMA,
                "identity": identity.to_json(),
                "units": {"path": path, "size": len(data), "digest": digest},
                "created": round(time.time(), 3),
            }
            # Losing this race is no fault: the other creator's identity is compared like any older one.
            store.put_if_absent(DATASET_FILE, _seal(content))
        dataset = cls.open(uri)
        differences = dataset.identity.differences(identity)
        if differences:
            raise IdentityError(
                f"{dataset.uri} is another data set: "
                + "; ".join(
                    line.replace(" here,", " in the data set,").replace(" there", " now") for line in differences
                )
                + ". Use the same settings or another URI"
            )
        return dataset

    @classmethod
    def open(cls, uri: str | os.PathLike[str]) -> Dataset:
        """Raises FileNotFoundError when there is no data set, DamagedError or SchemaError naming the file."""
        store = open_store(uri)
        try:
            data = store.get(DATASET_FILE)
        except FileNotFoundError:
            raise FileNotFoundError(f"no data set at {store.uri}: {DATASET_FILE} is missing there") from None
        content = _unseal(data)
        identity = Identity.from_json(content["identity"])
        path = check_path(content["units"]["path"])
        try:
            units = store.get(path)
        except FileNotFoundError:
            raise DamagedError(f"{path}: missing from {store.uri}") from None
        if hashlib.sha256(units).hexdigest() != content["units"]["digest"]:
            raise DamagedError(f"{path}: its bytes do not match the digest in {DATASET_FILE}")
        return cls(store, identity, pq.read_table(io.BytesIO(units)), hashlib.sha256(data).hexdigest(), path)

    @cached_property
    def units(self) -> list[UnitPlan]:
        """The unit plans; unit k is at position k."""
        columns = [self.units_table[field.name].to_pylist() for field in fields(UnitPlan)]
        return [UnitPlan(*values) for values in zip(*columns, strict=True)]

    def snapshot(self, version: int | None = None) -> Snapshot:
        """What a reader sees at `version`, by default the newest. Version 0 is the empty data set.

        Raises ValueError for a version that does not exist (yet).
        """
        from storage.snapshot import Snapshot

        return Snapshot(self, self.manifest(version))

    def writer(self, writer_id: str | None = None) -> Writer:
        """A writer; one id is one attempt at life, so by default each call makes a new one."""
        from storage.writer import Writer

        return Writer(self, check_writer_id(writer_id) if writer_id is not None else new_writer_id())

    def complete(self) -> int:
        """Closes the data set and returns the version that did; again is no error.

        Raises ValueError naming units that are still pending: done means that every expected sample is accounted for.
        """

        def build(manifest: Manifest) -> Mapping[str, Any] | None:
            if manifest.complete_at is not None:
                return None
            pending = self._pending(manifest)
            if pending:
                raise ValueError(
                    f"{self.uri} cannot be completed: {len(pending)} of {self.units_table.num_rows} units are pending, "
                    f"the first {pending[:10]}"
                )
            return {}

        manifest = self.append("complete", build)
        assert manifest.complete_at is not None
        return manifest.complete_at

    def expire(self, units: Iterable[int]) -> int:
        """Marks units as consumed: no longer read, never generated again; gc removes their files. Returns the version.

        Units that expired before are left out. Raises ValueError for pending ones.
        """
        wanted = sorted(set(units))

        def build(manifest: Manifest) -> Mapping[str, Any] | None:
            states = {unit: manifest.unit(unit) for unit in wanted}
            pending = [unit for unit, state in states.items() if state is None]
            if pending:
                raise ValueError(f"units {pending[:10]} cannot expire: they are not committed")
            now = {unit for unit, state in states.items() if state and state.status == COMMITTED}
            if not now:
                return None
            removed = [file.path for file in manifest.unit_files(now) if self._is_unused(manifest, file.units, now)]
            return {"units": sorted(now), "removed": removed}

        return self.append("expired", build).version

    def delete(self, keys: Iterable[SampleKey]) -> int:
        """Hides samples from every later snapshot; `compact --purge` then removes their bytes. Returns the version.

        Keys deleted before are left out. Raises ValueError naming keys that are no sample.
        """
        wanted = sorted({SampleKey(*key) for key in keys})
        snapshot = self.snapshot()
        fresh = [key for key in wanted if key not in snapshot.tombstones]
        table = snapshot.samples(columns=["row", "turn", "n", "unit"], keys=fresh)
        units = {SampleKey(v["row"], v["turn"], v["n"]): v["unit"] for v in table.to_pylist()}
        unknown = [str(key) for key in fresh if key not in units]
        if unknown:
            raise ValueError(f"{len(unknown)} keys are no samples of {self.uri}: {', '.join(unknown[:10])}")

        def build(manifest: Manifest) -> Mapping[str, Any] | None:
            gone = manifest.tombstones()
            now = [[*key, units[key]] for key in fresh if key not in gone]
            return {"keys": now} if now else None

        return self.append("tombstone", build).version

    def fence(self, writers: Iterable[str]) -> int:
        """Refuses every later log entry of these writers. Returns the version."""
        wanted = sorted(set(writers))

        def build(manifest: Manifest) -> Mapping[str, Any] | None:
            now = [writer for writer in wanted if writer not in manifest.fenced]
            return {"writers": now} if now else None

        return self.append("fence", build).version

    def put_head(self, local_file: Path) -> FileEntry:
        """Stores the verifier head, once; the same file again is no error, a different one raises ValueError."""
        digest = file_digest(local_file)
        known = self.manifest().head
        if known is None:
            # A writer id of its own: gc must be able to fence an upload that never came to its entry.
            writer = new_writer_id()
            path = "head/" + data_file_name(0, 0, writer, 0, "safetensors")
            staged = self.store.staging_file(path)
            try:
                with local_file.open("rb") as source, staged.open("wb") as copy:
                    shutil.copyfileobj(source, copy, _COPY_BYTES)
                entry = FileEntry(path, staged.stat().st_size, file_digest(staged), "head", 0)
                if entry.digest != digest:
                    raise ValueError(f"{local_file} changed while it was stored ({digest}, then {entry.digest})")
                self.store.put_file(path, staged)
            finally:
                staged.unlink(missing_ok=True)

            def build(manifest: Manifest) -> Mapping[str, Any] | None:
                return {"file": entry.to_json()} if manifest.head is None else None

            known = self.append("head", build, writer).head
            assert known is not None
        if known.digest != digest:
            raise ValueError(
                f"{self.uri} has a verifier head {known.digest}, {local_file} has {digest}: "
                "the weights are not those that this data set was made with"
            )
        return known

    def manifest(self, version: int | None = None) -> Manifest:
        """The folded log at `version`, by default the newest. The caller may change what it gets."""
        if version is None:
            with self._lock:
                self._latest = self._load(None) if self._latest is None else self._refresh(self._latest)
                return self._latest.copy()
        manifest = self._load(version) if version >= 0 else None
        if manifest is None or manifest.version != version:
            newest = self.manifest().version
            raise ValueError(f"{self.uri} has no version {version}; the newest is {newest}")
        return manifest

    def append(
        self, kind: str, build: Callable[[Manifest], Mapping[str, Any] | None], writer: str | None = None
    ) -> Manifest:
        """Appends one log entry; the one way into the log.

        `build` makes the entry's body from the state it will follow, or returns None when there is nothing to append
        (any more). It is called again after each lost race, with what the others appended. Returns the state after the
        entry (or the state that made it superfluous). Raises FencedError, CompleteError (for a commit that would add
        something) and, after MAX_RACES lost races, ContentionError.
        """
        writer = writer or self._writer_id
        for race in range(MAX_RACES):
            manifest = self.manifest()
            if writer in manifest.fenced:
                raise FencedError(
                    f"writer {writer} was fenced at version {manifest.fenced[writer]} of {self.uri}: gc may have "
                    "removed its files. Start a new writer; what it had not committed is done again"
                )
            body = build(manifest)
            if body is None:
                return manifest
            if kind == "commit" and manifest.complete_at is not None:
                raise CompleteError(f"{self.uri} was completed at version {manifest.complete_at}: nothing can be added")
            entry = make_entry(manifest.version + 1, kind, writer, manifest.digest, json.loads(canonical_json(body)))
            # Before it is published: an entry that breaks the log's rules would make the data set unreadable.
            manifest.apply(entry)
            if self.log.append(entry):
                # The last entry that most data sets get: with a checkpoint after it, its loss would be noticed.
                self._advance(manifest, even_if_recent=kind == "complete")
                return manifest.copy()
            # Losers in step would lose again in step; and a network file system may show the winner's entry late.
            time.sleep(random.uniform(0, min(0.5, 0.002 * (race + 1))))
        raise ContentionError(f"{self.uri}: lost the race for the next log version {MAX_RACES} times in a row")

    def _load(self, until: int | None) -> Manifest:
        manifest = checkpoint.newest_checkpoint(self.store, self.log, self.root_digest, until)
        manifest = manifest or Manifest.empty(self.root_digest)
        for entry in self.log.read_after(manifest.version, manifest.digest, until):
            manifest.apply(entry)
        return manifest

    def _refresh(self, manifest: Manifest) -> Manifest:
        # Probing the next version is one request; listing a log of 100,000 entries is 0.1 s.
        entry: LogEntry | None = None
        manifest = manifest.copy()
        for _ in range(8):
            entry = self.log.read(manifest.version + 1)
            if entry is None:
                break
            manifest.apply(entry)
        if entry is not None:
            for entry in self.log.read_after(manifest.version, manifest.digest):
                manifest.apply(entry)
        return manifest.rebased() if manifest.version - manifest.base_version > checkpoint.INTERVAL else manifest

    def _advance(self, manifest: Manifest, even_if_recent: bool) -> None:
        """Takes over the state after our own entry, and writes a checkpoint when one is due."""
        is_due = manifest.version - manifest.base_version >= checkpoint.INTERVAL
        if is_due or even_if_recent:
            manifest = manifest.rebased()
            if checkpoint.write_checkpoint(self.store, manifest, even_if_recent=even_if_recent) and is_due:
                self._index_samples(manifest)
        with self._lock:
            if self._latest is None or self._latest.version < manifest.version:
                self._latest = manifest

    def _index_samples(self, manifest: Manifest) -> None:
        from storage.sample_table import try_update_index
        from storage.snapshot import Snapshot

        try_update_index(Snapshot(self, manifest.copy()))

    def _pending(self, manifest: Manifest) -> list[int]:
        return [unit for unit in self.units_table["unit"].to_pylist() if not manifest.has_unit(unit)]

    @staticmethod
    def _is_unused(manifest: Manifest, units: Iterable[int], expiring: set[int]) -> bool:
        """Whether a file of these units holds nothing visible once `expiring` are gone."""
        states = (manifest.unit(unit) for unit in units if unit not in expiring)
        return all(state is None or state.status != COMMITTED for state in states)


def check_writer_id(writer_id: str) -> str:
    if not _WRITER_ID.fullmatch(writer_id):
        raise ValueError(f"writer id {writer_id!r} must be 1 to 64 letters, digits and _")
    return writer_id


def _check_units(units: Sequence[UnitPlan]) -> None:
    end = 0
    for position, unit in enumerate(units):
        if unit.unit != position or unit.first < end or unit.num_prompts < 1 or unit.expected_samples < 0:
            raise ValueError(f"{unit} at position {position}: units are numbered from 0 and do not overlap")
        end = unit.first + unit.num_prompts


def _seal(content: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(canonical_json(content)).hexdigest()
    return canonical_json({**content, "digest": digest}) + b"\n"


def _unseal(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except ValueError as error:
        raise DamagedError(f"{DATASET_FILE}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedError(f"{DATASET_FILE}: not the file of a data set")
    content.pop("digest", None)
    if _seal(content) != data:
        raise DamagedError(f"{DATASET_FILE}: its bytes do not match its digest")
    if content["schema"] != SCHEMA:
        raise SchemaError(
            f"{DATASET_FILE}: schema version {content['schema']}, this code knows {SCHEMA}: use a newer headrace"
        )
    return content
