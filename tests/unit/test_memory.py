"""Telling an engine that ran out of memory from one that died of something else; halving the token budget."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from gen import memory
from gen.memory import EngineLostError, died_of_memory
from ray_jobs.generate.token_budget import FILE_NAME, TokenBudget


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory", True),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 2.6 GiB for an array", True),
        ("ValueError: layer 3: states of shape (2, 576)", False),
        ("INFO GPU KV cache size: 21,504 tokens; memory profiling took 2.1 s", False),
    ],
)
def test_the_log_tells(tmp_path: Path, line: str, expected: bool) -> None:
    log = tmp_path / "replica.log"
    log.write_text(f"INFO started\n{line}\n")
    assert died_of_memory(log, 0, memory.count_oom_kills()) is expected


def test_an_older_engines_log_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "replica.log"
    log.write_text("CUDA out of memory\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("AssertionError\n")
    assert not died_of_memory(log, start, memory.count_oom_kills())


def test_a_kill_by_the_kernel_leaves_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "replica.log"
    log.write_text("")
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 12\noom_kill 3\n")
    monkeypatch.setattr(memory, "VMSTAT", vmstat)
    assert memory.count_oom_kills() == 3
    assert died_of_memory(log, 0, oom_kills_before=2)
    assert not died_of_memory(log, 0, oom_kills_before=3)


def test_memory_of_this_node_is_read() -> None:
    assert 0 < memory.available_bytes() <= memory.total_bytes()


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "max").write_text("1000000\n")
    (tmp_path / "current").write_text("400000\n")
    monkeypatch.setattr(memory, "CGROUP_LIMIT", tmp_path / "max")
    monkeypatch.setattr(memory, "CGROUP_CURRENT", tmp_path / "current")
    assert memory.total_bytes() == 1_000_000
    assert memory.available_bytes() == 600_000


def test_the_error_survives_the_way_to_the_driver() -> None:
    error = pickle.loads(pickle.dumps(EngineLostError("the engine died", True)))  # noqa: S301 - our own bytes
    assert error.out_of_memory
    assert str(error) == "the engine died (out of memory)"


def test_the_budget_is_halved_to_its_floor_and_said_once_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = TokenBudget(tmp_path, configured=None, floor=300)
    assert budget.value is None
    assert budget.halve(1024, "replica-0")
    assert budget.halve(1024, "replica-1 died of the same budget")
    assert budget.value == 512
    assert budget.halve(512, "replica-0")
    assert budget.value == 300
    assert not budget.halve(300, "replica-0")
    lines = capsys.readouterr().err.splitlines()
    assert ["1024 -> 512" in lines[0], "512 -> 300" in lines[1], len(lines)] == [True, True, 2]


def test_a_job_that_is_started_again_remembers(tmp_path: Path) -> None:
    TokenBudget(tmp_path, configured=2048, floor=256).halve(2048, "replica-0")
    assert json.loads((tmp_path / FILE_NAME).read_text())["was"] == 2048
    assert TokenBudget(tmp_path, configured=2048, floor=256).value == 1024
    assert TokenBudget(tmp_path, configured=None, floor=256).value == 1024
    assert TokenBudget(tmp_path, configured=512, floor=256).value == 512
