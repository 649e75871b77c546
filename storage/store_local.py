"""A data set in a directory.

Required of the file system: link() refuses an existing name atomically, rename and fsync mean what POSIX says. ext4,
XFS, NFS and Lustre do; no flock is used. obstore's local backend publishes by link too, but calls no fsync (seen with
strace), so a power cut could leave a log entry empty that a commit had reported: hence our own few lines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from storage.errors import DamagedError, StoreError
from storage.store import STAGING, ObjectInfo, Store, check_path

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class LocalStore(Store):
    """Files below a local directory, which is made when the first file is written."""

    is_remote = False

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.uri = str(self.root)

    def _path(self, path: str) -> Path:
        return self.root / check_path(path)

    def get(self, path: str) -> bytes:
        return self._path(path).read_bytes()

    def get_ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        file = os.open(self._path(path), os.O_RDONLY)
        try:
            return [_pread(file, start, length, path) for start, length in ranges]
        finally:
            os.close(file)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        final = self._path(path)
        # The temporary name is unique: a writer that dies here leaves litter that gc finds, never a half-written name.
        temporary = self.root / STAGING / f"put-{os.getpid()}-{secrets.token_hex(8)}"
        _make_directory(temporary.parent)
        try:
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                # A full disk is noticed by a file descriptor, whose error names no file.
                raise StoreError(error.errno or errno.EIO, error.strerror or str(error), str(final)) from error
            _make_directory(final.parent)
            return _publish(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)

    def staging_file(self, path: str) -> Path:
        local = self.root / STAGING / check_path(path)
        _make_directory(local.parent)
        return local

    def put_file(self, path: str, local: Path) -> None:
        final = self._path(path)
        with local.open("rb") as file:
            os.fsync(file.fileno())
        _make_directory(final.parent)
        if not _publish(local, final):
            raise FileExistsError(errno.EEXIST, "a file of the data set is never overwritten", str(final))
        local.unlink()

    def list(self, prefix: str = "", start_after: str | None = None) -> Iterator[ObjectInfo]:
        base = self._path(prefix) if prefix else self.root
        for path in _walk(base, prefix, start_after):
            # A file can be gone between the listing and the look at it: gc may run beside us.
            with contextlib.suppress(FileNotFoundError):
                status = (self.root / path).stat()
                yield ObjectInfo(path, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))

    def delete(self, path: str) -> None:
        self._path(path).unlink(missing_ok=True)

    def size(self, path: str) -> int:
        return self._path(path).stat().st_size

    def local_path(self, path: str) -> Path | None:
        return self._path(path)


def _walk(directory: Path, prefix: str, start_after: str | None) -> Iterator[str]:
    base = f"{prefix}/" if prefix else ""
    try:
        with os.scandir(directory) as scan:
            # "log" sorts as "log/": the order of whole paths, as an object store gives it.
            paths = [base + (e.name + "/" if e.is_dir(follow_symlinks=False) else e.name) for e in scan]
    except (FileNotFoundError, NotADirectoryError):
        return
    if start_after is not None:
        paths = [path for path in paths if path > start_after or start_after.startswith(path)]
    for path in sorted(paths):
        if path.endswith("/"):
            yield from _walk(directory / path[len(base) : -1], path[:-1], start_after)
        elif start_after is None or path > start_after:
            yield path


def _pread(file: int, start: int, length: int, path: str) -> bytes:
    # One pread returns at most 2 GiB on Linux.
    parts: list[bytes] = []
    missing = length
    while missing > 0:
        part = os.pread(file, missing, start + length - missing)
        if not part:
            raise DamagedError(f"{path}: ends {missing} bytes before the range [{start}, {start + length}) does")
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _publish(temporary: Path, final: Path) -> bool:
    """Gives the finished file its final name unless that is taken, and makes the name durable."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        # NFS: the answer to a link that succeeded can be lost and the repeated request then finds the name taken.
        if temporary.stat().st_nlink != 2 or not final.samefile(temporary):
            return False
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise StoreError(
                error.errno,
                "the file system has no hard links, which publishing a file needs: put the data set elsewhere",
                str(final),
            ) from error
        raise
    _sync_directory(final.parent)
    return True


def _make_directory(directory: Path) -> None:
    """Makes a directory and its parents; each new name is durable in its parent."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync_directory(directory.parent)


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
