"""A generate job that is killed again and again, at random moments, in the driver or in an engine, loses nothing.

What a dead driver leaves running (its Ray, its engines) is ended between the rounds, as a node's death would.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from storage import Dataset
from storage.reader import SampleReader
from storage.verify import verify

NUM_PROMPTS = 60
# Then it is left to end.
NUM_KILLS = 8
SEED = 20261130
# One kill of four comes while the job starts; the others come after an engine is up, however long that takes.
KILL_STARTING_AFTER_S = (5.0, 40.0)
KILL_WORKING_AFTER_S = (5.0, 60.0)
ENGINE_LIMIT_S = 300


@pytest.mark.timeout(3600)
def test_a_job_that_is_killed_at_random_ends_whole(tmp_path: Path, verifier_dir: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            f'{{"id": "p{i}", "prompt": "Write {i + 2} words about the number {i}."}}\n' for i in range(NUM_PROMPTS)
        )
    )
    config = tmp_path / "generate.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "verifier": {"model": str(verifier_dir), "max_model_len": 512},
                "prompts": {"source": str(prompts)},
                "sampling": {"max_tokens": 96, "temperature": 0.7},
                "capture": {"mode": "one_pass"},
                "dataset": {"uri": str(tmp_path / "dataset"), "unit_bytes": 1_500_000},
                "replicas": {"count": 1, "max_num_seqs": 4, "max_num_batched_tokens": 128, "kv_cache_gib": 1}
                | {"enforce_eager": True, "units_in_flight": 2},
            }
        )
    )
    command = [sys.executable, "-m", "ray_jobs", "generate", str(config), "--json", "--run-dir", "run"]
    draw = random.Random(SEED)
    kills = []
    for round_number in range(NUM_KILLS + 1):
        log = (tmp_path / f"round-{round_number}.log").open("w")
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        if round_number == NUM_KILLS:
            family = _wait(process, 1200)
        elif draw.random() < 0.25:
            family = _wait(process, draw.uniform(*KILL_STARTING_AFTER_S))
        else:
            _wait(process, ENGINE_LIMIT_S, until_engine=True)
            family = _wait(process, draw.uniform(*KILL_WORKING_AFTER_S))
        if process.poll() is None and round_number < NUM_KILLS:
            victim = draw.choice(["driver", "engine"])
            kills.append(victim)
            if victim == "engine" and _kill_engine(family):
                # The driver replaces the replica and goes on by itself.
                family = _wait(process, 400)
            else:
                process.kill()
        process.wait()
        _end(family)
        log.close()
        if process.returncode == 0:
            break
    else:
        pytest.fail(f"not finished after {NUM_KILLS} kills: {kills}")

    assert kills, "the job ended before the first kill: nothing was tested"
    snapshot = Dataset.open(tmp_path / "dataset").snapshot()
    assert snapshot.is_complete
    rows = snapshot.samples(columns=["row"])["row"].to_pylist()
    assert sorted(rows) == list(range(NUM_PROMPTS))
    assert sum(1 for _ in SampleReader(snapshot)) == NUM_PROMPTS  # every checksum is verified on the way
    assert verify(tmp_path / "dataset", deep=True).is_sound
    print(f"rounds {round_number + 1}, kills {kills}")


def _wait(process: subprocess.Popen[bytes], seconds: float, until_engine: bool = False) -> list[psutil.Process]:
    """Until the process ends, the time is over or an engine is up; the descendants that were seen meanwhile."""
    seen: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            for child in psutil.Process(process.pid).children(recursive=True):
                seen.setdefault(child.pid, child)
        except psutil.NoSuchProcess:
            break
        if until_engine and any(map(_is_engine, seen.values())):
            break
        time.sleep(0.2)
    return list(seen.values())


def _is_engine(child: psutil.Process) -> bool:
    try:
        return child.is_running() and "VLLM::" in " ".join([child.name(), *child.cmdline()])
    except psutil.NoSuchProcess:
        return False


def _kill_engine(family: list[psutil.Process]) -> bool:
    for child in family:
        if _is_engine(child):
            child.kill()
            return True
    return False


def _end(family: list[psutil.Process]) -> None:
    for child in family:
        if child.is_running():
            child.kill()
    psutil.wait_procs(family, timeout=30)
