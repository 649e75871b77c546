"""Running the command line as a user does: its own process, its exit code, its two streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TIMEOUT_S = 420


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        assert self.code == 0, self.stderr[-4000:]
        return json.loads(self.stdout)


def start(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None, cgroup: Path | None = None
) -> subprocess.Popen[str]:
    """`environment` is added to this process's own; `cgroup` is the folder of one that the command is put into."""
    command = [sys.executable, "-m", "ray_jobs", *arguments]
    if cgroup is not None:
        command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup / "cgroup.procs"), *command]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Outcome:
    try:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"no end after {TIMEOUT_S} s; stderr ends with: {stderr[-2000:]}") from None
    return Outcome(process.returncode, stdout, stderr)


def headrace(*arguments: str, cwd: Path) -> Outcome:
    return finish(start(*arguments, cwd=cwd))


def write_config(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def write_rows(path: Path, rows: list[Any]) -> Path:
    """JSON lines; a string is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
