"""`headrace compact`."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def command(
    uri: Annotated[str, typer.Argument(help="data set: a local path, file:// or s3://")],
    target_mb: Annotated[int, typer.Option("--target-mb", min=1, help="shard size to reach, in MiB")] = 1024,
    purge: Annotated[
        bool, typer.Option("--purge", help="also remove the bytes of deleted samples; old snapshots lose those units")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be rewritten")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the result as one JSON object")] = False,
) -> None:
    """Merge small shards and sample files of neighbouring units. Readers of older snapshots go on until gc runs.

    A second run right after it finds nothing to do. --dry-run shows the first round of rewriting, which is most of it.
    """
    from rich.console import Console
    from rich.filesize import decimal

    from ray_jobs.progress import transient_bars
    from storage import Dataset
    from storage.compact import compact

    with transient_bars() as bars:
        task = bars.add_task("groups of units", total=None)
        result = compact(
            Dataset.open(uri),
            target_mb << 20,
            purge,
            dry_run,
            lambda done, total: bars.update(task, completed=done, total=total),
        )
    if as_json:
        typer.echo(json.dumps(result.to_json()))
        return
    console = Console()
    if not result.groups:
        console.print(f"{result.uri}: nothing to compact")
    elif dry_run:
        console.print(
            f"{result.uri}: would rewrite {result.units:,} units in {result.groups:,} groups, "
            f"{result.files_before:,} files of {decimal(result.bytes_before)}"
        )
    else:
        console.print(
            f"{result.uri}: {result.units:,} units, {result.files_before:,} files of {decimal(result.bytes_before)} "
            f"became {result.files_after:,} of {decimal(result.bytes_after)}"
        )
    if result.purged_samples or result.removed_files:
        console.print(f"purged: {result.purged_samples:,} samples; {result.removed_files:,} old files removed")
    for line in result.skipped:
        console.print(f"skipped: {line}; run again")
