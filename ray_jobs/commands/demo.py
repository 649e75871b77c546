"""`headrace demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    run_dir: Annotated[Path, typer.Option(help="everything that the demo makes")] = Path("runs/demo"),
) -> None:
    """The whole path on the embedded verifier, on this machine: prompts in, a measured draft out.

    Every stage leaves its result in the run directory; running it again does only what is missing.
    """
    from ray_jobs.demo import run_demo

    run_demo(run_dir)
