"""Progress of a long stage on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

# Seconds between two lines where stderr is no terminal (a job's log).
LINE_INTERVAL_S = 10.0


def transient_bars() -> Progress:
    """Bars of a short command on stderr, gone when it ends; nothing where stderr is no terminal."""
    stderr = Console(stderr=True)
    return Progress(console=stderr, transient=True, disable=not stderr.is_terminal)


class Stage(ABC):
    """One stage: `update` as often as wanted, from any thread."""

    def __init__(self, name: str, total: float | None) -> None:
        self.name = name
        self.total = total
        self.done: float = 0
        self.note = ""

    def __enter__(self) -> Stage:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the display."""

    def update(self, done: float | None = None, *, total: float | None = None, note: str | None = None) -> None:
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self.note = self.note if note is None else note
        self.show()

    @abstractmethod
    def show(self) -> None:
        """Draw the current state."""


class _LineStage(Stage):
    def __init__(self, name: str, total: float | None) -> None:
        super().__init__(name, total)
        self._started = time.monotonic()
        self._last = self._started
        print(f"{name} ...", file=sys.stderr, flush=True)

    def show(self) -> None:
        now = time.monotonic()
        if now - self._last >= LINE_INTERVAL_S:
            self._last = now
            of_total = "" if self.total is None else f" of {self.total:g}"
            count = f" {self.done:g}{of_total}" if self.done or self.total else ""
            print(f"{self.name}:{count} {self.note} [{now - self._started:.0f} s]", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = "done" if kind is None else "failed"
        print(f"{self.name}: {end} {self.note} [{time.monotonic() - self._started:.0f} s]", file=sys.stderr, flush=True)


class _BarStage(Stage):
    def __init__(self, name: str, total: float | None) -> None:
        super().__init__(name, total)
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(name, total=total, note="")
        self._progress.start()

    def show(self) -> None:
        self._progress.update(self._task, completed=self.done, total=self.total, note=self.note)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            total = self.total if self.total is not None else 1
            self._progress.update(self._task, completed=total, total=total)
        self._progress.stop()


def stage(name: str, total: float | None = None) -> Stage:
    """Start a stage; use it as a context manager. `total` is in any unit, None while unknown."""
    return _BarStage(name, total) if sys.stderr.isatty() else _LineStage(name, total)


@contextmanager
def ticking(current: Stage, interval_s: float = 1.0) -> Iterator[None]:
    """Keep a stage's display alive while a call blocks."""
    finished = threading.Event()

    def tick() -> None:
        while not finished.wait(interval_s):
            current.show()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
