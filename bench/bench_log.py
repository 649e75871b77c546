"""Opening a data set with a long log: 100,000 entries, and 1,000,000 samples in 10,000 entries.

Peers: the same log without checkpoints (what a reader does that folds every entry), and listing the files themselves
("done by file existence"). Entries and files are made directly, without fsync, so that the set-up takes a minute; what
is timed is the public interface.

    python bench/bench_log.py [--entries 100000] [--sample-entries 10000] [--directory /tmp/bench-log]
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import Dataset, FileEntry, Identity, SampleKey, StateSpec, UnitFiles, UnitPlan
from storage.checkpoint import INTERVAL, checkpoint_path, encode_checkpoint
from storage.digest import bytes_digest
from storage.log import make_entry
from storage.manifest import Manifest
from storage.types import SAMPLES_SCHEMA, data_file_name
from storage.writer import ROW_GROUP_ROWS

WRITER = "bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--entries", type=int, default=100_999, help="the default leaves a tail of 999 after a checkpoint"
    )
    parser.add_argument("--sample-entries", type=int, default=10_000)
    parser.add_argument("--samples-per-entry", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "bench-log")
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    try:
        bench_open(options.directory / "log", options.entries, options.repeats)
        bench_samples(options.directory / "samples", options.sample_entries, options.samples_per_entry, options.repeats)
    finally:
        shutil.rmtree(options.directory, ignore_errors=True)


def bench_open(directory: Path, entries: int, repeats: int) -> None:
    """Opens a data set of `entries` commits of one unit with three files each."""
    start = time.perf_counter()
    dataset = make_dataset(directory, entries)
    fill_log(dataset, directory, entries, lambda unit: _entries_of(unit, 1, b""))
    print(f"made {entries:,} entries in {time.perf_counter() - start:.0f} s")
    rows: list[tuple[str, float]] = []
    rows.append(("open + newest snapshot", timed(lambda: Dataset.open(directory).snapshot(), repeats)))
    rows.append(("  and its accounting", timed(lambda: Dataset.open(directory).snapshot().accounting(), repeats)))
    rows.append(("  and its pending units", timed(lambda: Dataset.open(directory).snapshot().pending_units(), repeats)))
    rows.append(
        ("open + version at half the log", timed(lambda: Dataset.open(directory).snapshot(entries // 2), repeats))
    )
    snapshot = Dataset.open(directory).snapshot()
    rows.append(("again from an open data set (follow mode)", timed(snapshot.dataset.snapshot, repeats)))
    away = directory / "checkpoints.away"
    (directory / "checkpoints").rename(away)
    rows.append(("peer: fold every entry", timed(lambda: Dataset.open(directory).snapshot(), 1)))
    away.rename(directory / "checkpoints")
    show(rows, base="open + newest snapshot")


def bench_samples(directory: Path, entries: int, per_entry: int, repeats: int) -> None:
    """Reads the samples table of `entries` commits of `per_entry` samples each."""
    start = time.perf_counter()
    dataset = make_dataset(directory, entries, per_entry)
    generator = np.random.default_rng(0)
    fill_log(
        dataset, directory, entries, lambda unit: _entries_of(unit, per_entry, samples_file(unit, per_entry, generator))
    )
    print(f"made {entries:,} entries with {entries * per_entry:,} samples in {time.perf_counter() - start:.0f} s")
    snapshot = Dataset.open(directory).snapshot()
    key = SampleKey(entries * per_entry // 2, 0, 0)
    narrow = ["row", "num_output_tokens", "finish_reason"]
    rows = [
        ("open + newest snapshot", timed(lambda: Dataset.open(directory).snapshot(), repeats)),
        ("one sample by key, all columns", timed(lambda: snapshot.samples(keys=[key]), repeats)),
        ("one unit, all columns", timed(lambda: snapshot.samples(units=[entries // 2]), repeats)),
        ("three columns of every sample", timed(lambda: snapshot.samples(columns=narrow), 1)),
        ("peer: list the sample files", timed(lambda: sum(1 for _ in os.scandir(directory / "samples")), repeats)),
    ]
    assert snapshot.samples(keys=[key]).num_rows == 1
    show(rows, base="peer: list the sample files")


def make_dataset(directory: Path, entries: int, per_entry: int = 1) -> Dataset:
    identity = Identity(
        mode="generate",
        verifier={"name": "bench", "num_layers": 61},
        tokenizer={"digest": "0"},
        states=StateSpec((2, 30, 58, 61), 7168),
    )
    return Dataset.create(
        directory, identity, [UnitPlan(u, u * per_entry, per_entry, per_entry) for u in range(entries)]
    )


def fill_log(
    dataset: Dataset, directory: Path, entries: int, files: Callable[[int], list[tuple[FileEntry, bytes]]]
) -> None:
    """Writes the log and its checkpoints as the writer would."""
    manifest = dataset.manifest()
    for folder in ("log", "checkpoints", "samples"):
        (directory / folder).mkdir()
    for unit in range(entries):
        made = files(unit)
        for file, data in made:
            if data:
                (directory / file.path).write_bytes(data)
        num_samples = next(file.num_samples for file, _ in made if file.kind == "samples")
        content = UnitFiles(unit, 0, WRITER, num_samples, 0, 1000, 1 << 30, tuple(file for file, _ in made))
        body = {"units": [content.to_json()], "info": {"engine": "vllm", "tensor_parallel": 8}}
        entry = make_entry(manifest.version + 1, "commit", WRITER, manifest.digest, body)
        (directory / f"log/{entry.version:020d}.json").write_bytes(entry.encode())
        manifest.apply(entry)
        if entry.version % INTERVAL == 0:
            manifest = manifest.rebased()
            # One checkpoint in ten, to keep the set-up short: opening reads only the newest one.
            if entry.version % (10 * INTERVAL) == 0 or entries - entry.version < INTERVAL:
                write_checkpoint(directory, manifest)


def write_checkpoint(directory: Path, manifest: Manifest) -> None:
    (directory / checkpoint_path(manifest.version)).write_bytes(encode_checkpoint(manifest))


def _entries_of(unit: int, per_entry: int, samples: bytes) -> list[tuple[FileEntry, bytes]]:
    first, last = unit * per_entry, unit * per_entry + per_entry - 1
    digest = bytes_digest(samples or str(unit).encode())
    table = FileEntry(
        "samples/" + data_file_name(unit, 0, WRITER, 0, "parquet"),
        len(samples) or 10_000,
        digest,
        "samples",
        per_entry,
        first_row=first,
        last_row=last,
    )
    shards = [
        FileEntry(
            "shards/" + data_file_name(unit, 0, WRITER, number, "safetensors"),
            1 << 29,
            bytes_digest(f"{unit}-{number}".encode()),
            "shard",
            per_entry,
            1000,
            1 << 30,
            "safetensors",
            "planes-zstd",
        )
        for number in range(2)
    ]
    return [(table, samples), *((shard, b"") for shard in shards)]


def samples_file(unit: int, per_entry: int, generator: np.random.Generator, num_tokens: int = 64) -> bytes:
    """A samples table of one unit; short answers, so that 1,000,000 samples fit a laptop."""
    columns: dict[str, object] = {}
    shard = "shards/" + data_file_name(unit, 0, WRITER, 0, "safetensors")
    keys = range(unit * per_entry, (unit + 1) * per_entry)
    constant = {"turn": 0, "n": 0, "unit": unit, "num_tokens": num_tokens, "num_prompt_tokens": 16, "offset": 0}
    constant |= {
        "num_output_tokens": num_tokens - 16,
        "num_loss_tokens": num_tokens - 16,
        "nbytes": 1,
        "rows": num_tokens - 1,
    }
    for field in SAMPLES_SCHEMA:
        if field.name == "row":
            columns["row"] = list(keys)
        elif field.name == "token_ids":
            columns["token_ids"] = list(generator.integers(0, 49_152, (per_entry, num_tokens), dtype=np.int32))
        elif field.name == "loss_spans":
            columns["loss_spans"] = [[{"start": 16, "end": num_tokens}]] * per_entry
        elif field.name == "finish_reason":
            columns["finish_reason"] = ["stop" if key % 10 else "length" for key in keys]
        elif field.name == "shard":
            columns["shard"] = [shard] * per_entry
        elif field.name in ("prompt_id", "text", "checksum", "replica"):
            columns[field.name] = [f"{field.name} {key}" for key in keys]
        elif field.name in ("started_at", "finished_at"):
            columns[field.name] = [0] * per_entry
        else:
            columns[field.name] = [constant.get(field.name)] * per_entry
    sink = io.BytesIO()
    table = pa.table(columns, schema=SAMPLES_SCHEMA)
    pq.write_table(table, sink, row_group_size=ROW_GROUP_ROWS, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def timed(action: Callable[[], object], repeats: int) -> float:
    """Median seconds."""
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def show(rows: list[tuple[str, float]], base: str) -> None:
    seconds = dict(rows)[base]
    for name, value in rows:
        print(f"| {name:45} | {value * 1000:10.1f} ms | {value / seconds:8.2f} x |")


if __name__ == "__main__":
    main()
