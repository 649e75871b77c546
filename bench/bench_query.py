"""SQL over 1,000,000 samples in 10,000 commits.

Peers: DuckDB reading the same 10,000 Parquet files by their names, which is what a user without the index would do (it
trusts the listing, checks no digest and knows nothing of deleted samples), and pyarrow's own data set over the folder.

    python -m bench.bench_query [--entries 10000] [--samples-per-entry 100] [--directory /tmp/bench-query] [--keep]
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds

from bench.bench_log import _entries_of, fill_log, make_dataset, samples_file, timed
from bench.states import machine
from storage import Dataset, SampleKey
from storage.checkpoint import INTERVAL
from storage.query import query
from storage.reader import LOCATION_COLUMNS, Locations
from storage.sample_table import load_narrow, update_index

AGGREGATE = (
    "SELECT finish_reason, count(*) AS samples, sum(num_output_tokens)::BIGINT AS tokens FROM {samples} "
    "WHERE num_tokens > 32 AND row % 7 = 0 GROUP BY ALL ORDER BY ALL"
)
ONE_KEY = "SELECT prompt_id, unit, shard, checksum FROM {samples} WHERE row = {row} AND turn = 0 AND n = 0"
ONE_KEY_WIDE = "SELECT * FROM {samples} WHERE row = {row} AND turn = 0 AND n = 0"
WIDE = "SELECT sum(length(text))::BIGINT AS characters, sum(len(token_ids))::BIGINT AS tokens FROM {samples}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--samples-per-entry", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "bench-query")
    parser.add_argument("--keep", action="store_true", help="keep the data set, and use one that is there")
    options = parser.parse_args()
    print(machine())
    directory = options.directory / "data"
    try:
        if not directory.exists():
            _make(directory, options.entries, options.samples_per_entry)
        _measure(directory, options.entries * options.samples_per_entry, options.repeats)
    finally:
        if not options.keep:
            shutil.rmtree(options.directory, ignore_errors=True)


def _make(directory: Path, entries: int, per_entry: int) -> None:
    start = time.perf_counter()
    dataset = make_dataset(directory, entries, per_entry)
    generator = np.random.default_rng(0)
    fill_log(
        dataset, directory, entries, lambda unit: _entries_of(unit, per_entry, samples_file(unit, per_entry, generator))
    )
    print(f"made {entries * per_entry:,} samples in {entries:,} entries in {time.perf_counter() - start:.0f} s")


def _measure(directory: Path, num_samples: int, repeats: int) -> None:
    row = num_samples // 2
    snapshot = Dataset.open(directory).snapshot()
    rows: list[tuple[str, float, float]] = []

    def both(name: str, peer: Callable[[], Any], action: Callable[[], Any], runs: int = repeats) -> None:
        rows.append((name, timed(peer, min(runs, 2)), timed(action, runs)))

    if not list(directory.glob("checkpoints/*.samples")):
        start = time.perf_counter()
        _ = query(snapshot, AGGREGATE.format(samples="samples"))
        print(f"aggregate without an index (every sample file opened and checked): {time.perf_counter() - start:.2f} s")
        seconds: list[float] = []
        for version in range(INTERVAL, snapshot.version + 1, INTERVAL):
            older = snapshot.dataset.snapshot(version)
            start = time.perf_counter()
            update_index(older)
            seconds.append(time.perf_counter() - start)
        print(f"{len(seconds)} indexes, one every {INTERVAL} commits, {statistics.mean(seconds):.2f} s each")
    index_bytes = sum(path.stat().st_size for path in directory.glob("checkpoints/*.samples"))
    print(f"indexes: {index_bytes / 1e6:.1f} MB, sample files: {_folder_bytes(directory / 'samples') / 1e6:.0f} MB")

    peer = _DuckDB(directory)
    folder = directory / "samples"
    expected = peer.rows(AGGREGATE)
    assert query(snapshot, AGGREGATE.format(samples="samples")).to_pylist() == expected
    both("open: newest snapshot", peer.open, lambda: Dataset.open(directory).snapshot())
    both(
        "filtered aggregate, with the open",
        lambda: _DuckDB(directory).rows(AGGREGATE),
        lambda: query(str(directory), AGGREGATE.format(samples="samples")),
    )
    both(
        "filtered aggregate, open before",
        lambda: peer.rows(AGGREGATE),
        lambda: query(snapshot, AGGREGATE.format(samples="samples")),
    )
    for name, sql in (("one key, narrow columns", ONE_KEY), ("one key, all columns", ONE_KEY_WIDE)):
        both(
            f"{name}, open before",
            partial(peer.rows, sql, row),
            partial(query, snapshot, sql.format(samples="samples", row=row)),
        )
    both(
        "text and token ids of every sample",
        lambda: peer.rows(WIDE),
        lambda: query(snapshot, WIDE.format(samples="samples")),
        runs=1,
    )
    both(
        "one key through Python (Snapshot.samples)",
        lambda: ds.dataset(folder).to_table(filter=pc.field("row") == row),
        lambda: snapshot.samples(keys=[SampleKey(row, 0, 0)]),
    )
    both(
        "where every sample lies (a training run's start)",
        lambda: ds.dataset(folder).to_table(columns=LOCATION_COLUMNS),
        lambda: Locations(load_narrow(Dataset.open(directory).snapshot(), LOCATION_COLUMNS)),
    )
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of this process, the peers included: {peak_mb:,.0f} MiB")
    print(f"| {'what':50} | {'peer':>12} | {'headrace':>12} | {'ratio':>8} |")
    print(f"|{'-' * 52}|{'-' * 13}:|{'-' * 13}:|{'-' * 9}:|")
    for name, peer_s, own_s in rows:
        print(f"| {name:50} | {peer_s * 1000:9.1f} ms | {own_s * 1000:9.1f} ms | {peer_s / own_s:7.1f}x |")


class _DuckDB:
    """DuckDB on the files themselves."""

    def __init__(self, directory: Path) -> None:
        self._files = f"read_parquet('{directory}/samples/*.parquet')"
        self._connection = duckdb.connect(":memory:")

    def open(self) -> None:
        self._connection.execute(f"SELECT * FROM {self._files} LIMIT 0").fetchall()

    def rows(self, sql: str, row: int = 0) -> list[dict[str, Any]]:
        return self._connection.sql(sql.format(samples=self._files, row=row)).to_arrow_table().to_pylist()


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


if __name__ == "__main__":
    main()
