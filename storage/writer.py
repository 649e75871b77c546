"""Writing units: files under names no reader trusts, then one log entry that makes them visible."""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.digest import bytes_digest
from storage.errors import FencedError, StoreError
from storage.manifest import Manifest, UnitFiles
from storage.store import Store, check_path
from storage.types import (
    REJECTS_SCHEMA,
    SAMPLES_SCHEMA,
    FileEntry,
    Reject,
    Sample,
    SampleKey,
    ShardTarget,
    UnitPlan,
    data_file_name,
    parse_data_file_name,
)

if TYPE_CHECKING:
    from storage.dataset import Dataset

# Row groups small enough that a key lookup decodes little, large enough that zstd sees several samples.
ROW_GROUP_ROWS = 256
_DICTIONARY_COLUMNS = ["finish_reason", "stop_reason", "category", "shard", "replica", "reason"]


@dataclass(frozen=True)
class CommitResult:
    """What a commit did: its version (None when nothing was left to commit), units accepted, units dropped."""

    version: int | None
    accepted: list[int]
    dropped: list[int]


class Writer:
    """Writes units of one data set under one writer id."""

    def __init__(self, dataset: Dataset, writer_id: str) -> None:
        self.dataset = dataset
        self.id = writer_id

    def shard_target(
        self,
        unit: int,
        attempt: int,
        *,
        shard_format: str = "safetensors",
        codec: str | None = None,
        target_bytes: int = 1 << 30,
    ) -> ShardTarget:
        """Where the shards of this attempt at a unit go; `codec` defaults to the data set's."""
        identity = self.dataset.identity
        return ShardTarget(
            uri=self.dataset.uri,
            writer=self.id,
            unit=unit,
            attempt=attempt,
            spec=identity.states,
            shard_format=shard_format,
            codec=identity.codec if codec is None else codec,
            target_bytes=target_bytes,
        )

    def write_unit(
        self, unit: int, attempt: int, samples: Sequence[Sample], rejects: Sequence[Reject], shards: Sequence[FileEntry]
    ) -> UnitFiles:
        """Writes the unit's samples and rejects tables beside its finished shards; nothing is visible yet.

        Raises ValueError naming the sample when one contradicts itself or its shard, when a key comes twice, and when
        samples and rejects are not together what the unit's plan expects; naming the shard when another writer's.
        Raises StoreError when a table cannot be stored. After an error no table is left that was known to be
        stored (gc finds others); the shards are the caller's, who may `discard` them.
        """
        self._check(unit, samples, rejects, shards)
        _check_origins(unit, self.id, shards)
        store = self.dataset.store
        tables = {"samples": samples_table(samples), "rejects": rejects_table(rejects)}
        written: list[FileEntry] = []
        try:
            for kind, table in tables.items():
                if table.num_rows:
                    path = f"{kind}/" + data_file_name(unit, attempt, self.id, 0, "parquet")
                    written.append(write_table_file(store, path, kind, table))
        except BaseException:
            # What cannot be removed either is gc's; the first error is the one that tells.
            with contextlib.suppress(OSError):
                for file in written:
                    store.delete(file.path)
            raise
        return UnitFiles(
            unit=unit,
            attempt=attempt,
            writer=self.id,
            num_samples=len(samples),
            num_rejects=len(rejects),
            num_tokens=sum(len(sample.token_ids) for sample in samples),
            raw_bytes=sum(shard.raw_bytes for shard in shards),
            files=(*shards, *written),
        )

    def discard(self, shards: Sequence[FileEntry]) -> None:
        """Removes closed shards (or other files) of an attempt of this writer that was given up.

        Only for files that nobody was given to commit, as after an error in `write_unit`: a commit under way elsewhere,
        or one whose answer was lost, can still make them visible, and the check below would come too early. Files that
        are gone already are no error.

        Raises ValueError, before anything is removed, for a file of another writer and for one that is or was visible;
        OSError when the store fails, and what is left then is gc's.
        """
        manifest = self.dataset.manifest()
        for file in shards:
            origin = parse_data_file_name(check_path(file.path))
            if origin is None or origin.writer != self.id:
                raise ValueError(
                    f"{file.path} is not named after writer {self.id}: only its own files can be discarded"
                )
            if manifest.file(file.path) is not None or manifest.retired_file(file.path) is not None:
                raise ValueError(f"{file.path} was committed to {self.dataset.uri}: it cannot be discarded")
        for file in shards:
            self.dataset.store.delete(file.path)

    def commit(self, units: Sequence[UnitFiles], info: Mapping[str, Any]) -> CommitResult:
        """Makes whole units visible in one log entry; `info` records what may differ (engine version, node, ...).

        Units that are visible already are dropped: the first commit won, also when the data set is complete since.
        Raises FencedError when this writer or one that wrote a unit's files was fenced, CompleteError when a unit would
        be added to a complete data set, ValueError when a unit is not in the plan, does not account for every expected
        sample, lacks a file or has one of another writer.
        """
        numbers = [unit.unit for unit in units]
        for unit in units:
            self._check_counts(unit)
            _check_origins(unit.unit, unit.writer, unit.files)
        accepted: list[int] = []
        checked: set[str] = set()

        def build(manifest: Manifest) -> Mapping[str, Any] | None:
            accepted.clear()
            fresh: dict[int, UnitFiles] = {}
            for unit in units:
                if unit.writer in manifest.fenced:
                    raise FencedError(
                        f"unit {unit.unit} was written by {unit.writer}, fenced at version "
                        f"{manifest.fenced[unit.writer]} of {self.dataset.uri}: gc may have removed its files. "
                        "Do the unit again"
                    )
                if not manifest.has_unit(unit.unit):
                    fresh.setdefault(unit.unit, unit)
            for unit in fresh.values():
                self._check_files(unit, checked)
            accepted.extend(fresh)
            if not fresh:
                return None
            return {"units": [unit.to_json() for unit in fresh.values()], "info": dict(info)}

        version = self.dataset.append("commit", build, self.id).version
        dropped = list((Counter(numbers) - Counter(accepted)).elements())
        return CommitResult(version if accepted else None, list(accepted), dropped)

    def _check_counts(self, unit: UnitFiles) -> None:
        plan = self._plan(unit.unit)
        if unit.num_samples + unit.num_rejects != plan.expected_samples:
            raise ValueError(
                f"unit {unit.unit}: {unit.num_samples} samples and {unit.num_rejects} rejects for "
                f"{plan.expected_samples} expected keys"
            )

    def _check_files(self, unit: UnitFiles, checked: set[str]) -> None:
        """The files must be there, whole; once for each, however many races the commit loses."""
        for file in unit.files:
            if file.path in checked:
                continue
            try:
                size = self.dataset.store.size(check_path(file.path))
            except FileNotFoundError:
                raise ValueError(f"unit {unit.unit}: {file.path} is not in {self.dataset.uri}") from None
            if size != file.size:
                raise ValueError(f"unit {unit.unit}: {file.path} has {size} bytes, not {file.size}")
            checked.add(file.path)

    def _plan(self, unit: int) -> UnitPlan:
        if not 0 <= unit < len(self.dataset.units):
            raise ValueError(f"unit {unit} is not in the plan of {self.dataset.uri} ({len(self.dataset.units)} units)")
        return self.dataset.units[unit]

    def _check(
        self, unit: int, samples: Sequence[Sample], rejects: Sequence[Reject], shards: Sequence[FileEntry]
    ) -> None:
        plan = self._plan(unit)
        seen: set[SampleKey] = set()
        items: list[Sample | Reject] = [*samples, *rejects]
        for item in items:
            if item.unit != unit:
                raise ValueError(f"{item.key}: is of unit {item.unit}, not {unit}")
            if item.key in seen:
                raise ValueError(f"{item.key}: comes twice in unit {unit}")
            seen.add(item.key)
        if len(seen) != plan.expected_samples:
            raise ValueError(
                f"unit {unit}: {len(samples)} samples and {len(rejects)} rejects "
                f"for {plan.expected_samples} expected keys"
            )
        held: Counter[str] = Counter()
        rows: Counter[str] = Counter()
        for sample in samples:
            sample.check()
            held[sample.receipt.shard] += 1
            rows[sample.receipt.shard] += sample.receipt.rows
        listed = {shard.path: shard for shard in shards}
        for path in held.keys() - listed.keys():
            raise ValueError(f"unit {unit}: samples are in {path}, which is not among its shards")
        for path, shard in listed.items():
            if (shard.num_samples, shard.rows) != (held[path], rows[path]):
                raise ValueError(
                    f"unit {unit}: {path} holds {shard.num_samples} samples of {shard.rows} rows, "
                    f"its receipts are {held[path]} of {rows[path]}"
                )


def _check_origins(unit: int, writer: str, files: Sequence[FileEntry]) -> None:
    # gc fences the writer that a file's name tells, a commit is refused by the unit's writer: they must be the same.
    for file in files:
        origin = parse_data_file_name(check_path(file.path))
        if origin is None or (origin.unit, origin.writer) != (unit, writer):
            raise ValueError(f"unit {unit}: {file.path} is not named after this unit and its writer {writer}")


def samples_table(samples: Sequence[Sample]) -> pa.Table:
    """SAMPLES_SCHEMA, in order of key."""
    return pa.Table.from_pylist([_sample_row(s) for s in sorted(samples, key=lambda s: s.key)], schema=SAMPLES_SCHEMA)


def rejects_table(rejects: Sequence[Reject]) -> pa.Table:
    """REJECTS_SCHEMA, in order of key."""
    return pa.Table.from_pylist([r.as_row() for r in sorted(rejects, key=lambda r: r.key)], schema=REJECTS_SCHEMA)


def write_table_file(store: Store, path: str, kind: str, table: pa.Table) -> FileEntry:
    """Writes a samples or rejects table (at least one row) as a Parquet file and publishes it under `path`."""
    local = store.staging_file(path)
    try:
        pq.write_table(
            table,
            local,
            row_group_size=ROW_GROUP_ROWS,
            compression="zstd",
            compression_level=3,
            use_dictionary=[name for name in _DICTIONARY_COLUMNS if name in table.column_names],
            write_statistics=True,
            write_page_index=True,
            write_page_checksum=True,
        )
        data = local.read_bytes()
        store.put_file(path, local)
    except StoreError:
        raise
    except OSError as error:
        # A full disk: the library's error names no file.
        raise StoreError(error.errno or errno.EIO, error.strerror or str(error), path) from error
    finally:
        local.unlink(missing_ok=True)
    rows = table["row"].to_pylist()
    return FileEntry(
        path=path,
        size=len(data),
        digest=bytes_digest(data),
        kind=kind,
        num_samples=table.num_rows,
        first_row=min(rows),
        last_row=max(rows),
    )


def _sample_row(sample: Sample) -> dict[str, Any]:
    receipt = sample.receipt
    return {
        **sample.key._asdict(),
        "prompt_id": sample.prompt_id,
        "unit": sample.unit,
        "token_ids": sample.token_ids,
        "num_tokens": len(sample.token_ids),
        "num_prompt_tokens": sample.num_prompt_tokens,
        "num_output_tokens": len(sample.token_ids) - sample.num_prompt_tokens,
        "num_loss_tokens": sum(end - start for start, end in sample.loss_spans),
        "loss_spans": [{"start": start, "end": end} for start, end in sample.loss_spans],
        "text": sample.text,
        "reasoning_text": sample.reasoning_text,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "category": sample.category,
        "seed": sample.seed,
        "shard": receipt.shard,
        "offset": receipt.offset,
        "nbytes": receipt.nbytes,
        "rows": receipt.rows,
        "checksum": receipt.checksum,
        "replica": sample.replica,
        "started_at": datetime.fromtimestamp(sample.started_at, UTC),
        "finished_at": datetime.fromtimestamp(sample.finished_at, UTC),
    }
