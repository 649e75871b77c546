"""What a shard format is: one file being written, and the range of it that each sample's bytes take.

Everything else about shards (naming, closing at a size, checksums, digests, publishing, reading) is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from storage.types import SampleKey, ShardTarget

SHARD_VERSION = "1"


class ShardFile(ABC):
    """One shard under a staging name. Any error leaves a file of no use: the caller aborts."""

    suffix: ClassVar[str]

    @abstractmethod
    def __init__(self, path: Path, target: ShardTarget, first_nbytes: int) -> None:
        """Creates the file, which must not exist. `first_nbytes` is the stored size of the first sample."""

    @abstractmethod
    def has_room(self, key: SampleKey, rows: int, nbytes: int) -> bool:
        """Whether the format can take one more sample, whatever the target size is."""

    @abstractmethod
    def append(self, key: SampleKey, data: memoryview, rows: int, checksum: Callable[[], str]) -> int:
        """Writes one sample's stored bytes and returns their offset in the file. Raises OSError.

        `checksum` gives the sample's checksum and may wait for it: a format that does not store it does not ask.
        """

    @property
    @abstractmethod
    def size(self) -> int:
        """Bytes written so far."""

    @abstractmethod
    def finish(self) -> None:
        """Writes what the format needs beside the samples and closes the file. Raises OSError."""

    @abstractmethod
    def abort(self) -> None:
        """Closes the file as it is; it may be closed already."""


def shard_metadata(target: ShardTarget) -> dict[str, str]:
    """What a file says about itself, so that it can be read without its data set."""
    spec = target.spec
    return {
        "headrace.shard_version": SHARD_VERSION,
        "headrace.codec": target.codec,
        "headrace.dtype": spec.dtype,
        "headrace.layer_ids": ",".join(map(str, spec.layer_ids)),
        "headrace.hidden_size": str(spec.hidden_size),
    }
