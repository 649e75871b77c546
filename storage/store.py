"""Where a data set's files live: a local (or NFS, Lustre) directory, or a bucket of an S3-compatible object store.

The contract is small: atomic put-if-absent, publishing a finished file, ranged reads, listing. Everything above
relies on it alone, so the data set behaves the same on a laptop and in a bucket.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

# Staging files of a local store, relative to the data set. No reader looks there.
STAGING = "staging"

_SEGMENT = re.compile(r"[A-Za-z0-9._#=+-]+")


class ObjectInfo(NamedTuple):
    """One stored file: path relative to the data set, bytes, time of its last change (UTC)."""

    path: str
    size: int
    last_modified: datetime


def check_path(path: str) -> str:
    """Returns `path` when it names a file inside the data set.

    File names in a manifest are data: an absolute path, `..`, a backslash, an empty part or an odd character raises
    ValueError naming the path, before anything is opened.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") or not _SEGMENT.fullmatch(part) for part in parts):
        raise ValueError(
            f"path {path!r} does not name a file inside the data set: relative, of letters, digits and ._#=+- only"
        )
    return path


class Store(ABC):
    """Files under one URI. Paths are relative to it, `/`-separated, and go through `check_path`."""

    uri: str
    # A remote store is listed rather than probed, and its reads are overlapped.
    is_remote: bool

    @abstractmethod
    def get(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError, or StoreError when the store fails."""

    @abstractmethod
    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each (start, length). Raises DamagedError naming the file when it ends before a range does."""

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`; see `get_ranges`."""
        return self.get_ranges(path, [(start, length)])[0]

    @abstractmethod
    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Writes a new file, whole or not at all; False when the name is taken.

        True means durable. On an object store False can also mean that an earlier try of this very call won and its
        answer was lost: whoever must know compares what is stored with what it wrote.
        """

    @abstractmethod
    def staging_file(self, path: str) -> Path:
        """A local path to write the file to that `put_file` then publishes as `path`. Its directory exists."""

    @abstractmethod
    def put_file(self, path: str, local: Path) -> None:
        """Publishes a finished local file as `path`, durably, and removes `local`. Raises FileExistsError."""

    @abstractmethod
    def list(self, prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Every file below the folder `prefix` ("" is all), in order of path, after `start_after` when given."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Removes a file; one that is not there is no error."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of the file. Raises FileNotFoundError."""

    def exists(self, path: str) -> bool:
        """Whether the file is there now."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    @abstractmethod
    def local_path(self, path: str) -> Path | None:
        """The file's local path for memory mapping, None when it is not on a local file system."""


def open_store(uri: str | os.PathLike[str]) -> Store:
    """The store behind `uri`: a local path, `file://...` or `s3://bucket/prefix`.

    S3 takes its credentials, region and endpoint from the usual environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).
    Nothing is created or contacted yet. Raises ValueError for another scheme.
    """
    text = os.fspath(uri)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme == "":
        from storage.store_local import LocalStore

        return LocalStore(Path(text))
    if scheme == "file":
        from storage.store_local import LocalStore

        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"uri {text!r} names the host {parts.netloc!r}; write file:///absolute/path")
        return LocalStore(Path(unquote(parts.path)))
    if scheme == "s3":
        from storage.store_s3 import S3Store

        return S3Store(text)
    raise ValueError(f"uri {text!r} has the scheme {scheme!r}; known are a local path, file:// and s3://")
