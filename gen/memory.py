"""Host memory of a node, and how an engine that ran out of memory is told from one that died of something else."""

from __future__ import annotations

import os
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
VMSTAT = Path("/proc/vmstat")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_CURRENT = Path("/sys/fs/cgroup/memory.current")

# What CUDA, PyTorch's CPU allocator, numpy and Python write when memory is gone.
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Unable to allocate|MemoryError|Cannot allocate memory",
    re.IGNORECASE,
)
LOG_TAIL_BYTES = 64 << 10


class EngineLostError(RuntimeError):
    """The engine of a replica is dead; the replica must be replaced."""

    def __init__(self, detail: str, out_of_memory: bool) -> None:
        # Both arguments go to the base class, so that the error survives pickling.
        super().__init__(detail, out_of_memory)
        self.detail = detail
        self.out_of_memory = out_of_memory

    def __str__(self) -> str:
        return f"{self.detail} (out of memory)" if self.out_of_memory else self.detail


def total_bytes() -> int:
    """Memory of this node, or of this container where that has a smaller limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_value(CGROUP_LIMIT)
    return total if limit is None else min(total, limit)


def available_bytes() -> int:
    """Memory that can be allocated now without swapping."""
    available = _meminfo("MemAvailable")
    limit, current = _cgroup_value(CGROUP_LIMIT), _cgroup_value(CGROUP_CURRENT)
    if limit is None or current is None:
        return available
    return min(available, limit - current)


def count_oom_kills() -> int:
    """Processes that the kernel of this node has killed for want of memory since it started."""
    for line in VMSTAT.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    raise ValueError(f"{VMSTAT} has no oom_kill counter")


def died_of_memory(log_file: Path, log_start: int, oom_kills_before: int) -> bool:
    """Whether an engine that has died ran out of memory, by its log from `log_start` on and the kernel's counter.

    On CPU running out of memory is a SIGKILL from the kernel, which leaves nothing in the log.
    """
    if count_oom_kills() > oom_kills_before:
        return True
    with log_file.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(log_start, end - LOG_TAIL_BYTES))
        return OUT_OF_MEMORY.search(file.read().decode(errors="replace")) is not None


def _meminfo(name: str) -> int:
    for line in MEMINFO.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"{MEMINFO} has no {name}")


def _cgroup_value(path: Path) -> int | None:
    """A cgroup v2 memory value in bytes; None without such a cgroup or without a limit."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return None if text == "max" else int(text)
