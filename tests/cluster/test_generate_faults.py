"""A generate job whose engines die, run out of memory or lose their node: real Ray, real vLLM, real deaths."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import Outcome, finish, headrace, start, write_config, write_rows

from gen.config import ReplicasConfig
from storage import Dataset

HERE = Path(__file__).resolve().parent
FATAL_TEXT = "xyzzy plugh"
CGROUP = Path("/sys/fs/cgroup")
MEMORY_LIMIT = 6 << 30


def write_job(
    folder: Path, verifier_dir: Path, rows: list[Any], engine_args: dict[str, Any] | None = None, **replicas: Any
) -> Path:
    sizes = {
        "count": 1,
        "device": "cpu",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "kv_cache_gib": 1,
        "enforce_eager": True,
    }
    return write_config(
        folder / "generate.yaml",
        {
            "verifier": {"model": str(verifier_dir), "max_model_len": 512},
            "prompts": {"source": str(write_rows(folder / "prompts.jsonl", rows))},
            "sampling": {"max_tokens": 16, "temperature": 0.0},
            "capture": {"mode": "one_pass"},
            "dataset": {"uri": str(folder / "dataset"), "unit_bytes": 1_000_000},
            "replicas": {**sizes, **replicas, "engine_args": engine_args or {}},
        },
    )


def fatal_environment(**variables: str) -> dict[str, str]:
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), **variables}


def check_sound(folder: Path) -> None:
    assert Dataset.open(folder / "dataset").snapshot().is_complete
    verify = headrace("verify", str(folder / "dataset"), "--deep", "--json", cwd=folder)
    assert verify.code == 0, verify.stdout


def test_a_prompt_that_kills_its_engine_is_rejected_and_the_rest_kept(tmp_path: Path, verifier_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(verifier_dir)
    fatal_ids = tokenizer.encode(FATAL_TEXT, add_special_tokens=False)
    rows = [{"id": f"p{i}", "prompt": f"Name {i + 2} animals."} for i in range(12)]
    rows[5] = {"id": "killer", "turns": ["Name a colour.", f"{FATAL_TEXT}!", "And now?"]}
    # One restart is allowed, and there are two: a prompt's fault is not the replica's.
    config = write_job(
        tmp_path,
        verifier_dir,
        rows,
        {"worker_extension_cls": "fatal_worker.Extension"},
        max_unit_deaths=1,
        max_restarts=1,
    )
    environment = fatal_environment(HEADRACE_TEST_FATAL_TOKENS=",".join(map(str, fatal_ids)))
    command = ("generate", str(config), "--json", "--run-dir", "run")
    outcome = finish(start(*command, cwd=tmp_path, environment=environment))
    summary = outcome.json()
    assert (summary["num_restarts"], summary["num_fatal_prompts"]) == (2, 1)
    assert summary["num_retries"] >= 2
    assert summary["lost_device_s"] >= summary["lost_s"] > 0
    [line] = [line for line in outcome.stderr.splitlines() if line.startswith("rejected row")]
    assert "rejected row 5 (engine_died): with turn 1 of row 5 alone in it, once" in line
    snapshot = Dataset.open(tmp_path / "dataset").snapshot()
    keys = {(sample["row"], sample["turn"]) for sample in snapshot.samples(columns=["row", "turn"]).to_pylist()}
    assert keys == {(row, 0) for row in range(12)}
    rejects = {(reject["row"], reject["turn"]): reject for reject in snapshot.rejects().to_pylist()}
    reasons = {key: reject["reason"] for key, reject in rejects.items()}
    assert reasons == {(5, 1): "engine_died", (5, 2): "earlier_turn_rejected"}
    assert "row 5" in rejects[5, 1]["detail"]
    check_sound(tmp_path)


@pytest.fixture
def limited_cgroup() -> Iterator[Path | None]:
    """A memory cgroup of our own with a limit; None where this process may not make one."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {line.split(":")[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
    folder = (
        CGROUP / "memory" / own["memory"] if "memory" in own else CGROUP / own.get("", "")
    ) / f"test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    limit = folder / ("memory.limit_in_bytes" if "memory" in own else "memory.max")
    try:
        if limit.is_file():
            limit.write_text(str(MEMORY_LIMIT))
            yield folder
        else:
            yield None
    finally:
        deadline = time.monotonic() + 30
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        folder.rmdir()


def test_an_engine_that_runs_out_of_memory_starts_again_with_smaller_steps(
    tmp_path: Path, verifier_dir: Path, limited_cgroup: Path | None
) -> None:
    """The kernel kills the worker where the test may limit memory; elsewhere an allocation fails."""
    rows = [{"id": f"p{i}", "prompt": f"Write {i + 2} words about the number {i}, in one line."} for i in range(16)]
    config = write_job(
        tmp_path,
        verifier_dir,
        rows,
        {"worker_extension_cls": "fatal_worker.Extension"},
        min_batched_tokens=128,
        max_unit_deaths=1,
    )
    environment = fatal_environment(HEADRACE_TEST_STEP_TOKENS="150")
    if limited_cgroup is not None:
        environment["HEADRACE_TEST_FILL_MEMORY"] = "1"
    command = ("generate", str(config), "--json", "--run-dir", "run")
    outcome = finish(start(*command, cwd=tmp_path, environment=environment, cgroup=limited_cgroup))
    summary = outcome.json()
    assert (summary["num_restarts"], summary["num_out_of_memory"], summary["num_rejects"]) == (1, 1, 0)
    said = [line for line in outcome.stderr.splitlines() if line.startswith("out of memory")]
    assert len(said) == 1
    assert "max_num_batched_tokens 256 -> 128" in said[0]
    remembered = json.loads((tmp_path / "run" / "token_budget.json").read_text())
    assert (remembered["max_num_batched_tokens"], remembered["was"]) == (128, 256)
    snapshot = Dataset.open(tmp_path / "dataset").snapshot()
    assert sorted(snapshot.samples(columns=["row"])["row"].to_pylist()) == list(range(16))
    check_sound(tmp_path)


def test_a_lost_node_is_waited_for_within_bounds(tmp_path: Path, verifier_dir: Path) -> None:
    """The only node with room goes away; what is committed stays, and the message names what is missing. (Ray takes
    half a minute to see that a node is gone.)"""
    from ray.cluster_utils import Cluster

    rows = [{"id": f"p{i}", "prompt": f"Count from {i} to {i + 9} in words."} for i in range(60)]
    config = write_job(tmp_path, verifier_dir, rows, cores=1, placement_timeout_s=40)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        node = cluster.add_node(num_cpus=1)
        command = ("generate", str(config), "--json", "--run-dir", "run")
        process = start(*command, cwd=tmp_path, environment={"RAY_ADDRESS": cluster.address})
        try:
            wait_for_commit(process.pid, tmp_path / "dataset")
            cluster.remove_node(node, allow_graceful=False)
            outcome = finish(process)
        finally:
            process.kill()
    finally:
        cluster.shutdown()
    assert_no_room(outcome)
    assert Dataset.open(tmp_path / "dataset").snapshot().samples(columns=["row"]).num_rows > 0


def assert_no_room(outcome: Outcome) -> None:
    assert outcome.code == 1, outcome.stderr[-3000:]
    assert outcome.stdout == ""  # Ray tells of the lost node, elsewhere
    assert "replica-0 needs 1 CPU on one node; the cluster has 0 CPU on 1 nodes" in outcome.stderr
    assert "replicas.placement_timeout_s" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def wait_for_commit(pid: int, dataset: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and psutil.pid_exists(pid):
        if any((dataset / "samples").glob("*.parquet")):
            return
        time.sleep(0.05)
    raise AssertionError("no unit was committed")


def test_replicas_that_ray_kills_for_want_of_memory_end_within_bounds(tmp_path: Path, verifier_dir: Path) -> None:
    """Ray's memory monitor, told that any use is too much, kills every replica at once."""
    config = write_job(
        tmp_path, verifier_dir, [{"id": "p", "prompt": "Hello."}], max_restarts=1, min_batched_tokens=128
    )
    environment = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    outcome = finish(
        start("generate", str(config), "--json", "--run-dir", "run", cwd=tmp_path, environment=environment)
    )
    assert outcome.code == 1, outcome.stderr[-3000:]
    assert "replica-0 was lost after 1 restarts (replicas.max_restarts)" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    summary = json.loads((tmp_path / "run" / "generate.json").read_text())
    # The budget is halved once, and then one restart is left.
    assert (summary["num_restarts"], summary["num_out_of_memory"]) == (2, 3)
    assert "max_num_batched_tokens 256 -> 128" in outcome.stderr


def test_replicas_ask_for_what_the_cluster_will_have_and_share_a_node() -> None:
    """Of nodes with three and two cores, and a head without any."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.placement_group import placement_group

    from ray_jobs.generate.room import free_index, has_room, num_bundles, replica_bundle

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        replicas = ReplicasConfig(count=3, device="cpu")
        assert replica_bundle(replicas) == {"CPU": 1}  # nothing has joined yet
        assert replica_bundle(replicas.model_copy(update={"device": "gpu"})) == {"GPU": 1, "CPU": 1}
        nodes = [cluster.add_node(num_cpus=num_cpus).node_id for num_cpus in (3, 2)]
        group = placement_group([{"CPU": 1}] * 5, strategy="PACK")
        assert group.wait(60)
        assert has_room(group)
        assert [num_bundles(group, node) for node in nodes] == [3, 2]
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert [free_index([]), free_index([0, 2]), free_index([1, 0])] == [0, 1, 2]
