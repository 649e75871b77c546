"""The verbs verify, gc, compact and status: what they print, for people and for programs, and their exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from storage_helpers import create, files_below, write_opaque, write_real
from typer.testing import CliRunner

from ray_jobs.commands import compact, gc, status, verify
from storage import Dataset, SampleKey

app = typer.Typer()
for verb in (verify, gc, compact, status):
    app.command(verb.__name__.rpartition(".")[2])(verb.command)


def headrace(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def data(tmp_path: Path) -> Path:
    dataset = create(tmp_path, 4)
    writer = dataset.writer("w")
    for unit in range(3):
        writer.commit([write_real(writer, unit, target_bytes=1 << 16)], {})
    write_opaque(dataset.writer("dead"), 3)
    for path in files_below(tmp_path):
        os.utime(path, (0, 0))
    return tmp_path


def test_status(data: Path) -> None:
    told = json.loads(headrace("status", data, "--json"))
    assert told["units"] == {"committed": 3, "expired": 0, "pending": 1, "planned": 4}
    assert told["samples"] == {"expected": 12, "samples": 9, "rejects": 0, "expired": 0, "pending": 3, "deleted": 0}
    assert (told["version"], told["is_complete"], told["rate"]["commits"]) == (3, False, 2)
    assert "3 committed, 1 pending" in headrace("status", data)
    dataset = Dataset.open(data)
    dataset.writer().commit([write_opaque(dataset.writer(), 3)], {})
    dataset.complete()
    assert json.loads(headrace("status", data, "--json", "--watch"))["is_complete"]


def test_verify_and_its_exit_codes(data: Path) -> None:
    assert "sound" in headrace("verify", data)
    told = json.loads(headrace("verify", data, "--deep", "--json"))
    assert (told["is_sound"], told["num_samples"]) == (True, 9)
    assert {finding["kind"] for finding in told["findings"]} == {"orphan"}
    victim = next(data.glob("shards/u00000001-*"))
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    headrace("verify", data)  # the size is right: the fast look cannot know
    told = json.loads(headrace("verify", data, "--deep", "--json", code=1))
    assert {error["path"] for error in told["findings"] if error["severity"] == "error"} == {f"shards/{victim.name}"}
    assert "DAMAGED" in headrace("verify", data, "--deep", code=1)


def test_gc_is_a_dry_run_unless_told(data: Path) -> None:
    before = list(files_below(data))
    assert "nothing was changed" in headrace("gc", data)
    assert list(files_below(data)) == before
    told = json.loads(headrace("gc", data, "--apply", "--json"))
    assert (told["applied"], told["fenced"], len(told["removals"])) == (True, ["dead"], 2)
    assert json.loads(headrace("verify", data, "--json"))["findings"] == []


def test_compact_and_purge(data: Path) -> None:
    assert "would rewrite 3 units" in headrace("compact", data, "--dry-run")
    told = json.loads(headrace("compact", data, "--json"))
    assert (told["units"], told["files_before"], told["files_after"]) == (3, 6, 2)
    assert "nothing to compact" in headrace("compact", data)
    Dataset.open(data).delete([SampleKey(4, 0, 0)])
    assert "purged: 1 samples" in headrace("compact", data, "--purge")
    assert json.loads(headrace("verify", data, "--deep", "--json"))["num_samples"] == 8
