"""`headrace validate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

COLOURS = {"pass": "green", "fail": "bold red", "skipped": "yellow"}


def command(
    draft: Annotated[Path, typer.Argument(help="directory of a draft, flat or nested")],
    verifier: Annotated[Path, typer.Option("--verifier", help="directory of its verifier; only config.json is read")],
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="also run stored samples of this data set through the draft")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the results as one JSON object")] = False,
) -> None:
    """Check a draft against its verifier in seconds, without the verifier's weights.

    Exit codes: 0 sound, 1 a check failed, 2 no such draft, verifier or data set, 3 the storage failed.
    """
    from draft.validate import validate

    results = validate(draft, verifier, dataset)
    failed = [result.name for result in results if result.status == "fail"]
    if as_json:
        checks = [result.to_json() for result in results]
        typer.echo(json.dumps({"draft": str(draft), "sound": not failed, "checks": checks}))
    else:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console()
        table = Table("check", "status", "detail", "remedy", title=escape(str(draft)))
        for result in results:
            status = f"[{COLOURS[result.status]}]{result.status}[/]"
            table.add_row(result.name, status, escape(result.detail), escape(result.remedy))
        console.print(table)
        verdict = f"NOT SOUND: {', '.join(failed)}" if failed else "sound"
        skipped = sum(result.status == "skipped" for result in results)
        console.print(f"{verdict} ({len(results) - skipped} checks, {skipped} skipped)", markup=False)
    if failed:
        raise typer.Exit(1)
