"""`headrace query`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """How the answer is written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


def command(
    uri: Annotated[str, typer.Argument(help="data set: a local path, file:// or s3://")],
    sql: Annotated[str, typer.Argument(help="one SELECT over samples, rejects, shards, units (DuckDB's dialect)")],
    format_: Annotated[Format, typer.Option("--format", help="of the answer")] = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="short for --format json")] = False,
    output: Annotated[Path | None, typer.Option(help="write the answer to this file instead of stdout")] = None,
    version: Annotated[int | None, typer.Option(help="of the data set; default is the newest")] = None,
    rows: Annotated[int, typer.Option(min=0, help="most rows shown by --format table; 0 shows all")] = 50,
) -> None:
    """Ask the manifest and the samples table with SQL. Read-only; SQL reaches no file and no network.

    Columns: DESCRIBE samples (rejects, shards, units).
    Exit codes: 0 done, 1 the data set is damaged, 2 wrong query or data set, 3 the storage failed.
    """
    chosen = Format.JSON if as_json else format_
    if chosen is Format.PARQUET and output is None:
        raise ValueError("--format parquet writes a binary file: name it with --output FILE")
    from storage.query import query
    from storage.query_output import render, write_file

    table = query(uri, sql, version)
    if output is not None:
        write_file(table, chosen.value, output)
        typer.echo(f"{table.num_rows} rows written to {output}", err=True)
    else:
        render(table, chosen.value, rows)
