"""The write path against a plain sequential write of the same bytes, and against one safetensors file per sample.

    python -m bench.bench_write [--directory build/bench] [--mib 1024] [--rounds 5]

Everyone's clock stops when the bytes are on the disk (fsync). Contestants take turns within a round; a ratio is the
median over the rounds of the pair's own ratio, so a disk that changes its speed between rounds does not spoil it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.states import LAYER_IDS, REPOSITORY, machine, real_samples
from storage.shards import open_shard_writer
from storage.types import SampleKey, ShardTarget, StateSpec

BASELINE = "plain sequential write"


def repeated(samples: list[np.ndarray], total_bytes: int) -> list[np.ndarray]:
    """The samples over and over, up to about `total_bytes`; they share memory."""
    mean_bytes = sum(s.nbytes for s in samples) / len(samples)
    return list(islice(cycle(samples), max(1, round(total_bytes / mean_bytes))))


def plain(samples: list[np.ndarray], directory: Path) -> None:
    """One file, one write call per sample, one fsync: what the disk gives."""
    with (directory / "plain.bin").open("xb", buffering=0) as file:
        for states_TLH in samples:
            view = states_TLH.data.cast("B")
            while len(view):
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def file_per_sample(samples: list[np.ndarray], directory: Path) -> None:
    """What speculators' generation does: `save_file` of one dictionary of tensors per sample (here made durable)."""
    import torch
    from safetensors.torch import save_file

    for index, states_TLH in enumerate(samples):
        path = directory / f"hs_{index}.safetensors"
        tensors = {
            "hidden_states": torch.from_numpy(states_TLH).view(torch.bfloat16),
            "token_ids": torch.arange(len(states_TLH) + 1),
        }
        save_file(tensors, path)
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def shards(spec: StateSpec, shard_format: str, codec: str) -> Callable[[list[np.ndarray], Path], None]:
    """Our writer: checksum per sample, digest per shard, fsync, publish."""

    def write(samples: list[np.ndarray], directory: Path) -> None:
        target = ShardTarget(str(directory), "bench", 0, 0, spec, shard_format, codec, 256 << 20)
        with open_shard_writer(target) as writer:
            for index, states_TLH in enumerate(samples):
                writer.add(SampleKey(index, 0, 0), states_TLH)

    return write


def timed(write: Callable[[list[np.ndarray], Path], None], samples: list[np.ndarray], directory: Path) -> float:
    """Seconds, in an empty directory, with nothing left to be written back from before."""
    directory.mkdir(parents=True)
    try:
        os.sync()
        start = time.perf_counter()
        write(samples, directory)
        return time.perf_counter() - start
    finally:
        shutil.rmtree(directory)


def rounds(
    contestants: dict[str, Callable[..., None]], count: int, samples: list[np.ndarray], directory: Path
) -> Iterator[dict[str, float]]:
    for number in range(count):
        names = list(contestants)
        # Another order in each round: nobody always follows the same neighbour.
        names = names[number % len(names) :] + names[: number % len(names)]
        yield {name: timed(contestants[name], samples, directory) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=REPOSITORY / "build" / "bench", help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=1024, help="raw bytes a contestant writes")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    samples = repeated(real_samples(), options.mib << 20)
    raw_bytes = sum(s.nbytes for s in samples)
    spec = StateSpec(LAYER_IDS, samples[0].shape[2])
    contestants: dict[str, Callable[..., None]] = {
        BASELINE: plain,
        "one file per sample (as speculators)": file_per_sample,
    }
    for shard_format in ("safetensors", "parquet"):
        for codec in ("none", "planes-zstd"):
            contestants[f"shards: {shard_format}, {codec}"] = shards(spec, shard_format, codec)

    print(machine())
    results = list(rounds(contestants, options.rounds, samples, options.directory / f"write-{os.getpid()}"))
    table = Table(title=f"{len(samples)} samples, {raw_bytes / 2**20:.0f} MiB raw, {options.rounds} rounds")
    for heading in ("writer", "raw MB/s, best", "x plain write, median"):
        table.add_column(heading, justify="left" if heading == "writer" else "right")
    for name in contestants:
        best = raw_bytes / min(result[name] for result in results) / 1e6
        ratio = statistics.median(result[BASELINE] / result[name] for result in results)
        table.add_row(name, f"{best:,.0f}", f"{ratio:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
