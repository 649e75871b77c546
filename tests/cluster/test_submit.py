"""`--submit`: the same command through Ray Jobs, on a real cluster with its job server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from command_line import headrace, write_config, write_rows

from storage import Dataset, Identity, StateSpec, UnitPlan

RAY = Path(sys.executable).with_name("ray")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The job server of a cluster started as an administrator does."""
    port, gcs_port = _free_port(), _free_port()
    command = [str(RAY), "start", "--head", "--block", f"--port={gcs_port}", "--num-cpus=2", "--disable-usage-stats"]
    command += ["--include-dashboard=true", f"--dashboard-port={port}", "--dashboard-agent-listen-port=0"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not _answers(f"{url}/api/version"):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                output, _ = process.communicate()
                raise AssertionError(f"Ray did not start: {output[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        _, alive = psutil.wait_procs(children, timeout=30)
        for child in alive:
            child.kill()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as error:
        return error.code == 401  # Ray asks for its token; the job client reads it from the user's ~/.ray
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def test_a_job_with_a_wrong_source_fails_and_says_why(address: str, tmp_path: Path, verifier_dir: Path) -> None:
    config = write_config(
        tmp_path / "generate.yaml",
        {
            "verifier": {"model": str(verifier_dir), "max_model_len": 512},
            "prompts": {"source": str(write_rows(tmp_path / "prompts.jsonl", [{"prompt": " "}]))},
            "sampling": {"max_tokens": 8},
            "dataset": {"uri": str(tmp_path / "dataset")},
        },
    )
    outcome = headrace("generate", str(config), "--submit", address, cwd=tmp_path)
    assert outcome.code == 1
    assert "no usable prompt (empty_prompt 1)" in outcome.stdout
    assert "FAILED" in outcome.stderr


def test_a_wrong_configuration_never_reaches_the_cluster(tmp_path: Path) -> None:
    config = write_config(tmp_path / "generate.yaml", {"verifier": {"modl": "x"}})
    outcome = headrace("generate", str(config), "--submit", "http://127.0.0.1:9", cwd=tmp_path)
    assert outcome.code == 2
    assert "did you mean verifier.model?" in outcome.stderr


def test_nobody_at_the_address_is_a_clear_error(tmp_path: Path, verifier_dir: Path) -> None:
    values = {"verifier": {"model": str(verifier_dir)}, "prompts": {"source": "builtin:train"}}
    config = write_config(
        tmp_path / "generate.yaml", {**values, "sampling": {"max_tokens": 8}, "dataset": {"uri": "dataset"}}
    )
    outcome = headrace("generate", str(config), "--submit", f"http://127.0.0.1:{_free_port()}", cwd=tmp_path)
    assert outcome.code == 2
    assert "127.0.0.1" in outcome.stderr


def test_a_submitted_job_meets_the_same_identity_check(address: str, tmp_path: Path, verifier_dir: Path) -> None:
    spec = StateSpec((1, 2), 8)
    identity = Identity("generate", {"name": "other"}, {"digest": "x"}, spec)
    Dataset.create(tmp_path / "dataset", identity, [UnitPlan(0, 0, 1, 1)])
    config = write_config(
        tmp_path / "generate.yaml",
        {
            "verifier": {"model": str(verifier_dir), "max_model_len": 512},
            "prompts": {"source": "builtin:train", "limit": 2},
            "sampling": {"max_tokens": 8},
            "dataset": {"uri": str(tmp_path / "dataset")},
        },
    )
    outcome = headrace("generate", str(config), "--submit", address, cwd=tmp_path)
    assert outcome.code == 1
    assert "verifier.name" in outcome.stdout
