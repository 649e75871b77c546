"""Many racing committers, a full disk in every step, and an object store that fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from s3_server import S3Server, s3_server
from storage_helpers import create, write_opaque, write_real

from storage import Dataset, StoreError
from storage.gc import collect
from storage.log import entry_path
from storage.store import open_store
from storage.verify import verify

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where syncing a file costs nothing, if there is one."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as directory:
        yield Path(directory)


def run(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a Python process that can import the test helpers."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r})\n" + textwrap.dedent(script)
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


RACER = """
    import json, random, sys, time
    from storage_helpers import write_opaque
    from storage import Dataset, UnitFiles
    uri, seed = sys.argv[1], int(sys.argv[2])
    dataset = Dataset.open(uri)
    writer = dataset.writer()
    units = list(range(len(dataset.units)))
    random.Random(seed).shuffle(units)
    done = {"versions": [], "accepted": [], "dropped": []}
    while units:
        batch, units = units[:2], units[2:]
        result = writer.commit([write_opaque(writer, unit) for unit in batch], {"seed": seed})
        done["accepted"] += result.accepted
        done["dropped"] += result.dropped
        if result.version is not None:
            done["versions"].append(result.version)
    print(json.dumps(done))
"""


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_racing_committers_lose_nothing_and_see_nothing_twice(kind: str, memory_path: Path, server: S3Server) -> None:
    """Every process tries to commit every unit, in its own order."""
    server.faults.clear()
    dataset = create(str(memory_path / "data") if kind == "local" else server.new_uri(), 12)
    processes = [run(RACER, dataset.uri, str(seed)) for seed in range(5)]
    results = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        results.append(json.loads(out))
    versions = [version for result in results for version in result["versions"]]
    accepted = [unit for result in results for unit in result["accepted"]]
    dropped = [unit for result in results for unit in result["dropped"]]
    assert sorted(versions) == list(range(1, len(versions) + 1))  # each won once, none lost
    assert sorted(accepted) == list(range(12))  # each unit visible once
    assert len(accepted) + len(dropped) == 5 * 12
    snapshot = Dataset.open(dataset.uri).snapshot()
    assert snapshot.version == len(versions)
    assert snapshot.samples(columns=["row"])["row"].to_pylist() == list(range(36))
    assert sorted(snapshot.unit_states()) == list(range(12))
    report = verify(dataset.uri)
    assert report.is_sound
    assert {finding.kind for finding in report.findings} <= {"orphan"}
    collect(Dataset.open(dataset.uri), apply=True, older_than_s=-1)
    assert verify(dataset.uri).findings == []
    assert Dataset.open(dataset.uri).snapshot().samples().num_rows == 36


def test_racing_threads_of_one_data_set(tmp_path: Path) -> None:
    dataset = create(tmp_path, 24)

    def commit(unit: int) -> list[int]:
        writer = dataset.writer()
        return writer.commit([write_opaque(writer, unit), write_opaque(writer, (unit + 1) % 24)], {}).accepted

    with ThreadPoolExecutor(8) as pool:
        accepted = [unit for units in pool.map(commit, range(24)) for unit in units]
    assert sorted(accepted) == list(range(24))
    assert dataset.snapshot().accounting().pending == 0
    assert verify(tmp_path).is_sound


FULL = """
    import os, resource, signal, sys
    from storage_helpers import keys_of, write_real
    from storage import Dataset, StoreError

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    uri, limit = sys.argv[1], int(sys.argv[2])
    dataset = Dataset.open(uri)
    writer = dataset.writer()
    first = write_real(writer, 0, target_bytes=1 << 16)
    if sys.argv[3] == "commit":
        units = [first]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        if sys.argv[3] != "commit":
            write_real(writer, 1, target_bytes=1)
        else:
            writer.commit(units, {"padding": "x" * 5000})
    except OSError as error:
        print("refused:", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    second = write_real(writer, 1, 1, target_bytes=1 << 16)
    print(writer.commit([first, second], {}).accepted)
"""


@pytest.mark.parametrize("where", ["shard", "samples", "commit"])
def test_a_full_disk_is_an_error_and_then_goes_on(tmp_path: Path, where: str) -> None:
    create(tmp_path, 2)
    # A samples table takes 8 KB, a shard of one sample 4.5 KB, the padded entry 5 KB.
    process = run(FULL, str(tmp_path), "6000" if where == "samples" else "500", where)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    refused, accepted = out.splitlines()
    assert refused.startswith("refused:")
    assert "File too large" in refused
    assert {"shard": "shards/u00000001", "samples": "samples/u00000001", "commit": "log/0000"}[where] in refused
    assert accepted == "[0, 1]"
    assert verify(tmp_path, deep=True).is_sound
    collect(Dataset.open(tmp_path), apply=True, older_than_s=-1)
    assert verify(tmp_path, deep=True).findings == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command to make a small file system with")
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield directory
    # Lazily: a failed write can leave a file mapped until the garbage collector runs.
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_disk_that_is_really_full_at_any_step_is_an_error_and_then_goes_on(small_disk: Path) -> None:
    """A unit is written and committed with room for ever more pages of the disk, until it fits."""
    root, filler = small_disk / "data", small_disk / "filler"
    dataset = create(root, 2)
    writer = dataset.writer()
    writer.commit([write_real(writer, 0, target_bytes=1)], {})
    errors: list[OSError] = []
    while not dataset.manifest().has_unit(1):
        status = os.statvfs(small_disk)
        filler.write_bytes(bytes(max(0, status.f_bavail - len(errors)) * status.f_bsize))
        try:
            writer.commit([write_real(writer, 1, len(errors), target_bytes=1)], {})
        except OSError as error:
            errors.append(error)
        filler.unlink()
        # What was visible still is, and all of it is whole.
        assert Dataset.open(root).snapshot().samples(units=[0]).num_rows == 3
        assert verify(root).is_sound
    assert len(errors) > 6
    assert {error.errno for error in errors} == {errno.ENOSPC}
    places = {str(error.filename).removeprefix(f"{root}/").partition("/")[0] for error in errors}
    assert places >= {"shards", "samples", "log"}
    collect(Dataset.open(root), apply=True, older_than_s=-1)
    report = verify(root, deep=True)
    assert (report.findings, report.num_samples) == ([], 6)


class TestObjectStoreFaults:
    """Commits through a server that answers 500 and 503, loses answers and cuts bodies."""

    @pytest.fixture(autouse=True)
    def _clean(self, server: S3Server) -> Iterator[None]:
        server.faults.clear()
        yield
        server.faults.clear()

    def test_a_unit_is_written_committed_and_read_through_faults(self, server: S3Server) -> None:
        dataset = create(server.new_uri(), 3)
        writer = dataset.writer()
        for unit, status in enumerate((500, 503, 500)):
            server.fail("PUT", status, times=2)
            files = write_real(writer, unit, target_bytes=1 << 16)
            server.fail("PUT", status, times=2)
            server.fail("GET", status, times=1)
            server.cut("GET", times=1)
            writer.commit([files], {})
        server.cut("GET", times=3)
        assert Dataset.open(dataset.uri).snapshot().samples().num_rows == 9
        server.cut("GET", times=2)
        report = verify(dataset.uri, deep=True)
        assert report.findings == []
        assert report.num_samples == 9
        assert server.num_failed >= 20

    def test_a_commit_whose_answer_is_lost_is_one_commit(self, server: S3Server) -> None:
        """The server stores the entry and answers 500; the client's retry finds the name taken, by itself."""
        dataset = create(server.new_uri(), 2)
        writer = dataset.writer()
        files = write_opaque(writer, 0)
        server.fail("PUT", 500, times=1, after=True)
        result = writer.commit([files], {})
        assert (result.version, result.accepted, result.dropped) == (1, [0], [])
        assert Dataset.open(dataset.uri).snapshot().version == 1

    def test_a_commit_that_never_gets_through_is_an_error_and_can_be_repeated(
        self, server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from storage import store_s3

        monkeypatch.setattr(store_s3, "MAX_RETRIES", 1)
        dataset = create(server.new_uri(), 2)
        writer = dataset.writer()
        files = write_opaque(writer, 0)
        server.fail("PUT", 503, times=1000)
        with pytest.raises(StoreError, match=r"503.*log/0000"):
            writer.commit([files], {})
        server.faults.clear()
        assert writer.commit([files], {}).accepted == [0]

    def test_an_upload_that_fails_leaves_nothing_visible(
        self, server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from storage import store_s3

        monkeypatch.setattr(store_s3, "MAX_RETRIES", 1)
        dataset = create(server.new_uri(), 1)
        writer = dataset.writer()
        server.fail("PUT", 500, times=1000)
        with pytest.raises(StoreError, match="shards/u00000000"):
            write_real(writer, 0, 0, target_bytes=1 << 16)
        server.faults.clear()
        assert list(open_store(dataset.uri).list("shards")) == []
        assert writer.commit([write_real(writer, 0, 1, target_bytes=1 << 16)], {}).accepted == [0]
        assert verify(dataset.uri, deep=True).findings == []


def test_a_reader_beside_committers_only_sees_whole_units(tmp_path: Path) -> None:
    dataset = create(tmp_path, 30)
    process = run(RACER, str(tmp_path), "1")
    sizes = []
    while process.poll() is None:
        snapshot = dataset.snapshot()
        accounting = snapshot.accounting()
        assert accounting.balances
        assert accounting.samples == snapshot.samples(columns=["row"]).num_rows == 3 * len(snapshot.unit_states())
        sizes.append(accounting.samples)
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert sizes == sorted(sizes)
    assert dataset.snapshot().accounting().samples == 90
    assert not (tmp_path / entry_path(16)).exists()
