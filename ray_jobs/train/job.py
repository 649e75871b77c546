"""The driver of a train job: sets the run up, runs Ray Train's worker group, starts it again after lost workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_jobs.errors import JobError
from ray_jobs.train import metrics
from ray_jobs.train.checkpoints import FOLDER, newest_checkpoint
from ray_jobs.train.config import TrainConfig
from ray_jobs.train.prepare import check_run, load_run, prepare_run

POLL_S = 1.0

Progress = Callable[[dict[str, Any]], None]


class TrainingFailedError(JobError):
    """The run stopped before its end. What its last checkpoint holds is kept; the same command goes on from there."""


@dataclass(frozen=True)
class TrainResult:
    """A finished run."""

    checkpoint_dir: Path
    metrics: dict[str, Any]  # the last line of metrics.jsonl
    coverage: float | None  # share of loss tokens inside the draft vocabulary; None without one
    rows: int  # that went through the model, over all epochs and starts
    seconds: float  # of training, over all starts


def run_training(config: TrainConfig, *, progress: Progress | None = None) -> TrainResult:
    """Train the draft, or go on with the run in `checkpoint.directory`, or do nothing when that is finished.

    Ray must be initialised, unless the run is finished. `progress` is called from a thread with each new line of
    metrics.jsonl (step, packs, total_packs, loss, position_accuracy, tokens_per_s, ...).

    Raises:
        ValueError: what the user can fix: configuration, data, draft.
        NonFiniteGradientError: the loss or its gradient became NaN or infinite.
        TrainingFailedError: workers were lost more often than `workers.max_failures`.
    """
    result = finished_run(config)
    if result is None:
        run = prepare_run(config)
        with _watched(run.directory, progress):
            _fit(config, run.directory)
        result = finished_run(config)
        assert result is not None, f"{run.directory}: workers ended without a finished checkpoint"
    return result


def finished_run(config: TrainConfig) -> TrainResult | None:
    """The result of the run in `checkpoint.directory` if it is finished; needs no Ray.

    Raises ValueError when the directory holds a run with another configuration.
    """
    directory = check_run(config)
    checkpoint = newest_checkpoint(directory)
    if checkpoint is None or not checkpoint.state["finished"]:
        return None
    state = checkpoint.state
    return TrainResult(
        checkpoint.directory, state["metrics"], checkpoint.notes.coverage, state["rows"], state["seconds"]
    )


def _fit(config: TrainConfig, directory: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train import TrainingFailedError as WorkersFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    workers = config.workers
    num_workers: Any = workers.count  # the exported class is annotated as its first version, which was not elastic
    # Ray Train tells a lost worker from nothing else and would try a wrong configuration or a NaN again just as often,
    # so its own retries stay off and the driver decides.
    for failures in range(workers.max_failures + 1):
        trainer = TorchTrainer(
            _work,
            train_loop_config={"config": config.model_dump(mode="json"), "directory": str(directory)},
            torch_config=TorchConfig(backend="nccl" if workers.gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=num_workers,
                use_gpu=workers.gpu,
                resources_per_worker={"CPU": workers.cpus} | ({"GPU": 1} if workers.gpu else {}),
            ),
            # Inside this folder Ray registers our checkpoints as they are, and checks that every node sees it.
            run_config=RunConfig(
                name=FOLDER, storage_path=str(directory), failure_config=FailureConfig(max_failures=0)
            ),
        )
        try:
            trainer.fit()
            return
        except WorkersFailedError as error:
            cause = _fatal_cause(error)
            if cause is not None:
                raise cause from error
            if failures == workers.max_failures:
                raise TrainingFailedError(
                    f"workers were lost {failures + 1} times, the last time: {error}; the run in {directory} is kept, "
                    "the same command goes on from its newest checkpoint"
                ) from error


def _fatal_cause(error: Exception) -> Exception | None:
    """The error that trying again would only meet again, as the worker raised it; None for a lost worker."""
    from ray_jobs.train.loop import NonFiniteGradientError

    fatal = (ValueError, TypeError, KeyError, AssertionError, NotImplementedError, NonFiniteGradientError)
    for failure in getattr(error, "worker_failures", {}).values():
        if isinstance(failure, fatal):
            return failure
    return None


def _work(loop_config: dict[str, Any]) -> None:
    """What each Ray Train worker runs."""
    import ray.train
    import ray.train.torch
    import torch
    from ray.train import Checkpoint, CheckpointUploadMode

    from ray_jobs.train.loop import Worker, train

    config = TrainConfig.model_validate(loop_config["config"])
    # Ray gives a worker's processes OMP_NUM_THREADS by its CPUs only when that is unset where Ray starts.
    torch.set_num_threads(config.workers.cpus)
    context = ray.train.get_context()

    def report(line: dict[str, Any], path: Path | None) -> None:
        checkpoint = None if path is None else Checkpoint.from_directory(path)
        # The checkpoint is already where it belongs, under its own name, whole and durable.
        ray.train.report(line, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        # Buffers are constants (d2t, t2d, rotary frequencies): nothing to broadcast at each step.
        wrapped = ray.train.torch.prepare_model(model, parallel_strategy_kwargs={"broadcast_buffers": False})
        assert isinstance(wrapped, torch.nn.Module)
        return wrapped

    device = ray.train.torch.get_device()
    worker = Worker(context.get_world_rank(), context.get_world_size(), device, wrap, report)
    train(config, load_run(Path(loop_config["directory"])), worker)


@contextmanager
def _watched(directory: Path, progress: Progress | None) -> Iterator[None]:
    """Hand new lines of metrics.jsonl to `progress` while the workers write them."""
    if progress is None:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        last_step = -1
        while True:
            is_last = ended.wait(POLL_S)
            for line in metrics.read_lines(directory):
                if line["step"] > last_step:
                    last_step = line["step"]
                    progress(line)
            if is_last:
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
