"""Host memory of a node, and how an engine that ran out of memory is told from one that died of something else."""

from __future__ import annotations

import os
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
VMSTAT = Path("/proc/vmstat")
OWN_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")

# What CUDA, PyTorch's CPU allocator, numpy and Python write when memory is gone.
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|Unable to allocate|MemoryError|Cannot allocate memory",
    re.IGNORECASE,
)
# What vLLM writes when a process of the engine got a SIGKILL. The exit code is None when the kernel is still at taking
# gigabytes away from the process (as after real kills for want of memory), and that of the engine
# core is not written.
KILLED = re.compile(r"died unexpectedly \(exit code: (?:-9|None)\)|Engine core proc \S+ died unexpectedly")
LOG_TAIL_BYTES = 1 << 20
# A cgroup of version 1 without a limit has one near 2^63.
NO_LIMIT = 1 << 60


def total_bytes() -> int:
    """Memory of this node, or of this container where that has a smaller limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _cgroup_limit()
    return total if limit is None else min(total, limit)


def available_bytes() -> int:
    """Memory that can be allocated now without swapping."""
    available = _named_value(MEMINFO, "MemAvailable:") << 10
    limit = _cgroup_limit()
    if limit is None:
        return available
    # As Kubernetes counts: pages of files that were not used lately are in the group's usage and can be had at once.
    v1 = _version_1()
    used = int(_cgroup_file("memory.usage_in_bytes" if v1 else "memory.current").read_text())
    idle_files = _named_value(_cgroup_file("memory.stat"), "total_inactive_file" if v1 else "inactive_file")
    return min(available, limit - (used - idle_files))


def count_oom_kills() -> int:
    """Processes that the kernel has killed for want of memory: of this process's cgroup, else of the whole node."""
    file = _cgroup_file("memory.oom_control" if _version_1() else "memory.events")
    if file.is_file() and any(line.startswith("oom_kill ") for line in file.read_text().splitlines()):
        return _named_value(file, "oom_kill")
    return _named_value(VMSTAT, "oom_kill")


def died_of_memory(log_file: Path, log_start: int, oom_kills_before: int) -> bool:
    """Whether an engine that has died ran out of memory.

    Either its log says so, from `log_start` on; or the log says that one of its processes was killed (or not what it
    died of), and since shortly before (`oom_kills_before`) the kernel has killed a process for want of memory, which
    leaves nothing in the log itself. What this cannot tell: whether the killed process was the kernel's victim, or
    somebody else's while a neighbour in the same cgroup (without one, on the same node) ran out of memory.
    """
    with log_file.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(log_start, end - LOG_TAIL_BYTES))
        text = file.read().decode(errors="replace")
    if OUT_OF_MEMORY.search(text):
        return True
    return KILLED.search(text) is not None and count_oom_kills() > oom_kills_before


def _named_value(file: Path, name: str) -> int:
    """The number behind `name` in a file of lines `name number`."""
    for line in file.read_text().splitlines():
        fields = line.split()
        if fields and fields[0] == name:
            return int(fields[1])
    raise ValueError(f"{file} has no {name}")


def _cgroup_lines() -> dict[str, str]:
    """The cgroups that this process is in: controllers (empty for version 2) to path."""
    if not OWN_CGROUP.is_file():
        return {}
    return {line.split(":")[1]: line.split(":", 2)[2] for line in OWN_CGROUP.read_text().splitlines()}


def _version_1() -> bool:
    """Whether memory is accounted by the first version of cgroups."""
    return "memory" in _cgroup_lines()


def _cgroup_file(name: str) -> Path:
    """A file of this process's memory cgroup; it need not exist (the root has none of them in version 2)."""
    root = CGROUP_ROOT / "memory" if _version_1() else CGROUP_ROOT
    own = root / _cgroup_lines().get("memory" if _version_1() else "", "/").lstrip("/") / name
    # In a container the path may be the one outside of it; what is mounted is then the container's own cgroup.
    return own if own.is_file() else root / name


def _cgroup_limit() -> int | None:
    """The memory limit in bytes of this process's cgroup; None without a cgroup or a limit."""
    file = _cgroup_file("memory.limit_in_bytes" if _version_1() else "memory.max")
    if not file.is_file():
        return None
    text = file.read_text().strip()
    return None if text == "max" or int(text) > NO_LIMIT else int(text)
