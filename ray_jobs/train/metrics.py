"""What a run measures as it goes: sums over a window of steps, one JSON line per window in `<run>/metrics.jsonl`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from draft.objective import StepOutput

FILE_NAME = "metrics.jsonl"


class Window:
    """Sums since the last line, over all of a worker's batches; `reduced` adds the other workers'."""

    def __init__(self, ttt_steps: int, device: torch.device) -> None:
        self._ttt_steps = ttt_steps
        self._device = device
        self.clear()

    def clear(self) -> None:
        self.num_steps = 0
        self._began = time.monotonic()
        # loss x loss tokens, loss tokens, rows; then correct and total of each test-time-training step
        self._sums = torch.zeros(3 + 2 * self._ttt_steps, dtype=torch.float64, device=self._device)

    def add(self, output: StepOutput, num_rows: int) -> None:
        counts = torch.tensor([output.num_loss_tokens, num_rows], dtype=torch.float64, device=self._device)
        loss = (output.loss.detach().double() * output.num_loss_tokens).reshape(1)
        self._sums += torch.cat([loss, counts, output.correct_K.double(), output.total_K.double()])

    def reduced(self) -> dict[str, Any]:
        """Means over all workers' batches of the window. A collective call where there are several workers."""
        sums = self._sums.clone()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        loss, num_loss_tokens, num_rows, *counts = sums.tolist()
        correct, total = counts[: self._ttt_steps], counts[self._ttt_steps :]
        elapsed_s = max(time.monotonic() - self._began, 1e-9)
        return {
            "loss": loss / max(num_loss_tokens, 1),
            # Share of loss tokens for which steps 0..k were all right, as draft.notes.TrainingMetrics has it.
            "position_accuracy": [right / max(tried, 1) for right, tried in zip(correct, total, strict=True)],
            "loss_tokens": int(num_loss_tokens),
            "rows": int(num_rows),
            "tokens_per_s": num_rows / elapsed_s,
        }


def append_line(run: Path, line: dict[str, Any]) -> None:
    with (run / FILE_NAME).open("a") as file:
        file.write(json.dumps(line) + "\n")


def drop_lines_after(run: Path, step: int) -> None:
    """Forget lines of steps that a crash undid, so that no step is in the file twice."""
    path = run / FILE_NAME
    if not path.is_file():
        return
    kept = [line for line in read_lines(run) if line["step"] <= step]
    temporary = path.with_name(f".{FILE_NAME}.tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
    temporary.replace(path)


def read_lines(run: Path) -> list[dict[str, Any]]:
    """All whole lines; a last one that is still being written is left out."""
    path = run / FILE_NAME
    if not path.is_file():
        return []
    *whole, _ = path.read_text().split("\n")
    return [json.loads(line) for line in whole]
