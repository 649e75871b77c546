"""Telling an engine that ran out of memory from one that died of something else; halving the token budget."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from gen import memory
from gen.isolation import EngineLostError
from gen.memory import died_of_memory
from ray_jobs.generate.token_budget import FILE_NAME, TokenBudget
from storage import SampleKey


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


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's files: 3 processes killed for want of memory so far, no cgroup."""
    (tmp_path / "vmstat").write_text("nr_free_pages 12\noom_kill 3\n")
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    for name, file in {"VMSTAT": "vmstat", "MEMINFO": "meminfo", "OWN_CGROUP": "own", "CGROUP_ROOT": "groups"}.items():
        monkeypatch.setattr(memory, name, tmp_path / file)
    return tmp_path


def write_cgroup(node: Path, own: str, folder: str, **files: str) -> None:
    (node / "own").write_text(own)
    (node / "groups" / folder).mkdir(parents=True)
    for name, text in files.items():
        (node / "groups" / folder / name.replace("__", ".")).write_text(text)


def version_2(node: Path, own: str, folder: str, kills: int = 0) -> None:
    events, stat = f"max 5\noom {kills}\noom_kill {kills}\n", "anon 9\ninactive_file 300000\nactive_file 7\n"
    files = {"memory__max": "1000000\n", "memory__current": "700000\n"}
    write_cgroup(node, own, folder, memory__events=events, memory__stat=stat, **files)


@pytest.mark.parametrize(
    ("line", "before", "expected"),
    [
        ("ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.", 2, True),
        ("ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.", 2, True),
        ("ERROR Engine core proc EngineCore died unexpectedly, shutting down client.", 2, True),
        # Killed, but nothing on the node ran out of memory since; or a neighbour did, but ours was not killed.
        ("ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.", 3, False),
        ("ERROR Worker proc VllmWorker-0 died unexpectedly (exit code: -11), shutting down executor.", 2, False),
        ("AssertionError", 2, False),
    ],
)
def test_a_kill_by_the_kernel_is_a_killed_process_and_a_count(
    node: Path, line: str, before: int, expected: bool
) -> None:
    log = node / "replica.log"
    log.write_text(line + "\n")
    assert memory.count_oom_kills() == 3
    assert died_of_memory(log, 0, oom_kills_before=before) is expected


def test_a_neighbours_lack_of_memory_is_not_ours(node: Path) -> None:
    """In a cgroup its own count is taken: the node's counts every container."""
    version_2(node, "0::/pods/ours\n", "pods/ours", kills=1)
    assert memory.count_oom_kills() == 1


def test_a_container_that_does_not_know_its_outer_path_reads_what_is_mounted(node: Path) -> None:
    version_2(node, "0::/kubepods/burstable/pod1\n", "", kills=2)
    assert memory.count_oom_kills() == 2


def test_memory_without_a_cgroup_is_the_nodes(node: Path) -> None:
    assert memory.available_bytes() == 3000 << 10
    assert memory.count_oom_kills() == 3


def test_the_first_version_of_cgroups_is_read(node: Path) -> None:
    files = {"memory__limit_in_bytes": "2000000\n", "memory__usage_in_bytes": "900000\n"}
    own = "5:devices:/\n4:memory:/job\n0::/\n"
    stat, control = "cache 5\ntotal_inactive_file 100000\n", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"
    write_cgroup(node, own, "memory/job", memory__stat=stat, memory__oom_control=control, **files)
    assert memory.total_bytes() == 2_000_000
    assert memory.available_bytes() == 1_200_000
    assert memory.count_oom_kills() == 4
    (node / "groups/memory/job/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory.available_bytes() == 3000 << 10


def test_memory_of_this_node_is_read() -> None:
    assert 0 < memory.available_bytes() <= memory.total_bytes()


def test_a_containers_limit_counts_and_idle_pages_of_files_are_free(node: Path) -> None:
    version_2(node, "0::/ours\n", "ours")
    assert memory.total_bytes() == 1_000_000
    assert memory.available_bytes() == 600_000


def test_the_error_survives_the_way_to_the_driver() -> None:
    error = pickle.loads(pickle.dumps(EngineLostError("the engine died", True, (SampleKey(4, 0, 1),), True)))  # noqa: S301
    assert error.out_of_memory
    assert error.culprit == SampleKey(4, 0, 1)
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
    assert TokenBudget(tmp_path, configured=None, floor=1500).value == 1500  # vLLM would refuse less
