"""`headrace gc`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer


def command(
    uri: Annotated[str, typer.Argument(help="data set: a local path, file:// or s3://")],
    apply: Annotated[bool, typer.Option("--apply", help="fence and remove; without it nothing is changed")] = False,
    older_than_h: Annotated[
        float, typer.Option("--older-than", min=0, help="hours without a sign of life after which a writer is dead")
    ] = 24.0,
    keep_superseded_h: Annotated[
        float, typer.Option("--keep-superseded", min=0, help="hours that readers of old snapshots keep replaced files")
    ] = 168.0,
    as_json: Annotated[bool, typer.Option("--json", help="the whole list as one JSON object")] = False,
) -> None:
    """Remove what dead writers left, expired and replaced files, and abandoned uploads. A dry run by default.

    Writers whose files go are fenced first: one that wakes up later cannot commit. Let --older-than be longer than the
    longest unit takes, or a writer at work is fenced (and fails, saying so).
    """
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from storage import Dataset
    from storage.gc import collect

    found = collect(Dataset.open(uri), apply, older_than_h * 3600, keep_superseded_h * 3600)
    if as_json:
        typer.echo(json.dumps(found.to_json()))
        return
    console = Console()
    files, sizes = Counter[str](), Counter[str]()
    for removal in found.removals:
        files[removal.reason] += 1
        sizes[removal.reason] += removal.size
    table = Table("why", "files", "bytes", title=f"{found.uri}: {'removed' if apply else 'to remove'}")
    for reason in sorted(files):
        table.add_row(reason, f"{files[reason]:,}", decimal(sizes[reason]))
    table.add_row("total", f"{len(found.removals):,}", decimal(found.num_bytes))
    console.print(table)
    if found.fenced:
        console.print(f"writers {'fenced' if apply else 'to fence'}: {', '.join(found.fenced)}")
    if found.active:
        console.print(f"left alone, active lately: {', '.join(found.active)}")
    if found.kept_for_readers:
        console.print(f"kept for readers of old snapshots: {found.kept_for_readers:,} files")
    if found.foreign:
        console.print(
            f"not of a data set, never removed: {', '.join(found.foreign[:10])} ({len(found.foreign)} in all)"
        )
    for note in found.notes:
        console.print(note)
    if not apply and found.removals:
        console.print("nothing was changed; run again with --apply")
