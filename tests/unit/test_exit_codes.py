"""Exit codes of the real command line: what a script may conclude when storage fails, and that bugs stay tracebacks."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from storage_helpers import create, write_opaque

from ray_jobs import cli
from ray_jobs.errors import JobError
from storage import CompleteError, ContentionError, DamagedError, FencedError, StoreError

# An address that refuses is given up within seconds: 6 retries from 0.2 s.
TIMEOUT_S = 120


def headrace(*arguments: str | Path, disk_bytes: int = -1, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in its own process, where no file can grow beyond `disk_bytes` (-1: no limit)."""
    limits = (disk_bytes, disk_bytes)
    return subprocess.run(
        [sys.executable, "-m", "ray_jobs", *map(str, arguments)],
        env={**os.environ, **environment},
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits) if disk_bytes >= 0 else None,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def refusing_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_a_bucket_that_does_not_answer_is_no_damage() -> None:
    done = headrace(
        "verify",
        "s3://bucket/data",
        AWS_ENDPOINT_URL=refusing_address(),
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_REGION="us-east-1",
    )
    assert done.returncode == 3, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("headrace: ")
    assert "s3://bucket/data/dataset.json" in line
    assert done.stdout == ""


def test_a_full_disk_could_not_be_done(tmp_path: Path) -> None:
    dataset = create(tmp_path, 1)
    write_opaque(dataset.writer("dead"), 0)
    arguments = ["gc", str(tmp_path), "--apply", "--older-than", "0"]
    done = headrace(*arguments, disk_bytes=0)
    assert done.returncode == 3, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("headrace: ")
    assert "File too large" in line
    assert "log/00000000000000000001.json" in line
    done = headrace(*arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_data_set_and_a_damaged_one_keep_their_codes(tmp_path: Path) -> None:
    done = headrace("verify", tmp_path / "none")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    dataset = create(tmp_path / "data", 1)
    writer = dataset.writer()
    files = write_opaque(writer, 0)
    writer.commit([files], {})
    (tmp_path / "data" / files.files[0].path).unlink()
    assert headrace("verify", tmp_path / "data").returncode == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobError("x"), 1),
        (DamagedError("x"), 1),
        (ValueError("x"), 2),
        (FileNotFoundError(2, "no such file", "x"), 2),
        (FileExistsError("x exists"), 2),
        (IsADirectoryError(21, "is a directory", "x"), 2),
        (ConnectionRefusedError(111, "refused"), 2),
        (StoreError(28, "No space left on device", "x"), 3),
        (OSError(30, "Read-only file system", "x"), 3),
        (TimeoutError(), 3),
        (FencedError("x"), 3),
        (CompleteError("x"), 3),
        (ContentionError("x\ny"), 3),
    ],
)
def test_each_kind_of_error_is_one_line_and_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("headrace: ")
    assert line != "headrace: "


@pytest.mark.parametrize("error", [AssertionError(), KeyError("x"), TypeError("x"), RuntimeError("x")])
def test_a_bug_stays_a_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(type(error)) as raised:
        cli.main()
    assert raised.value is error
