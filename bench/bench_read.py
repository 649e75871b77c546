"""Reading samples for training: shuffled, one process; ratios to `speculators`' own loader of per-sample files.

The same samples (real states of the embedded verifier, each stored several times over) are stored four ways:

    speculators        one safetensors file per sample, read by its ArrowDataset
    mosaic             MosaicML Streaming's MDS shards, read by its StreamingDataset (uncompressed)
    headrace none      uncompressed shards, read by TrainingStream (memory-mapped, every checksum verified)
    headrace planes    lossless shards, read by TrainingStream (decoded, every checksum verified)

"samples" hands over one tensor of states per sample; "batches" copies packs into one [pack, L * H] buffer, as a
training step takes them. MosaicML Streaming needs other versions than this project pins: give the Python of an
environment that has it with --mosaic-python, or its line says why it is missing.

    python -m bench.bench_read [--copies 16] [--mosaic-python /path/to/python] [--directory /tmp/bench-read]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PACK_TOKENS = 2048
SEED = 0


@dataclass(frozen=True)
class Result:
    """One way of reading everything once."""

    name: str
    seconds: float
    samples: int
    nbytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=16, help="of each of the 64 real samples")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "bench-read")
    parser.add_argument("--mosaic-python", default=sys.executable)
    parser.add_argument("--read-mosaic", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read_mosaic is not None:
        _mosaic_main(options.read_mosaic, options.repeats)
        return
    from bench.states import machine

    print(machine())
    shutil.rmtree(options.directory, ignore_errors=True)
    try:
        _run(options)
    finally:
        shutil.rmtree(options.directory, ignore_errors=True)


def _run(options: argparse.Namespace) -> None:
    import torch

    from bench.states import real_samples

    torch.set_num_threads(1)
    directory = options.directory
    states = real_samples() * options.copies
    num_bytes = sum(array.nbytes for array in states)
    print(f"{len(states)} samples, {num_bytes / 1e9:.2f} GB of states, {num_bytes / len(states) / 1e6:.2f} MB each")
    for codec in ("none", "planes-zstd"):
        _make(directory / codec, states, codec)
    from storage.dataset import Dataset
    from storage.export import export_speculators

    export_speculators(Dataset.open(directory / "none").snapshot(), directory / "speculators")
    runs: list[tuple[str, Callable[[], Iterator[int]], Path, int]] = [
        ("speculators", lambda: _speculators(directory / "speculators"), directory / "speculators", 1),
        ("headrace none", lambda: _headrace(directory / "none", 0), directory / "none", 1),
        ("headrace none", lambda: _headrace(directory / "none", 2), directory / "none", 2),
        ("headrace planes-zstd", lambda: _headrace(directory / "planes-zstd", 0), directory / "planes-zstd", 1),
        ("headrace planes-zstd", lambda: _headrace(directory / "planes-zstd", 2), directory / "planes-zstd", 2),
    ]
    for state in ("warm", "cold"):
        results = [_measure(name, make, path, cores, state, options.repeats) for name, make, path, cores in runs]
        if state == "warm":
            results += _mosaic(options, states)
        _show(f"samples, page cache {state}", results)
    batches: list[tuple[str, Callable[[], Iterator[int]], Path, int]] = [
        ("speculators", lambda: _speculators_batches(directory / "speculators"), directory / "speculators", 1),
        ("headrace none", lambda: _headrace_batches(directory / "none", 0), directory / "none", 1),
        ("headrace planes-zstd", lambda: _headrace_batches(directory / "planes-zstd", 0), directory / "planes-zstd", 1),
        ("headrace planes-zstd", lambda: _headrace_batches(directory / "planes-zstd", 2), directory / "planes-zstd", 2),
    ]
    results = [_measure(name, make, path, cores, "warm", options.repeats) for name, make, path, cores in batches]
    _show("batches, page cache warm", results)


def _make(directory: Path, states: list[np.ndarray], codec: str) -> None:
    from storage import Dataset, Identity, Sample, SampleKey, StateSpec, UnitPlan
    from storage.shards import open_shard_writer

    spec = StateSpec((2, 15, 27, 30), states[0].shape[2])
    identity = Identity(
        mode="extract", verifier={"num_layers": 30}, tokenizer={"digest": "t"}, states=spec, codec=codec
    )
    per_unit = 64
    num_units = len(states) // per_unit
    plans = [UnitPlan(unit, unit * per_unit, per_unit, per_unit) for unit in range(num_units)]
    dataset = Dataset.create(directory, identity, plans)
    writer = dataset.writer()
    random = np.random.default_rng(SEED)
    finished = []
    for unit in range(num_units):
        samples = []
        with open_shard_writer(writer.shard_target(unit, 0)) as shards:
            for row in range(unit * per_unit, (unit + 1) * per_unit):
                key = SampleKey(row, 0, 0)
                num_tokens = len(states[row]) + 1
                receipt = shards.add(key, states[row])
                token_ids = random.integers(0, 49_152, num_tokens).tolist()
                sample = Sample(key, f"p{row}", unit, token_ids, 32, [(32, num_tokens)], "", None, "stop", receipt)
                samples.append(sample)
            entries = shards.close()
        finished.append(writer.write_unit(unit, 0, samples, [], entries))
    writer.commit(finished, {})


def _order(count: int) -> list[int]:
    return np.random.default_rng(SEED).permutation(count).tolist()


def _speculators(directory: Path) -> Iterator[int]:
    """Yields the bytes of states of each sample."""
    from speculators.train.data import ArrowDataset

    dataset = ArrowDataset(1 << 20, directory, on_missing="raise")
    for index in _order(len(dataset)):
        sample = dataset[index]
        assert isinstance(sample, dict)
        yield sample["hidden_states"].nbytes + sample["verifier_last_hidden_states"].nbytes


def _stream(directory: Path, threads: int) -> Any:
    from storage.stream import TrainingStream

    return TrainingStream(
        [(str(directory), None, 1.0)], seed=SEED, pack_tokens=PACK_TOKENS, prefetch_packs=2 * threads, threads=threads
    )


def _headrace(directory: Path, threads: int) -> Iterator[int]:
    for pack in _stream(directory, threads):
        for sample in pack.samples:
            yield sample.states_torch().nbytes


def _speculators_batches(directory: Path) -> Iterator[int]:
    """One batch at a time, through its sampler and its collation."""
    from speculators.train.data import ArrowDataset, CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    dataset = ArrowDataset(PACK_TOKENS, directory, on_missing="raise")
    first = dataset[0]
    assert isinstance(first, dict)
    hidden_size = first["verifier_last_hidden_states"].shape[1]
    collate = CollateFn(PACK_TOKENS, hidden_size)
    for batch in MultipackDistributedBatchSamplerV2(PACK_TOKENS, dataset.approx_lengths, 1, 0):
        rows = sum(min(dataset.approx_lengths[index], PACK_TOKENS) for index in batch)
        made = collate([dataset[int(index)] for index in batch])
        yield rows * (made["hidden_states"].shape[2] + hidden_size) * 2


def _headrace_batches(directory: Path, threads: int) -> Iterator[int]:
    """One pack at a time, copied into buffers of the same shape."""
    import torch

    stream = _stream(directory, threads)
    num_layers, hidden_size = len(stream.spec.layer_ids), stream.spec.hidden_size
    for pack in stream:
        aux = torch.zeros(PACK_TOKENS, (num_layers - 1) * hidden_size, dtype=torch.bfloat16)
        last = torch.zeros(PACK_TOKENS, hidden_size, dtype=torch.bfloat16)
        row = nbytes = 0
        for sample in pack.samples:
            states_TLH = sample.states_torch()
            end = row + len(states_TLH)
            aux[row:end].view(-1, num_layers - 1, hidden_size).copy_(states_TLH[:, :-1])
            last[row:end].copy_(states_TLH[:, -1])
            row = end
            nbytes += states_TLH.nbytes
        yield nbytes


def _measure(name: str, make: Callable[[], Iterator[int]], path: Path, cores: int, state: str, repeats: int) -> Result:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(allowed)[:cores]))
    try:
        seconds: list[float] = []
        sizes: list[int] = []
        for _ in range(repeats + (state == "warm")):
            if state == "cold":
                _forget(path)
            start = time.perf_counter()
            sizes = list(make())
            seconds.append(time.perf_counter() - start)
    finally:
        os.sched_setaffinity(0, allowed)
    label = f"{name}, {cores} core{'s' if cores > 1 else ''}"
    return Result(label, statistics.median(seconds[1:] if state == "warm" else seconds), len(sizes), sum(sizes))


def _forget(directory: Path) -> None:
    """Drops the files' pages from the page cache, which keeps those that are mapped or not yet written, and makes sure
    that they are gone.

    Raises RuntimeError when more than 1 % of them are still there.
    """
    gc.collect()  # what the last round has mapped
    os.sync()
    paths = [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 0]
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cached = sum(map(_cached_pages, paths)) * mmap.PAGESIZE
    total = sum(path.stat().st_size for path in paths)
    if cached > total // 100:
        raise RuntimeError(f"{cached} of {total} bytes under {directory} are still in the page cache")


def _cached_pages(path: Path) -> int:
    """Pages of a file that are in the page cache, from mincore(2), which reads none in."""
    size = path.stat().st_size
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        data = np.frombuffer(mapped, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(
            ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del data
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return int((pages & 1).sum())


def _show(title: str, results: list[Result]) -> None:
    peer = results[0]
    peer_rate = peer.nbytes / peer.seconds
    print(f"\n| {title:42} |    GB/s | samples/s | of speculators |")
    print(f"|{'-' * 44}|--------:|----------:|---------------:|")
    for result in results:
        rate = result.nbytes / result.seconds
        print(
            f"| {result.name:42} | {rate / 1e9:7.2f} | {result.samples / result.seconds:9.0f} "
            f"| {rate / peer_rate:13.2f}x |"
        )


def _mosaic(options: argparse.Namespace, states: list[np.ndarray]) -> list[Result]:
    """Runs this file under the other Python; a missing peer is reported with its reason."""
    directory = options.directory / "mosaic"
    directory.mkdir()
    lengths = directory / "lengths.json"
    lengths.write_text(json.dumps([list(array.shape) for array in states]))
    np.concatenate([array.ravel() for array in states]).tofile(directory / "states.bin")
    command = [options.mosaic_python, __file__, "--read-mosaic", str(directory), "--repeats", str(options.repeats)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        print(f"\nmosaic: not measured: {run.stderr.strip().splitlines()[-1]}")
        return []
    answer = json.loads(run.stdout.strip().splitlines()[-1])
    return [Result(f"mosaic {answer['version']}, 1 core", answer["seconds"], answer["samples"], answer["nbytes"])]


def _mosaic_main(directory: Path, repeats: int) -> None:
    """In the peer's environment: writes MDS shards and reads them shuffled. Prints one line of JSON."""
    _without_torchvision()
    import torch
    from streaming import MDSWriter, StreamingDataset, __version__

    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:1]))
    torch.set_num_threads(1)
    shapes = json.loads((directory / "lengths.json").read_text())
    data = np.fromfile(directory / "states.bin", np.uint16)
    shards = directory / "mds"
    # bf16 is none of its types: bits travel as bytes.
    with MDSWriter(
        out=str(shards), columns={"states": "bytes", "shape": "ndarray:int64"}, size_limit=1 << 30
    ) as writer:
        start = 0
        for shape in shapes:
            end = start + int(np.prod(shape))
            writer.write({"states": data[start:end].tobytes(), "shape": np.array(shape, np.int64)})
            start = end
    dataset = StreamingDataset(local=str(shards), shuffle=True, shuffle_seed=SEED, batch_size=1)
    seconds: list[float] = []
    sizes: list[int] = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        sizes = []
        for sample in dataset:
            bits = np.frombuffer(sample["states"], np.uint16).reshape(sample["shape"])
            sizes.append(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).nbytes)
        seconds.append(time.perf_counter() - begin)
    answer = {
        "version": __version__,
        "seconds": statistics.median(seconds[1:]),
        "samples": len(sizes),
        "nbytes": sum(sizes),
    }
    print(json.dumps(answer), flush=True)
    del dataset


def _without_torchvision() -> None:
    """MosaicML Streaming imports torchvision for its image data sets, which are not used here; on many machines the
    build of torchvision at hand does not go with a CPU build of torch."""
    import importlib.machinery
    import importlib.util
    import types

    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
    for name, attribute, value in (
        ("torchvision.datasets", "VisionDataset", type("VisionDataset", (), {})),
        ("torchvision.transforms.functional", "to_tensor", None),
    ):
        setattr(sys.modules[name], attribute, value)


if __name__ == "__main__":
    main()
