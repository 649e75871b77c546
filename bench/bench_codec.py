"""The codec against raw zstd and ZipNN: ratio and one-core speed, each sample compressed by itself.

    OMP_NUM_THREADS=1 python -m bench.bench_codec [--rounds 7] [--samples 32]

ZipNN is optional: `pip install --no-deps zipnn==0.5.4`, best into an environment of its own that sees this one's
packages. The competitors take turns on the same sample, so that a busy machine slows all of them alike; the speed of
each is the total over the samples of its best round on each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import zstandard
from rich.console import Console
from rich.table import Table

from bench.states import LAYER_IDS, machine, real_samples, synthetic_samples
from storage import codec
from storage.shards.checksum import states_checksum
from storage.types import StateSpec


@dataclass
class Competitor:
    """A lossless codec of one sample's bits."""

    name: str
    encode: Callable[[np.ndarray], Any]
    decode: Callable[[Any, np.ndarray], Any]  # (stored, the sample that it must equal in shape)


def _compress(compressor: zstandard.ZstdCompressor, states_TLH: np.ndarray) -> bytes:
    return compressor.compress(states_TLH.data.cast("B"))


def _decompress(decompressor: zstandard.ZstdDecompressor, stored: bytes, _: np.ndarray) -> bytes:
    return decompressor.decompress(stored)


def competitors(spec: StateSpec) -> list[Competitor]:
    found = [
        Competitor(
            "planes-zstd",
            lambda s: codec.encode(s, spec, "planes-zstd"),
            lambda data, s: codec.decode(data, len(s), spec, "planes-zstd"),
        )
    ]
    for level in (1, 3):
        compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        found.append(
            Competitor(
                f"zstd-{level}, raw bytes",
                partial(_compress, compressor),
                partial(_decompress, decompressor),
            )
        )
    try:
        from zipnn import ZipNN
    except ImportError:
        Console(stderr=True).print("ZipNN is not installed (pip install --no-deps zipnn==0.5.4): left out")
    else:
        # It writes into the buffer that it is given (it rotates the sign bit in place), hence the copy.
        peer = ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)
        found.append(
            Competitor("ZipNN", lambda s: peer.compress(bytearray(s.data)), lambda data, _: peer.decompress(data))
        )
    return found


def measure(samples: list[np.ndarray], spec: StateSpec, rounds: int) -> list[tuple[str, float, float, float]]:
    """(name, ratio, encode MB/s, decode MB/s of raw bytes) of every competitor."""
    rivals = competitors(spec)
    stored_bytes = [0] * len(rivals)
    encode_s = np.zeros(len(rivals))
    decode_s = np.zeros(len(rivals))
    for states_TLH in samples:
        best = np.full((2, len(rivals)), np.inf)
        for turn in range(rounds):
            for i, rival in enumerate(rivals):
                start = time.perf_counter()
                stored = rival.encode(states_TLH)
                encoded = time.perf_counter()
                back = rival.decode(stored, states_TLH)
                best[:, i] = np.minimum(best[:, i], (encoded - start, time.perf_counter() - encoded))
                if turn == 0:
                    stored_bytes[i] += len(stored)
                    if bytes(memoryview(back).cast("B")) != states_TLH.tobytes():
                        raise ValueError(f"{rival.name} did not give back what it was given")
        encode_s += best[0]
        decode_s += best[1]
    raw_bytes = sum(states_TLH.nbytes for states_TLH in samples)
    return [
        (rival.name, raw_bytes / stored_bytes[i], raw_bytes / encode_s[i] / 1e6, raw_bytes / decode_s[i] / 1e6)
        for i, rival in enumerate(rivals)
    ]


def exponent_bound(samples: list[np.ndarray]) -> float:
    """The ratio that 8 raw bits and the entropy of the exponent within each channel and sample would give."""
    total_bits = 0.0
    elements = 0
    for states_TLH in samples:
        rows = len(states_TLH)
        exponent_CT = ((states_TLH >> 7) & 0xFF).reshape(rows, -1).T.astype(np.int64)
        counts = np.bincount(
            (exponent_CT + 256 * np.arange(len(exponent_CT))[:, None]).ravel(), minlength=256 * len(exponent_CT)
        )
        counts = counts[counts > 0]
        total_bits += rows * len(exponent_CT) * np.log2(rows) - float((counts * np.log2(counts)).sum())
        elements += states_TLH.size
    return 16 / (8 + total_bits / elements)


def report(title: str, samples: list[np.ndarray], spec: StateSpec, rounds: int) -> None:
    results = measure(samples, spec, rounds)
    own = results[0]
    table = Table(title=title)
    for heading in ("codec", "ratio", "encode MB/s", "decode MB/s", "encode, ours / it", "decode, ours / it"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")
    for name, ratio, encode_mbs, decode_mbs in results:
        table.add_row(
            name,
            f"{ratio:.4f}",
            f"{encode_mbs:,.0f}",
            f"{decode_mbs:,.0f}",
            f"{own[2] / encode_mbs:.2f}",
            f"{own[3] / decode_mbs:.2f}",
        )
    start = time.perf_counter()
    for states_TLH in samples:
        states_checksum(states_TLH)
    checksum_mbs = sum(s.nbytes for s in samples) / (time.perf_counter() - start) / 1e6
    table.caption = (
        f"bound by channel: {exponent_bound(samples):.4f}; xxh3_128 of the raw bytes: {checksum_mbs:,.0f} MB/s"
    )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=64)
    options = parser.parse_args()
    print(machine())
    real = real_samples(options.samples)
    mib = sum(s.nbytes for s in real) / 2**20
    report(
        f"{len(real)} real samples of SmolLM2-135M, {real[0].shape[1]} x {real[0].shape[2]}, bf16, {mib:.0f} MiB",
        real,
        StateSpec(LAYER_IDS, real[0].shape[2]),
        options.rounds,
    )
    synthetic = synthetic_samples(real, 3)
    report(
        f"{len(synthetic)} synthetic samples of {len(synthetic[0])} rows, 4 x 7168, bf16",
        synthetic,
        StateSpec((2, 30, 58, 61), 7168),
        options.rounds,
    )


if __name__ == "__main__":
    main()
