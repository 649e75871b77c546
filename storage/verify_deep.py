"""The deep half of verify: every digest, every row of the tables, every sample's states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from storage.digest import FileDigest, check_digest
from storage.errors import DamagedError, SchemaError
from storage.listing import Inventory
from storage.log import entry_path
from storage.manifest import COMMITTED, Manifest, ManifestFile
from storage.shards import open_shard_reader
from storage.shards.check import find_bad_rows
from storage.snapshot import Snapshot
from storage.types import FileEntry, Receipt, SampleKey, StateSpec
from storage.verify_report import Progress, Report

_KEY_COLUMNS = ["row", "turn", "n"]
_BLOCK_BYTES = 16 << 20
_THREADS = 4
_RECEIPT_COLUMNS = ["row", "turn", "n", "unit", "shard", "offset", "nbytes", "rows", "checksum"]


def check_deep(
    snapshot: Snapshot,
    manifest: Manifest,
    present: list[ManifestFile | FileEntry],
    inventory: Inventory,
    report: Report,
    progress: Progress,
) -> None:
    total, done = sum(entry.size for entry in present), 0
    good: set[str] = set()
    with ThreadPoolExecutor(_THREADS) as pool:
        for entry, problem in zip(present, pool.map(lambda e: _check_digest(snapshot, e), present), strict=True):
            done += entry.size
            progress("digests", done, total)
            if problem is None:
                good.add(entry.path)
            else:
                unit = entry.unit if isinstance(entry, ManifestFile) else None
                report.absent(problem, "digest", entry.path, str(problem), unit)
    _check_indexes(snapshot, inventory, report)
    tables = [e for e in present if isinstance(e, ManifestFile) and e.kind in ("samples", "rejects") and e.path in good]
    counts, tables = _check_tables(snapshot, tables, report)
    readable = {entry.path for entry in tables}
    unread = {e.units for e in manifest.files() if e.path not in (readable if e.kind != "shard" else good)}
    _check_counts(manifest, counts, unread, report)
    shards = {e.path: e for e in present if isinstance(e, ManifestFile) and e.kind == "shard"}
    _check_states(snapshot, tables, shards, report, progress)


def _check_digest(snapshot: Snapshot, entry: FileEntry) -> DamagedError | None:
    digest = FileDigest()
    try:
        for start in range(0, entry.size, _BLOCK_BYTES):
            length = min(_BLOCK_BYTES, entry.size - start)
            digest.update(snapshot.dataset.store.get_range(entry.path, start, length))
        check_digest(digest.text(), entry.digest, entry.path)
    except FileNotFoundError:
        return snapshot.missing(entry)
    except DamagedError as error:
        return error
    return None


def _check_indexes(snapshot: Snapshot, inventory: Inventory, report: Report) -> None:
    from storage.sample_index import SampleIndex

    for path in inventory.indexes:
        try:
            index = SampleIndex.decode(path, snapshot.dataset.store.get(path))
            if index.root != snapshot.dataset.root_digest:
                report.error("index", path, "belongs to another data set")
        except (DamagedError, pa.ArrowException) as error:
            report.error("index", path, str(error))
        except FileNotFoundError:
            pass  # gc and purge remove them


def _check_tables(
    snapshot: Snapshot, tables: list[ManifestFile], report: Report
) -> tuple[dict[str, Counter[int]], list[ManifestFile]]:
    """Every row by itself, and no key twice; returns rows by unit for each kind, and the tables that could be read."""
    counts: dict[str, Counter[int]] = {"samples": Counter(), "rejects": Counter()}
    keys: list[pa.Table] = []
    readable: list[ManifestFile] = []
    for entry in tables:
        try:
            table = snapshot.read_file(entry)
        except DamagedError as error:
            report.absent(error, "table", entry.path, str(error), entry.unit)
            continue
        readable.append(entry)
        if table.num_rows != entry.num_samples:
            report.error(
                "table", entry.path, f"{table.num_rows} rows, the manifest says {entry.num_samples}", entry.unit
            )
        for key, unit in zip(_keys(table), table["unit"].to_pylist(), strict=True):
            counts[entry.kind][unit] += 1
            if unit not in entry.units:
                report.error("table", entry.path, f"is of unit {unit}, not of {entry.units}", unit, str(key))
        keys.append(
            table.select(_KEY_COLUMNS).append_column("path", pa.array([entry.path] * table.num_rows, pa.string()))
        )
        if entry.kind == "samples":
            for key, unit, problem in _contradictions(table):
                report.error("table", entry.path, problem, unit, str(key))
    if keys:
        groups = (
            pa.concat_tables(keys)
            .group_by(_KEY_COLUMNS)
            .aggregate([("path", "count"), ("path", "min"), ("path", "max")])
        )
        for row in groups.filter(pc.greater(groups["path_count"], 1)).to_pylist():
            key = SampleKey(row["row"], row["turn"], row["n"])
            report.error("table", row["path_max"], f"is in {row['path_min']} too", sample=str(key))
    return counts, readable


def _contradictions(table: pa.Table) -> Iterator[tuple[SampleKey, int, str]]:
    tokens = pc.list_value_length(table["token_ids"])
    checks = {
        "num_tokens is not the number of token ids": pc.not_equal(tokens, table["num_tokens"]),
        "rows is not num_tokens - 1": pc.not_equal(pc.subtract(table["num_tokens"], 1), table["rows"]),
        "prompt and output tokens do not add up": pc.not_equal(
            pc.add(table["num_prompt_tokens"], table["num_output_tokens"]), table["num_tokens"]
        ),
    }
    keys, units = _keys(table), table["unit"].to_pylist()
    for problem, is_wrong in checks.items():
        for position in np.flatnonzero(is_wrong.to_numpy()):
            yield keys[position], units[position], problem
    columns = (table[name].to_pylist() for name in ("loss_spans", "num_loss_tokens", "num_tokens"))
    for position, (spans, num_loss, num_tokens) in enumerate(zip(*columns, strict=True)):
        edges = [edge for span in spans for edge in (span["start"], span["end"])]
        is_ordered = all(span["start"] < span["end"] for span in spans) and edges == sorted(edges)
        covered = sum(span["end"] - span["start"] for span in spans)
        if not is_ordered or covered != num_loss or (edges and not 0 <= edges[0] <= edges[-1] <= num_tokens):
            yield keys[position], units[position], f"loss spans {spans} do not fit {num_tokens} tokens"


def _check_counts(
    manifest: Manifest, counts: dict[str, Counter[int]], unread: set[tuple[int, ...]], report: Report
) -> None:
    """Rows of each unit's tables against its commit; purged samples are gone from the tables."""
    skipped = {unit for units in unread for unit in units}
    purged = Counter(t.unit for t in manifest.tombstones().values() if t.purged_at)
    units = manifest.units_table()
    units = units.filter(pc.equal(units["status"], COMMITTED))
    columns = (units[name].to_pylist() for name in ("unit", "version", "num_samples", "num_rejects"))
    for unit, version, num_samples, num_rejects in zip(*columns, strict=True):
        found = (counts["samples"][unit] + purged[unit], counts["rejects"][unit])
        if unit not in skipped and found != (num_samples, num_rejects):
            detail = (
                f"{found[0]} samples and {found[1]} rejects are stored, its commit says {num_samples} and {num_rejects}"
            )
            report.error("accounting", entry_path(version), detail, unit)


def _check_states(
    snapshot: Snapshot,
    tables: list[ManifestFile],
    shards: dict[str, ManifestFile],
    report: Report,
    progress: Progress,
) -> None:
    """Reads every sample's states: checksum, geometry, and no NaN, infinity or all-zero row."""
    spec = snapshot.dataset.identity.states
    total, done = sum(entry.raw_bytes for entry in shards.values()), 0
    held: Counter[str] = Counter()
    states = snapshot.unit_states()
    read: set[int] = set()
    for entry in tables:
        if entry.kind != "samples":
            continue
        try:
            table = snapshot.read_file(entry, _RECEIPT_COLUMNS)
        except DamagedError as error:
            report.absent(error, "table", entry.path, str(error), entry.unit)
            continue
        read.update(unit for unit in entry.units if states.get(unit) == COMMITTED)
        receipts: dict[str, list[tuple[int, Receipt]]] = {}
        for unit, receipt in receipts_of(table):
            # Merged tables keep the rows of a unit that expired later; its shards may be gone.
            if states.get(unit) == COMMITTED:
                receipts.setdefault(receipt.shard, []).append((unit, receipt))
        for path, wanted in receipts.items():
            held[path] += len(wanted)
            if path not in shards:
                if snapshot.has_file(path):
                    continue  # missing or cut, and reported as such
                for unit, receipt in wanted:
                    report.error(
                        "table", entry.path, f"names {path}, which is no visible shard", unit, str(receipt.key)
                    )
                continue
            try:
                _check_shard(snapshot, shards[path], wanted, report)
            except FileNotFoundError:
                # It was there when its digest was taken.
                reason = snapshot.missing(shards[path])
                report.absent(reason, "missing", path, str(reason), shards[path].unit)
            except ValueError as error:
                # Of another size, or with a codec that this code does not know.
                report.error("states", path, str(error), shards[path].unit)
            done += sum(receipt.rows for _, receipt in wanted) * spec.row_bytes
            progress("states", done, total)
    for path, shard in shards.items():
        if read.issuperset(shard.units) and held[path] != shard.num_samples:
            report.error("table", path, f"holds {shard.num_samples} samples, {held[path]} rows name it", shard.unit)


def _check_shard(snapshot: Snapshot, shard: ManifestFile, wanted: list[tuple[int, Receipt]], report: Report) -> None:
    """Every sample of one shard. Raises FileNotFoundError, and DamagedError for a file of another size."""
    spec = snapshot.dataset.identity.states
    reader = open_shard_reader(snapshot.dataset.store, shard, spec)
    for unit, receipt in wanted:
        try:
            problem = _state_problem(reader.read(receipt), receipt, spec)
        except (DamagedError, SchemaError) as error:
            problem = str(error)
        if problem is not None:
            report.error("states", shard.path, problem, unit, str(receipt.key))
        report.num_samples += 1


def _state_problem(states_TLH: np.ndarray, receipt: Receipt, spec: StateSpec) -> str | None:
    shape = (receipt.rows, len(spec.layer_ids), spec.hidden_size)
    if states_TLH.shape != shape:
        return f"states are {states_TLH.shape}, not {shape}"
    return "; ".join(map(str, find_bad_rows(states_TLH, spec))) or None


def _keys(table: pa.Table) -> list[SampleKey]:
    return [SampleKey(*key) for key in zip(*(table[n].to_pylist() for n in _KEY_COLUMNS), strict=True)]


def receipts_of(table: pa.Table) -> Iterator[tuple[int, Receipt]]:
    for v in table.to_pylist():
        key = SampleKey(v["row"], v["turn"], v["n"])
        yield v["unit"], Receipt(key, v["shard"], v["offset"], v["nbytes"], v["rows"], v["checksum"])
