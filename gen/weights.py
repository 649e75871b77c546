"""The safetensors files of a checkpoint: which there are, which tensor is in which, and digests over them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20  # safetensors' own bound

# A checkpoint up to this size is read whole for its digest (about 1 s a GB); a larger one is sampled.
FULL_DIGEST_BYTES = 2 << 30
SAMPLE_BLOCK_BYTES = 64 << 10
SAMPLES_PER_FILE = 64


def weight_files(directory: Path) -> list[Path]:
    """The checkpoint's safetensors files, by name. Raises FileNotFoundError when one is missing or there are none."""
    index = directory / INDEX_FILE
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [directory / name for name in names]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"verifier {directory}: {INDEX_FILE} names {missing[0]}, which is not there")
        return paths
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(
            f"verifier {directory} has no .safetensors weights; other formats are not read (convert the checkpoint)"
        )
    return paths


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name to the file that holds it, for every tensor of the checkpoint; weights are not read."""
    index = directory / INDEX_FILE
    if index.is_file():
        weight_files(directory)
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    names: dict[str, Path] = {}
    for path in weight_files(directory):
        header = json.loads(_header(path))
        names.update({name: path for name in header if name != "__metadata__"})
    return names


def weights_digest(directory: Path, kind: Literal["auto", "full", "sampled"] = "auto") -> str:
    """A digest of the weights that says how it was made: `sha256:...` or `sampled-sha256:...`.

    Full reads every byte. Sampled reads every file's header, its size and 64 blocks of 64 KiB at even distances:
    seconds for a checkpoint of hundreds of GB, and any training step between two revisions changes it; what changes
    only a few tensors may not. Auto is full up to 2 GiB.
    """
    paths = weight_files(directory)
    if kind == "auto":
        kind = "full" if sum(path.stat().st_size for path in paths) <= FULL_DIGEST_BYTES else "sampled"
    digest_file = _full_digest if kind == "full" else _sampled_digest
    with ThreadPoolExecutor(max_workers=4) as pool:
        lines = [
            f"{path.name} {path.stat().st_size} {digest}\n"
            for path, digest in zip(paths, pool.map(digest_file, paths), strict=True)
        ]
    return ("sha256:" if kind == "full" else "sampled-sha256:") + hashlib.sha256("".join(lines).encode()).hexdigest()


def _full_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sampled_digest(path: Path) -> str:
    sha256 = hashlib.sha256(_header(path))
    size = path.stat().st_size
    with path.open("rb") as file:
        for offset in sample_offsets(size):
            file.seek(offset)
            sha256.update(file.read(SAMPLE_BLOCK_BYTES))
    return sha256.hexdigest()


def sample_offsets(size: int) -> Iterable[int]:
    """Where the blocks of a sampled digest begin; the last block ends with the file."""
    last = max(0, size - SAMPLE_BLOCK_BYTES)
    if last == 0:
        return [0]
    return [last * i // (SAMPLES_PER_FILE - 1) for i in range(SAMPLES_PER_FILE)]


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file: its header would have {length} bytes")
        header = file.read(length)
    if len(header) < length:
        raise ValueError(f"{path} is cut off inside its header")
    return header


def canonical_digest(value: Any) -> str:
    """sha256 of a JSON value, independent of the order of keys and of white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
