"""`headrace verify`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer

SHOWN = 50


def command(
    uri: Annotated[str, typer.Argument(help="data set: a local path, file:// or s3://")],
    deep: Annotated[bool, typer.Option("--deep", help="read everything: every digest and every sample")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the whole report as one JSON object")] = False,
) -> None:
    """Check that a data set is what its log says it is.

    Fast: the log, names, sizes and accounting. --deep: also every digest, every row and every sample's states.
    Exit codes: 0 sound, 1 damage found, 2 no such data set, 3 the storage failed, so nothing is known.
    """
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

    from ray_jobs.progress import transient_bars
    from storage.verify import verify

    with transient_bars() as bars:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        report = verify(uri, deep, progress)
    if as_json:
        typer.echo(json.dumps(report.to_json()))
    else:
        console = Console()
        notices = Counter(finding.kind for finding in report.findings if finding.severity == "notice")
        if report.errors:
            table = Table("kind", "file", "unit", "sample", "what", title=f"{len(report.errors)} errors")
            for finding in report.errors[:SHOWN]:
                unit = "" if finding.unit is None else str(finding.unit)
                table.add_row(finding.kind, finding.path, unit, finding.sample or "", finding.detail)
            console.print(table)
            if len(report.errors) > SHOWN:
                console.print(f"... and {len(report.errors) - SHOWN} more; --json has them all")
        seen = f"{report.num_files:,} files, {report.num_bytes:,} bytes"
        if deep:
            seen += f", {report.num_samples:,} samples read"
        verdict = "sound" if report.is_sound else "DAMAGED"
        console.print(f"{report.uri} version {report.version}: {verdict} ({seen})")
        if retired := notices.pop("retired", 0):
            console.print(f"not checked: {retired:,} files that expired or were replaced while this ran")
        if notices:
            left = ", ".join(f"{count:,} {kind}" for kind, count in sorted(notices.items()))
            console.print(f"left over, for `headrace gc`: {left}")
    if not report.is_sound:
        raise typer.Exit(1)
