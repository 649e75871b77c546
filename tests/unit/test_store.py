"""The store's contract, on a local directory and on a real S3 server, and what it does when things fail."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_server import S3Server, s3_server

from storage import DamagedError, Store, StoreError, check_path, open_store


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(params=["local", "file-uri", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> Store:
    server.faults.clear()
    if request.param == "local":
        return open_store(tmp_path / "data")
    if request.param == "file-uri":
        return open_store((tmp_path / "da ta").as_uri())
    return open_store(server.new_uri())


def publish(store: Store, path: str, data: bytes) -> None:
    local = store.staging_file(path)
    local.write_bytes(data)
    store.put_file(path, local)


def test_put_if_absent_writes_once_and_keeps_the_first(store: Store) -> None:
    assert store.put_if_absent("log/1.json", b"first")
    assert not store.put_if_absent("log/1.json", b"second")
    assert store.get("log/1.json") == b"first"
    assert store.size("log/1.json") == 5
    assert [info.path for info in store.list()] == ["log/1.json"]


def test_put_file_publishes_once_and_takes_the_local_file(store: Store) -> None:
    data = os.urandom(40 << 20)  # above the size of an upload's part
    publish(store, "shards/a.bin", data)
    assert store.get("shards/a.bin") == data
    assert not store.staging_file("shards/a.bin").exists()
    with pytest.raises(FileExistsError, match="never overwritten"):
        publish(store, "shards/a.bin", b"other")
    assert store.size("shards/a.bin") == len(data)


def test_ranges(store: Store) -> None:
    store.put_if_absent("a", bytes(range(100)))
    assert store.get_range("a", 10, 3) == bytes([10, 11, 12])
    assert store.get_ranges("a", [(90, 10), (0, 1), (50, 0)]) == [bytes(range(90, 100)), b"\0", b""]
    for start, length in ((95, 6), (100, 1), (200, 5)):
        with pytest.raises(DamagedError, match=r"^a: ends .* before the range"):
            store.get_range("a", start, length)


def test_missing_files(store: Store) -> None:
    for call in (store.get, store.size, lambda path: store.get_range(path, 0, 1)):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            call("log/nowhere")
    assert not store.exists("log/nowhere")
    store.delete("log/nowhere")
    assert list(store.list("log")) == []


def test_list_is_ordered_by_path_and_starts_after(store: Store) -> None:
    paths = ["a/1", "a/2", "a-b/1", "a.x", "b/c/d", "b/c.d"]
    for path in paths:
        store.put_if_absent(path, path.encode())
    assert [info.path for info in store.list()] == sorted(paths)
    assert [info.path for info in store.list("a")] == ["a/1", "a/2"]
    assert [info.path for info in store.list("b")] == ["b/c.d", "b/c/d"]
    assert [info.path for info in store.list("a", start_after="a/1")] == ["a/2"]
    assert [info.path for info in store.list("", start_after="a/1")] == sorted(paths)[sorted(paths).index("a/1") + 1 :]
    assert all(info.size == len(info.path) for info in store.list())


def test_delete_is_idempotent(store: Store) -> None:
    store.put_if_absent("x", b"1")
    store.delete("x")
    store.delete("x")
    assert not store.exists("x")


def test_one_of_many_racing_threads_wins(store: Store) -> None:
    for name in range(5):
        barrier = threading.Barrier(8)

        def put(number: int, path: str = f"log/{name}", gate: threading.Barrier = barrier) -> bool:
            gate.wait()
            return store.put_if_absent(path, f"writer {number}".encode())

        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(put, range(8)))
        assert sum(won) == 1
        assert store.get(f"log/{name}") == f"writer {won.index(True)}".encode()


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a\\b", "a\0b", "a/\n", "c:/x y", "~/x", "a b"]
)
def test_paths_that_leave_the_data_set_are_refused(path: str, store: Store) -> None:
    for call in (store.get, store.delete, store.size, store.staging_file, store.local_path):
        with pytest.raises(ValueError, match="does not name a file inside the data set"):
            call(path)
    with pytest.raises(ValueError, match="does not name"):
        store.put_if_absent(path, b"")


@given(st.text(min_size=1, max_size=30))
def test_check_path_lets_nothing_out(path: str) -> None:
    root = Path("/data/set")
    try:
        checked = check_path(path)
    except ValueError:
        return
    resolved = Path(os.path.normpath(root / checked))
    assert resolved.is_relative_to(root)
    assert resolved != root
    assert str(resolved) == f"{root}/{path}"


@pytest.mark.parametrize("uri", ["gs://bucket/x", "http://host/x", "s3://", "file://elsewhere/x"])
def test_unknown_uris_are_refused_by_name(uri: str) -> None:
    with pytest.raises(ValueError, match="uri"):
        open_store(uri)


def test_local_names_appear_only_after_their_bytes_are_durable(tmp_path: Path) -> None:
    """The order of system calls that a power cut makes matter: file synced, then named, then the directory synced."""
    if not Path("/usr/bin/strace").exists():
        pytest.skip("strace is not installed")
    script = f"from storage import open_store; open_store({str(tmp_path / 'd')!r}).put_if_absent('log/1', b'x')"
    trace = tmp_path / "trace"
    names = "trace=link,linkat,fsync,fdatasync"
    done = subprocess.run(
        ["strace", "-f", "-y", "-o", trace, "-e", names, sys.executable, "-c", script], check=False, capture_output=True
    )
    if done.returncode != 0:
        pytest.skip(f"strace cannot trace here: {done.stderr.decode()[-200:]}")
    calls = [line for line in trace.read_text().splitlines() if str(tmp_path) in line]
    link = next(i for i, line in enumerate(calls) if " link" in line)
    assert any("fsync" in line and "/staging/put-" in line for line in calls[:link])
    assert any("fsync" in line and line.rstrip().endswith("= 0") and "/d/log>" in line for line in calls[link + 1 :])


def test_a_full_disk_leaves_no_name_behind(tmp_path: Path) -> None:
    """A file-size limit stands for the full disk: the write fails half-way and the name stays free for a later one."""
    script = textwrap.dedent(
        f"""
        import resource, signal
        from storage import open_store
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = open_store({str(tmp_path / "d")!r})
        store.put_if_absent("log/1", b"ok")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            store.put_if_absent("log/2", b"x" * 5000)
        except OSError as error:
            print("refused", error.errno)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(store.exists("log/2"), [info.path for info in store.list()], store.put_if_absent("log/2", b"y" * 5000))
        """
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["refused 27", "False ['log/1'] True"]


class TestS3Faults:
    """A real server that answers 500 and 503 and cuts bodies short, as often as the test says."""

    @pytest.fixture(autouse=True)
    def _store(self, server: S3Server) -> None:
        server.faults.clear()
        self.server = server
        self.store = open_store(server.new_uri())

    @pytest.mark.parametrize("status", [500, 503])
    def test_a_few_errors_are_survived(self, status: int) -> None:
        self.server.fail("PUT", status, times=2)
        assert self.store.put_if_absent("a", b"data")
        self.server.fail("GET", status, times=2)
        assert self.store.get("a") == b"data"
        assert self.server.num_failed == 4

    def test_errors_for_ever_end_in_a_clear_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from storage import store_s3

        monkeypatch.setattr(store_s3, "MAX_RETRIES", 2)
        store = open_store(self.store.uri)
        store.put_if_absent("a", b"data")
        self.server.fail("GET", 503, times=1000)
        with pytest.raises(StoreError, match=r"503.*a'$"):
            store.get("a")
        assert self.server.num_failed == 3

    def test_short_bodies_are_read_again_or_refused(self) -> None:
        data = os.urandom(100_000)
        self.store.put_if_absent("a", data)
        self.server.cut("GET", times=1)
        assert self.store.get("a") == data
        self.server.cut("GET", times=1)
        assert self.store.get_range("a", 10, 50_000) == data[10:50_010]
        assert self.server.num_failed == 2

    def test_a_put_whose_answer_is_lost_reads_as_taken(self) -> None:
        """Why a log entry carries an id: the retry finds the name taken by its own first try."""
        self.server.fail("PUT", 500, times=1, after=True)
        assert not self.store.put_if_absent("a", b"data")
        assert self.store.get("a") == b"data"
