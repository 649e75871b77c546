"""Processes killed at every step of what changes a data set: nothing committed is lost, the next run repairs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kill_scenarios
import pytest
from kill_scenarios import HEAD, SCENARIOS

from storage import Dataset
from storage.gc import collect
from storage.snapshot import Snapshot
from storage.verify import verify


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where syncing a file costs nothing, if there is one."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as directory:
        yield Path(directory)


def rows(snapshot: Snapshot) -> list[int]:
    found: list[int] = snapshot.samples(columns=["row"])["row"].to_pylist()
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_process_killed_at_every_step_loses_nothing(memory_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    command = [sys.executable, kill_scenarios.__file__, name, str(memory_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    killed = int(done.stdout)
    assert killed >= scenario.least_steps
    survived = 0
    for step in range(1, killed + 1):
        root = memory_path / str(step)
        snapshot = Dataset.open(root).snapshot()
        assert rows(snapshot) in (scenario.before, scenario.after), step
        assert snapshot.accounting().balances
        report = verify(root)
        assert report.is_sound, (step, report.errors)
        survived += rows(snapshot) == scenario.after
        # The same work is done again by another process.
        scenario.act(Dataset.open(root))
        dataset = Dataset.open(root)
        assert rows(dataset.snapshot()) == scenario.after, step
        collect(dataset, apply=True, older_than_s=-1, keep_superseded_s=0)
        report = verify(root, deep=True)
        # What was deleted and not purged is still stored, and checked.
        stored = len(scenario.after) + (name == "delete")
        assert (report.findings, report.num_samples) == ([], stored), step
        if name == "put_head":
            assert dataset.snapshot().fetch_head(root.with_suffix(".fetched")).read_bytes() == HEAD
    if scenario.before != scenario.after:
        assert 0 < survived < killed  # some died before the entry was published, some after it
