"""The train job on real Ray Train: it learns, resumes where it stopped, and several workers compute what one does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny_training import VOCAB, make_sample, write_dataset, write_verifier

from draft.checkpoint import read_checkpoint
from ray_jobs.config import validate_config
from ray_jobs.train import metrics
from ray_jobs.train.checkpoints import FOLDER, newest_checkpoint
from ray_jobs.train.config import TrainConfig
from ray_jobs.train.job import TrainResult, finished_run, run_training
from ray_jobs.train.loop import NonFiniteGradientError, Worker, train
from ray_jobs.train.prepare import prepare_run

LENGTHS = [20 + (7 * row) % 25 for row in range(40)]
NUM_ROWS = sum(length - 2 for length in LENGTHS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("train")
    write_dataset(directory / "data", LENGTHS, write_verifier(directory / "verifier"))
    return directory / "data"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    # Workers import this folder's helpers.
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        address="local",  # never a cluster that happens to run on this machine
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield
    ray.shutdown()


def configuration(data: Path, directory: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "dataset": {"uri": str(data), "epochs": 3, "pack_tokens": 128},
        "draft": {"vocab_size": VOCAB},
        "optim": {"lr": 1e-2, "warmup_share": 0.05},
        "checkpoint": {"directory": str(directory), "every_steps": 7, "log_every_steps": 3, "keep": 2},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    return validate_config(values, TrainConfig, "test")


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return read_checkpoint(result.checkpoint_dir, verify=True).tensors()


def run_here(config: TrainConfig, stop_after: int | None = None) -> TrainResult | None:
    """The loop in this process, without Ray; `stop_after` ends it as a crash would, right after that checkpoint."""

    class Stop(Exception):
        pass

    def report(line: dict[str, Any], path: Path | None) -> None:
        if stop_after is not None and line["step"] >= stop_after:
            raise Stop

    worker = Worker(0, 1, torch.device("cpu"), lambda model: model, report)
    try:
        train(config, prepare_run(config), worker)
    except Stop:
        return None
    return finished_run(config)


def kill_worker() -> int:
    """SIGKILL to the Ray Train workers of this process's own Ray; returns how many there were."""
    killed = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("RayTrainWorker" in word for word in process.cmdline()):
                process.kill()
                killed += 1
    return killed


def test_a_killed_worker_goes_on_to_what_an_uninterrupted_run_gives(cluster, data, tmp_path):
    """One Ray Train worker, killed once after a checkpoint; beside it the plain loop without Ray."""
    options = {"dataset__epochs": 40, "checkpoint__every_steps": 30}
    reference = run_here(configuration(data, tmp_path / "reference", **options))
    assert reference is not None
    run = tmp_path / "run"
    config = configuration(data, run, **options)
    lines: list[dict[str, Any]] = []
    killed: list[int] = []

    def watch(line: dict[str, Any]) -> None:
        lines.append(line)
        if not killed and newest_checkpoint(run) is not None and (count := kill_worker()):
            killed.append(count)

    result = run_training(config, progress=watch)
    assert killed == [1]
    assert result.metrics["step"] == reference.metrics["step"]
    for name, tensor in weights(reference).items():
        torch.testing.assert_close(weights(result)[name], tensor, msg=name, atol=1e-3, rtol=1e-2)
    steps = [line["step"] for line in metrics.read_lines(run)]
    assert steps == sorted(set(steps))
    assert lines[-1]["packs"] == lines[-1]["total_packs"]
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    assert lines[-1]["position_accuracy"][0] > 0.5
    assert read_checkpoint(result.checkpoint_dir).state["rows"] == 40 * NUM_ROWS

    # Finished: the same call does nothing.
    before = (result.checkpoint_dir / "COMPLETE.json").stat().st_mtime_ns
    assert run_training(config) == result
    assert (result.checkpoint_dir / "COMPLETE.json").stat().st_mtime_ns == before

    # Only `keep` checkpoints stay, and the last one carries its notes.
    assert len(list((run / FOLDER).glob("step-*"))) == 2
    notes = read_checkpoint(result.checkpoint_dir).notes
    assert notes.coverage is None
    assert notes.datasets[0].uri == str(data)
    assert notes.training_metrics.position_accuracy == result.metrics["position_accuracy"]


def test_two_workers_go_on_with_what_one_began(cluster, data, tmp_path):
    """Two packs in each step, by one worker or by two: same order, same loss-token weights, same gradients."""
    one = run_here(configuration(data, tmp_path / "one", optim__packs_per_step=2))
    assert one is not None
    assert run_here(configuration(data, tmp_path / "two", optim__packs_per_step=2), stop_after=7) is None
    two = run_training(configuration(data, tmp_path / "two", optim__packs_per_step=2, workers__count=2))
    assert two.metrics["step"] == one.metrics["step"]
    assert two.metrics["loss_tokens"] == one.metrics["loss_tokens"]
    assert two.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=0.01)
    assert read_checkpoint(two.checkpoint_dir).state["rows"] == 3 * NUM_ROWS
    lines_one, lines_two = metrics.read_lines(tmp_path / "one"), metrics.read_lines(tmp_path / "two")
    assert sum(line["rows"] for line in lines_two) == sum(line["rows"] for line in lines_one) == 3 * NUM_ROWS
    first_by_two = next(line for line in lines_two if line["step"] > 7)
    same_by_one = next(line for line in lines_one if line["step"] == first_by_two["step"])
    assert first_by_two["loss"] == pytest.approx(same_by_one["loss"], rel=1e-2)


def test_a_run_goes_on_where_it_stopped(data, tmp_path):
    """Stopped after two checkpoints; the rest gives bit for bit what an uninterrupted run gives."""
    reference = run_here(configuration(data, tmp_path / "reference"))
    assert reference is not None
    run = tmp_path / "run"
    config = configuration(data, run)
    assert run_here(config, stop_after=14) is None
    assert newest_checkpoint(run).state["step"] == 14
    # What a crash leaves: lines of undone steps, a checkpoint without its marker, one that was being written.
    metrics.append_line(run, {"step": 15, "of": "a step that the crash undid"})
    torn = run / FOLDER / "step-00000099"
    shutil.copytree(run / FOLDER / "step-00000014", torn)
    (torn / "COMPLETE.json").unlink()
    (run / FOLDER / ".step-00000015.abc").mkdir()
    result = run_here(config)
    assert result is not None
    assert result.metrics["step"] == reference.metrics["step"]
    for name, tensor in weights(reference).items():
        assert torch.equal(weights(result)[name], tensor), name
    steps = [line["step"] for line in metrics.read_lines(run)]
    assert steps == sorted(set(steps))
    assert not list((run / FOLDER).glob(".step-*"))


def test_another_configuration_in_the_same_run_is_refused_by_name(data, tmp_path):
    run_here(configuration(data, tmp_path, dataset__epochs=1))
    with pytest.raises(ValueError, match=r"optim.lr: 0.01, now 0.5"):
        run_training(configuration(data, tmp_path, dataset__epochs=1, optim__lr=0.5))
    assert finished_run(configuration(data, tmp_path, dataset__epochs=1, workers__count=2)) is not None


def test_nan_states_stop_the_run_by_name(cluster, tmp_path, monkeypatch):
    import tiny_training

    def poisoned(row: int, *arguments: Any):
        sample = make_sample(row, *arguments)
        if row == 5:
            sample.states_TLH[3, 0, 0] = 0x7FC0  # NaN in bf16
        return sample

    monkeypatch.setattr(tiny_training, "make_sample", poisoned)
    write_dataset(tmp_path / "data", LENGTHS[:8], write_verifier(tmp_path / "verifier"))
    with pytest.raises(NonFiniteGradientError, match=r"gradient's norm is nan.*row 5 turn 0 n 0"):
        run_training(configuration(tmp_path / "data", tmp_path / "run"))


def test_data_that_do_not_fit_are_named_before_ray_is_needed(data, tmp_path):
    with pytest.raises(ValueError, match=r"without \[3\]"):
        run_here(configuration(data, tmp_path / "layers", draft__fields={"aux_layer_ids": [1, 3]}))
    with pytest.raises(ValueError, match="set max_sample_tokens to cut them"):
        run_here(configuration(data, tmp_path / "short", dataset__pack_tokens=30))
    verifier = write_verifier(tmp_path / "verifier")
    write_dataset(tmp_path / "headless", LENGTHS[:4], verifier, head=False)
    with pytest.raises(ValueError, match="has no verifier head"):
        run_here(configuration(tmp_path / "headless", tmp_path / "no-head"))


def test_the_run_pins_the_snapshot(data, tmp_path):
    config = configuration(data, tmp_path)
    run = prepare_run(config)
    assert run.datasets[0].version == json.loads((tmp_path / "run.json").read_text())["datasets"][0]["version"]
    assert run.sources == prepare_run(config).sources
