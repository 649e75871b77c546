"""Small data sets for the storage tests: real shards of random states, written through the public interface."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from storage import Dataset, FileEntry, Identity, Receipt, Reject, Sample, SampleKey, StateSpec, UnitFiles, UnitPlan
from storage.digest import bytes_digest
from storage.writer import Writer

SPEC = StateSpec(layer_ids=(1, 3), hidden_size=16)


def identity(**changes: object) -> Identity:
    """An identity of a small verifier; `changes` replace fields."""
    fields: dict[str, object] = {
        "mode": "generate",
        "verifier": {"name": "tiny", "revision": "r1", "weights_digest": "ab" * 32, "num_layers": 4},
        "tokenizer": {"digest": "cd" * 32, "chat_template_digest": "ef" * 32},
        "states": SPEC,
        "sampling": {"temperature": 0.0, "n": 1},
        "prompts": {"digest": "01" * 32, "seed": 7},
    }
    return Identity(**{**fields, **changes})  # type: ignore[arg-type]


def plan(num_units: int, prompts_per_unit: int = 3) -> list[UnitPlan]:
    return [UnitPlan(u, u * prompts_per_unit, prompts_per_unit, prompts_per_unit) for u in range(num_units)]


def create(uri: str | Path, num_units: int = 4, prompts_per_unit: int = 3) -> Dataset:
    return Dataset.create(uri, identity(), plan(num_units, prompts_per_unit))


def sample(key: SampleKey, unit: int, receipt: Receipt) -> Sample:
    """A sample whose tokens fit the receipt's rows."""
    num_tokens = receipt.rows + 1
    return Sample(
        key=key,
        prompt_id=f"p{key.row}",
        unit=unit,
        token_ids=[(key.row * 31 + i) % 97 for i in range(num_tokens)],
        num_prompt_tokens=1,
        loss_spans=[(1, num_tokens)],
        text=f"answer {key.row}",
        reasoning_text=None,
        finish_reason="stop",
        receipt=receipt,
        seed=key.row,
        started_at=1.0,
        finished_at=2.0,
    )


def states(key: SampleKey, rows: int, spec: StateSpec = SPEC) -> np.ndarray:
    """The same random bits for a key every time, [rows, layers, hidden]."""
    shape = (rows, len(spec.layer_ids), spec.hidden_size)
    generator = np.random.default_rng([key.row, key.turn, key.n])
    return (generator.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def keys_of(dataset: Dataset, unit: int) -> list[SampleKey]:
    first = dataset.units[unit].first
    return [SampleKey(row, 0, 0) for row in range(first, first + dataset.units[unit].num_prompts)]


def write_opaque(writer: Writer, unit: int, attempt: int = 0, rejected: Sequence[SampleKey] = ()) -> UnitFiles:
    """A unit whose one shard is opaque bytes: for tests of the log, which never opens a shard."""
    keys = [key for key in keys_of(writer.dataset, unit) if key not in rejected]
    target = writer.shard_target(unit, attempt)
    path = target.shard_path(0, "safetensors")
    data = b"opaque" * 10 * len(keys)
    shards: list[FileEntry] = []
    if keys:
        local = writer.dataset.store.staging_file(path)
        local.write_bytes(data)
        writer.dataset.store.put_file(path, local)
        digest = bytes_digest(data)
        rows = sum(map(num_rows, keys))
        shards.append(FileEntry(path, len(data), digest, "shard", len(keys), rows, rows * target.spec.row_bytes))
    samples = [sample(key, unit, Receipt(key, path, 60 * i, 60, num_rows(key), "0")) for i, key in enumerate(keys)]
    return writer.write_unit(unit, attempt, samples, _rejects(unit, rejected), shards)


def write_real(
    writer: Writer, unit: int, attempt: int = 0, rejected: Sequence[SampleKey] = (), **target_options: object
) -> UnitFiles:
    """A unit with real shards of `states`."""
    from storage.shards import open_shard_writer

    keys = [key for key in keys_of(writer.dataset, unit) if key not in rejected]
    samples: list[Sample] = []
    shards: list[FileEntry] = []
    if keys:
        with open_shard_writer(writer.shard_target(unit, attempt, **target_options)) as shard_writer:  # type: ignore[arg-type]
            samples = [sample(key, unit, shard_writer.add(key, states(key, num_rows(key)))) for key in keys]
            shards = shard_writer.close()
    return writer.write_unit(unit, attempt, samples, _rejects(unit, rejected), shards)


def num_rows(key: SampleKey) -> int:
    return 2 + key.row % 5


def files_below(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


@contextmanager
def disk_of(nbytes: int) -> Iterator[None]:
    """While inside, no file can grow beyond `nbytes`: writes are cut short and then fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _rejects(unit: int, keys: Sequence[SampleKey]) -> list[Reject]:
    return [Reject(key, f"p{key.row}", unit, "test", "rejected by the test") for key in keys]
