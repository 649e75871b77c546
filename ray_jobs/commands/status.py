"""`headrace status`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from storage.status import Status


def command(
    uri: Annotated[str, typer.Argument(help="data set: a local path, file:// or s3://")],
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object (with --watch one a line)")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="go on until the data set is complete")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="seconds between looks with --watch")] = 5.0,
) -> None:
    """Progress of a data set: units, samples, rejects, tokens, bytes, and the rate of the newest commits."""
    from rich.console import Console
    from rich.live import Live

    from storage import Dataset
    from storage.status import status

    dataset = Dataset.open(uri)
    current = status(dataset.snapshot())
    if as_json:
        typer.echo(json.dumps(current.to_json()))
        while watch and not current.is_complete:
            time.sleep(every_s)
            current = status(dataset.snapshot())
            typer.echo(json.dumps(current.to_json()))
    elif not watch:
        Console().print(_table(current))
    else:
        with Live(_table(current), auto_refresh=False) as live:
            while not current.is_complete:
                time.sleep(every_s)
                current = status(dataset.snapshot())
                live.update(_table(current), refresh=True)


def _table(status: Status) -> Table:
    from rich.filesize import decimal
    from rich.table import Table

    units, samples = status.units, status.samples
    closed = "complete" if status.is_complete else "open"
    table = Table("", "", title=f"{status.uri}, version {status.version}, {closed}", show_header=False)
    table.add_row(
        "units", f"{units['committed']:,} committed, {units['pending']:,} pending, {units['expired']:,} expired"
    )
    table.add_row(
        "samples",
        f"{samples.samples:,} of {samples.expected:,} expected; {samples.rejects:,} rejected, "
        f"{samples.pending:,} pending, {samples.expired:,} expired, {samples.deleted:,} deleted",
    )
    table.add_row("tokens", f"{status.num_tokens:,}")
    table.add_row("hidden states", f"{decimal(status.raw_bytes)} raw")
    table.add_row("stored", f"{decimal(status.stored_bytes)} in {status.num_files:,} files")
    if status.last_commit_age_s is not None:
        table.add_row("newest commit", f"{_duration(status.last_commit_age_s)} ago")
    if status.rate is not None:
        rate = status.rate
        table.add_row(
            "rate",
            f"{rate.samples_per_s:,.1f} samples/s, {rate.tokens_per_s:,.0f} tokens/s, "
            f"{decimal(int(rate.bytes_per_s))}/s over {rate.commits} commits ({_duration(rate.seconds)})",
        )
    if status.eta_s is not None and samples.pending:
        table.add_row("time left", f"{_duration(status.eta_s)} at that rate")
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
