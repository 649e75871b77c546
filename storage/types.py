"""The words of the data set as types: keys, state geometry, receipts, samples, rejects, unit plans.

Everything here is plain data (dataclasses and Arrow schemas), so that a replica's worker process, a Ray actor and a
reader on a laptop share one vocabulary without sharing an engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

# `shards/u00000012-a1-w20260102T030405x1f2e3d4c-00003.safetensors`: what a data file's name says about its origin.
_DATA_FILE = re.compile(r"u(\d{8,})-a(\d+)-w([A-Za-z0-9_]+)-(\d{5,})\.[a-z]+")

# Byte width of one state element. Arrow and numpy have no bf16: states travel as uint16/uint32 views of their bits.
STATE_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.uint16),
    "float32": np.dtype(np.uint32),
}


class FileOrigin(NamedTuple):
    """Who wrote a data file: parsed from its name, so that gc knows which writer to fence before it removes it."""

    unit: int
    attempt: int
    writer: str
    sequence: int


def data_file_name(unit: int, attempt: int, writer: str, sequence: int, suffix: str) -> str:
    """The name of a data file inside its folder; `suffix` is without the dot. Inverse: `parse_data_file_name`."""
    name = f"u{unit:08d}-a{attempt}-w{writer}-{sequence:05d}.{suffix}"
    if parse_data_file_name(name) != (unit, attempt, writer, sequence):
        raise ValueError(f"writer id {writer!r} must be of letters, digits and _ only")
    return name


def parse_data_file_name(path: str) -> FileOrigin | None:
    """The origin that a path's last part names, None when it is no data file's name."""
    match = _DATA_FILE.fullmatch(path.rsplit("/", 1)[-1])
    return FileOrigin(int(match[1]), int(match[2]), match[3], int(match[4])) if match else None


class SampleKey(NamedTuple):
    """The identity of one answer: source row, turn of the conversation, which of the n answers (all from 0)."""

    row: int
    turn: int
    n: int

    def __str__(self) -> str:
        return f"row {self.row} turn {self.turn} n {self.n}"

    @property
    def name(self) -> str:
        """The key as a tensor or column name: `r12.t0.n3`."""
        return f"r{self.row}.t{self.turn}.n{self.n}"


@dataclass(frozen=True)
class StateSpec:
    """Geometry of the hidden states of a data set.

    A sample of T tokens holds T - 1 rows; its states are an array [T - 1, len(layer_ids), hidden_size] ("TLH") whose
    elements are the bits of `dtype` (see STATE_DTYPES). `layer_ids` ascend and follow the vLLM / Hugging Face
    convention: id k is the residual stream entering decoder layer k, k = number of layers is the last layer's output
    before the final norm.
    """

    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in STATE_DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {sorted(STATE_DTYPES)}")
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)) or self.layer_ids[0] < 0:
            raise ValueError(f"layer_ids {list(self.layer_ids)} must be non-negative, ascending and without duplicates")
        if self.hidden_size < 1:
            raise ValueError(f"hidden_size {self.hidden_size} must be positive")

    @property
    def np_dtype(self) -> np.dtype[Any]:
        return STATE_DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Raw bytes of one token's states over all layers."""
        return len(self.layer_ids) * self.hidden_size * self.np_dtype.itemsize


@dataclass(frozen=True)
class ShardTarget:
    """Where a unit's shards go: everything a shard writer in another process needs (picklable, JSON-able)."""

    uri: str  # of the data set
    writer: str  # writer id; part of every file name, so that a fence can name it
    unit: int
    attempt: int  # of this unit by this writer; part of the file name
    spec: StateSpec
    shard_format: str = "safetensors"
    codec: str = "planes-zstd"
    target_bytes: int = 1 << 30

    def shard_path(self, sequence: int, suffix: str) -> str:
        """The path of this unit's shard number `sequence` (from 0), relative to the data set."""
        return "shards/" + data_file_name(self.unit, self.attempt, self.writer, sequence, suffix)


@dataclass(frozen=True)
class Receipt:
    """What a shard writer returns for one sample: where its bytes are and how to check them."""

    key: SampleKey
    shard: str  # path relative to the data set
    offset: int  # of the sample's stored bytes in the shard file
    nbytes: int  # stored (encoded) bytes
    rows: int
    checksum: str  # xxh3_128 hex of the raw TLH bytes


@dataclass(frozen=True)
class FileEntry:
    """One file of the data set as the manifest lists it."""

    path: str  # relative to the data set
    size: int
    digest: str  # of the file's bytes, see storage.digest
    kind: str  # "shard", "samples", "rejects" or "head"
    num_samples: int
    rows: int = 0  # hidden-state rows (shards only)
    raw_bytes: int = 0  # of hidden states before encoding (shards only)
    shard_format: str = ""
    codec: str = ""
    first_row: int = -1  # smallest and largest source row of its samples or rejects (not for shards): a key lookup
    last_row: int = -1  # opens only files whose range holds the key

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FileEntry:
        return cls(**value)


@dataclass(frozen=True)
class UnitPlan:
    """One unit: `num_prompts` consecutive prompts from position `first` of the prompt order."""

    unit: int
    first: int
    num_prompts: int
    expected_samples: int  # keys that must end as a sample or a reject
    expected_bytes: int = 0  # raw hidden-state bytes, for planning only


@dataclass
class Sample:
    """One answer's metadata: a row of the samples table."""

    key: SampleKey
    prompt_id: str
    unit: int
    token_ids: list[int]  # prompt and answer, exactly as the verifier read and emitted them
    num_prompt_tokens: int
    loss_spans: list[tuple[int, int]]  # half-open ranges of token_ids that the loss counts
    text: str
    reasoning_text: str | None
    finish_reason: str
    receipt: Receipt
    seed: int | None = None
    stop_reason: str | None = None
    category: str | None = None
    replica: str = ""
    started_at: float = 0.0  # unix seconds
    finished_at: float = 0.0

    def check(self) -> None:
        """Raises ValueError naming the sample when its parts contradict each other."""
        num_tokens = len(self.token_ids)
        if self.receipt.key != self.key:
            raise ValueError(f"sample {self.key}: receipt is for {self.receipt.key}")
        if self.receipt.rows != num_tokens - 1:
            raise ValueError(
                f"sample {self.key}: {self.receipt.rows} rows for {num_tokens} tokens, expected {num_tokens - 1}"
            )
        if not 0 < self.num_prompt_tokens <= num_tokens:
            raise ValueError(f"sample {self.key}: {self.num_prompt_tokens} prompt tokens of {num_tokens}")
        previous = 0
        for start, end in self.loss_spans:
            if not previous <= start < end <= num_tokens:
                raise ValueError(
                    f"sample {self.key}: loss span [{start}, {end}) is out of order or outside {num_tokens} tokens"
                )
            previous = end


@dataclass(frozen=True)
class Reject:
    """An expected sample that will not exist, and why."""

    key: SampleKey
    prompt_id: str | None
    unit: int
    reason: str  # a stable code, e.g. "duplicate_id"
    detail: str  # for people

    def as_row(self) -> dict[str, Any]:
        row = asdict(self)
        row.update(self.key._asdict())
        del row["key"]
        return row


SAMPLES_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("unit", pa.int64(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("num_tokens", pa.int32(), nullable=False),
        pa.field("num_prompt_tokens", pa.int32(), nullable=False),
        pa.field("num_output_tokens", pa.int32(), nullable=False),
        pa.field("num_loss_tokens", pa.int32(), nullable=False),
        pa.field("loss_spans", pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32())])), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("reasoning_text", pa.string()),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("stop_reason", pa.string()),
        pa.field("category", pa.string()),
        pa.field("seed", pa.int64()),
        pa.field("shard", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
        pa.field("rows", pa.int32(), nullable=False),
        pa.field("checksum", pa.string(), nullable=False),
        pa.field("replica", pa.string(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("finished_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ],
    metadata={"headrace.schema_version": "1"},
)

REJECTS_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("turn", pa.int32(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.string()),
        pa.field("unit", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ],
    metadata={"headrace.schema_version": "1"},
)
