"""`headrace export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Layout(StrEnum):
    """The library that the export is for."""

    SPECULATORS = "speculators"


def command(
    uri: Annotated[str, typer.Argument(help="data set: a local path, file:// or s3://")],
    to: Annotated[Layout, typer.Option("--to", help="layout to write")],
    output: Annotated[Path, typer.Option(help="new directory to write into")],
    version: Annotated[int | None, typer.Option(help="of the data set; default is the newest")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Write the samples of a data set in another library's layout.

    speculators: hidden_states/hs_{i}.safetensors beside an Arrow table of token ids and loss masks. The directory
    appears under its name only when it is whole.
    """
    import json
    from dataclasses import asdict

    from ray_jobs.progress import transient_bars
    from storage.dataset import Dataset
    from storage.export import export_speculators

    assert to is Layout.SPECULATORS, to
    snapshot = Dataset.open(uri).snapshot(version)
    with transient_bars() as bar:
        task = bar.add_task("samples", total=None)
        summary = export_speculators(
            snapshot, output, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        print(json.dumps(asdict(summary)))
        return
    print(
        f"{summary.samples} samples, {summary.tokens} tokens, {summary.state_bytes / 1e9:.3f} GB of states "
        f"in {summary.directory}"
    )
    if summary.skipped:
        print(f"{len(summary.skipped)} samples of one token were left out, they have no states: {summary.skipped[:5]}")
