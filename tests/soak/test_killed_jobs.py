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
MAX_ROUNDS = 12
SEED = 20261130
# From before the engine is up until well into generating, on two cores.
KILL_AFTER_S = (20.0, 100.0)


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
    for round_number in range(MAX_ROUNDS):
        log = (tmp_path / f"round-{round_number}.log").open("w")
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT)
        family = _wait(process, draw.uniform(*KILL_AFTER_S))
        if process.poll() is None:
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
        pytest.fail(f"not finished after {MAX_ROUNDS} rounds, kills {kills}")

    assert kills, "the job ended before the first kill: nothing was tested"
    snapshot = Dataset.open(tmp_path / "dataset").snapshot()
    assert snapshot.is_complete
    rows = snapshot.samples(columns=["row"])["row"].to_pylist()
    assert sorted(rows) == list(range(NUM_PROMPTS))
    assert sum(1 for _ in SampleReader(snapshot)) == NUM_PROMPTS  # every checksum is verified on the way
    assert verify(tmp_path / "dataset", deep=True).is_sound
    print(f"rounds {round_number + 1}, kills {kills}")


def _wait(process: subprocess.Popen[bytes], seconds: float) -> list[psutil.Process]:
    """Until the process ends or the time is over; the descendants that were seen meanwhile."""
    seen: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        try:
            for child in psutil.Process(process.pid).children(recursive=True):
                seen.setdefault(child.pid, child)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.2)
    return list(seen.values())


def _kill_engine(family: list[psutil.Process]) -> bool:
    for child in family:
        if child.is_running() and "VLLM::" in " ".join([child.name(), *child.cmdline()]):
            child.kill()
            return True
    return False


def _end(family: list[psutil.Process]) -> None:
    for child in family:
        if child.is_running():
            child.kill()
    psutil.wait_procs(family, timeout=30)
