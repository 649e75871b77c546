"""A data set in a bucket: S3 and everything that speaks its protocol with conditional puts, through obstore."""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import os
import random
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store as ObstoreS3

from storage.errors import DamagedError, StoreError
from storage.store import ObjectInfo, Store, check_path

# Answers 500 and 503, cut connections and timeouts are tried again this often, with exponential backoff and jitter;
# then the call fails. 6 retries from 0.2 s give a store about 15 s to recover.
MAX_RETRIES = 6
# Parts of a multipart upload: 10,000 of them may make up an object, so 16 MiB allows shards of 160 GB; at most 4 in
# memory at once.
PART_BYTES = 16 << 20
PART_CONCURRENCY = 4
_PAGE = 1000  # of a listing: what S3 gives in one answer
_CUT = "body error"  # how the client says that an answer's body broke off
_SPOOL_PREFIX = "headrace-spool-"


_T = TypeVar("_T")


class S3Store(Store):
    """Files below `s3://bucket/prefix`. Credentials, region and endpoint come from the usual AWS_ environment."""

    is_remote = True

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        self.bucket = parts.netloc
        self.prefix = parts.path.strip("/")
        if not self.bucket:
            raise ValueError(f"uri {uri!r} names no bucket; write s3://bucket/prefix")
        if self.prefix:
            check_path(self.prefix)
        self.uri = f"s3://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")
        self._spool: Path | None = None
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        config: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        self._store = ObstoreS3(
            self.bucket,
            prefix=self.prefix or None,
            client_options={"allow_http": endpoint.startswith("http://"), "timeout": timedelta(seconds=120)},
            retry_config={
                "max_retries": MAX_RETRIES,
                "retry_timeout": timedelta(seconds=120),
                "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2},
            },
            **config,
        )

    @contextlib.contextmanager
    def _named(self, path: str) -> Iterator[None]:
        """Turns the client's errors into one that names the object."""
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.uri}/{path}") from None
        except BaseError as error:
            raise StoreError(errno.EIO, str(error).strip().splitlines()[0], f"{self.uri}/{path}") from error

    def _uncut(self, path: str, read: Callable[[], _T]) -> _T:
        """Reads again, a bounded number of times, when an answer's body was cut short.

        The client tries failed requests again, and most reads that break off, but not a page of a listing or the body
        of an error.
        """
        for failures in range(1, MAX_RETRIES + 2):
            try:
                with self._named(path):
                    return read()
            except StoreError as error:
                if _CUT not in str(error) or failures > MAX_RETRIES:
                    raise
                time.sleep(min(5.0, 0.2 * 2**failures) * random.random())
        raise AssertionError("the last failure was raised")

    def get(self, path: str) -> bytes:
        check_path(path)
        return self._uncut(path, lambda: bytes(obstore.get(self._store, path).bytes()))

    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        # The client coalesces neighbours and overlaps the requests; it refuses an empty range.
        check_path(path)
        wanted = [(start, length) for start, length in ranges if length > 0]
        starts, lengths = [start for start, _ in wanted], [length for _, length in wanted]
        parts: Iterator[bytes] = iter(())
        if wanted:
            try:
                parts = map(
                    bytes,
                    self._uncut(path, lambda: obstore.get_ranges(self._store, path, starts=starts, lengths=lengths)),
                )
            except StoreError:
                self._check_ranges(path, wanted, self.size(path))
                raise
        found = [next(parts) if length > 0 else b"" for _, length in ranges]
        for (start, length), part in zip(ranges, found, strict=True):
            self._check_ranges(path, [(start, length)], start + len(part))
        return found

    @staticmethod
    def _check_ranges(path: str, ranges: Sequence[tuple[int, int]], end: int) -> None:
        for start, length in ranges:
            if start + length > end:
                raise DamagedError(
                    f"{path}: ends {start + length - end} bytes before the range [{start}, {start + length}) does"
                )

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._named(path):
            try:
                obstore.put(self._store, check_path(path), data, mode="create")
            except AlreadyExistsError:
                return False
        return True

    def staging_file(self, path: str) -> Path:
        if self._spool is None:
            self._spool = _make_spool(self)
        local = self._spool / check_path(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        return local

    def put_file(self, path: str, local: Path) -> None:
        # A multipart upload takes no condition in this client. Data files carry the writer's id and attempt in their
        # name, so nobody else writes this one: looking first is enough.
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, "a file of the data set is never overwritten", f"{self.uri}/{path}")
        with self._named(path):
            obstore.put(self._store, check_path(path), local, chunk_size=PART_BYTES, max_concurrency=PART_CONCURRENCY)
        local.unlink()

    def list(self, prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
        folder = check_path(prefix) if prefix else None
        while page := self._uncut(prefix, partial(self._page, folder, start_after)):
            yield from page
            start_after = page[-1].path

    def _page(self, folder: str | None, start_after: str | None) -> builtins.list[ObjectInfo]:
        stream = obstore.list(self._store, prefix=folder, offset=start_after, chunk_size=_PAGE)
        return [ObjectInfo(i["path"], i["size"], i["last_modified"]) for i in next(iter(stream), [])]

    def delete(self, path: str) -> None:
        with self._named(path), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, check_path(path))

    def size(self, path: str) -> int:
        check_path(path)
        return self._uncut(path, lambda: obstore.head(self._store, path)["size"])

    def local_path(self, path: str) -> Path | None:
        check_path(path)
        return None


def _make_spool(store: S3Store) -> Path:
    """A directory of this process for files on their way to the bucket; spools of dead processes go.

    A spool is in use as long as somebody holds a lock on it, which the kernel drops with the process: that is right
    across containers that share a temporary directory, where a process id says nothing.
    """
    parent = Path(tempfile.gettempdir())
    for other in parent.glob(f"{_SPOOL_PREFIX}*"):
        with contextlib.suppress(OSError), (other / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other)
    # Locked under another name first: a process that starts beside us must not take it for a dead one's.
    unlocked = Path(tempfile.mkdtemp(prefix=f"new-{_SPOOL_PREFIX}"))
    held = (unlocked / "lock").open("wb")
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    spool = unlocked.rename(parent / unlocked.name.removeprefix("new-"))
    weakref.finalize(store, _remove_spool, spool, held)
    return spool


def _remove_spool(spool: Path, lock: IO[bytes]) -> None:
    lock.close()
    shutil.rmtree(spool, ignore_errors=True)
