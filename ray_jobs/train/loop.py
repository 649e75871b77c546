"""The training loop of one worker. Knows torch.distributed but not Ray, so it also runs in a plain process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from draft.alignment import StateColumns, TrainingBatch, make_batch
from draft.checkpoint import TrainingCheckpoint, write_checkpoint
from draft.model import build_training_model, checkpoint_tensors, load_checkpoint_tensors
from draft.notes import GenerationNotes, TrainingMetrics
from draft.objective import Objective, forward_batch
from ray_jobs.train import metrics
from ray_jobs.train.checkpoints import (
    LOOP_VERSION,
    OPTIMIZER,
    checkpoint_path,
    load_optimizer_tensors,
    newest_checkpoint,
    optimizer_tensors,
    prune,
)
from ray_jobs.train.config import TrainConfig
from ray_jobs.train.prepare import PreparedRun
from ray_jobs.train.schedule import learning_rate
from storage import Dataset
from storage.stream import Pack, TrainingStream


class NonFiniteGradientError(RuntimeError):
    """A loss or gradient is NaN or infinite: going on would only spread it."""


@dataclass(frozen=True)
class Worker:
    """This process's place among the workers.

    wrap: puts the model on the device and, with several workers, into DistributedDataParallel.
    report: called by every worker after each checkpoint, with the newest metrics; the path on rank 0 only.
    """

    rank: int
    world_size: int
    device: torch.device
    wrap: Callable[[torch.nn.Module], torch.nn.Module]
    report: Callable[[dict[str, Any], Path | None], None]


def train(config: TrainConfig, run: PreparedRun, worker: Worker) -> None:
    """Train from the newest checkpoint of the run, or from the start, to the end. All workers call it together.

    Raises NonFiniteGradientError naming step and samples.
    """
    checkpoint = newest_checkpoint(run.directory)
    if checkpoint is not None and checkpoint.state["finished"]:
        return
    _Loop(config, run, worker, checkpoint).run()


class _Loop:
    def __init__(
        self, config: TrainConfig, run: PreparedRun, worker: Worker, checkpoint: TrainingCheckpoint | None
    ) -> None:
        self._config, self._run, self._worker = config, run, worker
        optim, dataset = config.optim, config.dataset
        self._objective = Objective(optim.loss, optim.ttt_steps, optim.step_decay)
        self._stream = TrainingStream(
            run.sources,
            seed=dataset.seed,
            pack_tokens=dataset.pack_tokens,
            rank=worker.rank,
            world_size=worker.world_size,
            epochs=dataset.epochs,
            max_sample_tokens=dataset.max_sample_tokens,
            prefetch_packs=dataset.prefetch_packs,
        )
        self._columns = StateColumns.for_draft(run.draft, self._stream.spec)
        self._packs_before = list(
            itertools.accumulate((self._stream.plan(e).packs.num_packs for e in range(dataset.epochs)), initial=0)
        )
        self._build(checkpoint)
        self._window = metrics.Window(optim.ttt_steps, worker.device)
        self._rate = 0.0
        self._line: dict[str, Any] = {}

    def _build(self, checkpoint: TrainingCheckpoint | None) -> None:
        config, worker = self._config, self._worker
        on_cuda = worker.device.type == "cuda"
        with TemporaryDirectory(prefix="headrace-head-") as scratch:
            source = self._run.datasets[0]
            head = Dataset.open(source.uri).snapshot(source.version).fetch_head(Path(scratch))
            self._model = build_training_model(
                self._run.draft,
                head,
                self._run.vocab,
                seed=config.draft.seed,
                attention="simple_flex_attention" if on_cuda else "sdpa",
                train_lm_head=config.draft.train_lm_head,
            )
        self._step, self._rows_done, self._seconds_before = 0, 0, 0.0
        if checkpoint is not None:
            load_checkpoint_tensors(self._model, checkpoint.tensors())
            self._stream.load_state_dict(checkpoint.state["stream"])
            self._step = int(checkpoint.state["step"])
            self._rows_done = int(checkpoint.state["rows"])
            self._seconds_before = float(checkpoint.state["seconds"])
        self._wrapped = worker.wrap(self._model)
        self._names: dict[torch.Tensor, str] = {
            p: name for name, p in self._model.named_parameters() if p.requires_grad
        }
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            list(self._names), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )
        if checkpoint is not None:
            load_optimizer_tensors(self._optimizer, self._names, checkpoint.tensors(OPTIMIZER))
        self._bfloat16 = optim.precision == "bfloat16" or (optim.precision == "auto" and on_cuda)
        # Compiled attention wants one shape; without it padding only costs time.
        self._pad_to = config.dataset.pack_tokens if on_cuda else None

    def run(self) -> None:
        if self._worker.rank == 0:
            metrics.drop_lines_after(self._run.directory, self._step)
            prune(self._run.directory, self._config.checkpoint.keep)
        settings = self._config.checkpoint
        self._began = time.monotonic()
        self._window.clear()
        done = self._packs_done()
        for packs in self._steps():
            done, before = self._packs_done(), done
            self._rate = learning_rate((before + done) / 2 / self._packs_before[-1], self._config.optim)
            self._train_step(packs)
            if self._step % settings.log_every_steps == 0:
                self._log()
            if self._step % settings.every_steps == 0 and done < self._packs_before[-1]:
                self._save(finished=False)
        self._save(finished=True)

    def _steps(self) -> Iterator[list[Pack]]:
        """This worker's packs of one optimizer step after another."""
        packs_per_step = self._config.optim.packs_per_step or self._worker.world_size
        stream = iter(self._stream)
        while packs := list(itertools.islice(stream, packs_per_step // self._worker.world_size)):
            yield packs

    def _train_step(self, packs: list[Pack]) -> None:
        # Whatever a loss might draw at random is a function of the step, so a resumed run draws the same.
        torch.manual_seed(self._config.dataset.seed + self._step)
        batches = [
            make_batch(pack.samples, self._columns, ttt_steps=self._config.optim.ttt_steps, pad_to=self._pad_to).to(
                self._worker.device
            )
            for pack in packs
        ]
        num_loss_tokens = self._sum_over_workers(sum(batch.num_loss_tokens for batch in batches))
        self._optimizer.zero_grad()
        for number, batch in enumerate(batches):
            self._backward(batch, num_loss_tokens, is_last=number == len(batches) - 1)
        norm = torch.nn.utils.clip_grad_norm_(list(self._names), self._config.optim.clip_norm)
        if not torch.isfinite(norm):
            keys = ", ".join(str(sample.key) for pack in packs for sample in pack.samples)
            raise NonFiniteGradientError(
                f"step {self._step}: the gradient's norm is {norm.item()}; worker {self._worker.rank} had {keys}. The "
                f"run stops; its last checkpoint is sound. A lower optim.lr is the usual remedy"
            )
        if num_loss_tokens:  # AdamW would move by its momentum alone
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate
            self._optimizer.step()
        self._step += 1
        self._window.num_steps += 1

    def _backward(self, batch: TrainingBatch, num_loss_tokens: int, *, is_last: bool) -> None:
        """Add the batch's part of the gradient of the mean loss over *all* loss tokens of the step.

        The library's loss is a mean over the batch's own loss tokens and DistributedDataParallel takes the mean over
        workers; without these weights a token in a small batch would count more than one in a large batch.
        """
        waits: AbstractContextManager[Any] = nullcontext()
        if isinstance(self._wrapped, DistributedDataParallel) and not is_last:
            waits = self._wrapped.no_sync()
        autocast = torch.autocast(self._worker.device.type, torch.bfloat16, enabled=self._bfloat16)
        with waits:
            with autocast:
                output = forward_batch(self._wrapped, batch, self._objective)
            weight = output.num_loss_tokens * self._worker.world_size / max(num_loss_tokens, 1)
            (output.loss * weight).backward()
        self._window.add(output, batch.num_rows)

    def _sum_over_workers(self, value: int) -> int:
        if self._worker.world_size == 1:
            return value
        total = torch.tensor(value, dtype=torch.int64, device=self._worker.device)
        torch.distributed.all_reduce(total)
        return int(total)

    def _packs_done(self) -> int:
        """Packs of the whole run, over all workers, up to the stream's place."""
        return self._packs_before[self._stream.epoch] + self._stream.position

    def _log(self) -> None:
        if not self._window.num_steps:
            return
        measured = self._window.reduced()
        self._rows_done += measured["rows"]
        self._window.clear()
        self._line = {
            "step": self._step,
            "epoch": self._stream.epoch,
            "packs": self._packs_done(),
            "total_packs": self._packs_before[-1],
            "lr": self._rate,
            **measured,
            "elapsed_s": self._seconds(),
        }
        if self._worker.rank == 0:
            metrics.append_line(self._run.directory, self._line)

    def _save(self, *, finished: bool) -> None:
        self._log()
        path = None
        if self._worker.rank == 0:
            path = checkpoint_path(self._run.directory, self._step)
            state = {
                "loop_version": LOOP_VERSION,
                "step": self._step,
                "rows": self._rows_done,
                "seconds": self._seconds(),
                "stream": self._stream.state_dict(),
                "metrics": self._line,
                "finished": finished,
            }
            extra = {OPTIMIZER: optimizer_tensors(self._optimizer, self._names)}
            tensors = checkpoint_tensors(self._model)
            write_checkpoint(path, self._run.draft, tensors, state, self._notes(), extra)
            prune(self._run.directory, self._config.checkpoint.keep)
        self._worker.report(self._line, path)

    def _notes(self) -> GenerationNotes:
        vocab, line = self._run.vocab, self._line
        return GenerationNotes(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            headrace_version=version("headrace"),
            datasets=list(self._run.datasets),
            recipe=self._config.model_dump(mode="json"),
            step=self._step,
            coverage=None if vocab is None else vocab.coverage,
            training_metrics=TrainingMetrics(
                position_accuracy=line["position_accuracy"], num_tokens=line["loss_tokens"], loss=line["loss"]
            )
            if line
            else None,
        )

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._began
