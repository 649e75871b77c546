"""A query's answer as a terminal table, JSON, CSV or Parquet."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import os
import sys
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import IO, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

# Characters of one cell of a terminal table: an answer's text can be 100,000 long.
CELL_CHARS = 80
UNBOUNDED_CHARS = 100_000


def render(table: pa.Table, form: str, max_rows: int) -> None:
    """Writes the answer to stdout: `form` is "table" (at most `max_rows` rows, 0 for all), "json" or "csv"."""
    if form == "table":
        _print_table(table, max_rows)
    else:
        sys.stdout.write(_text(table, form))


def write_file(table: pa.Table, form: str, path: Path) -> None:
    """Writes the whole answer to `path`, which is replaced only when all is written. "table" is written as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if form == "parquet":
            pq.write_table(table, temporary)
        elif form == "table":
            with temporary.open("w", encoding="utf-8") as file:
                _print_table(table, 0, file)
        else:
            temporary.write_text(_text(table, form), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _text(table: pa.Table, form: str) -> str:
    records = [[_plain(value) for value in row] for row in _rows(table)]
    if form == "json":
        names = _unique(table.column_names)
        lines = [json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, allow_nan=False) for row in records]
        return "[" + ",\n ".join(lines) + "]\n"
    assert form == "csv", form
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.column_names)
    writer.writerows([_cell(value) if isinstance(value, list | dict) else value for value in row] for row in records)
    return out.getvalue()


def _rows(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _unique(names: list[str]) -> list[str]:
    """SQL lets two columns share a name, a JSON object does not."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return unique


def _plain(value: Any) -> Any:
    """`value` as JSON knows it: times in ISO 8601, bytes in base64, numbers that JSON lacks as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    return value


def _cell(value: Any) -> str:
    if value is None:
        return ""
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _print_table(table: pa.Table, max_rows: int, file: IO[str] | None = None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = table.slice(0, max_rows) if max_rows else table
    grid = Table(box=box.SIMPLE_HEAD)
    for field in table.schema:
        numeric = pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
        grid.add_column(Text(field.name), justify="right" if numeric else "left", overflow="fold")
    for row in _rows(shown):
        # Text, not str: an answer may hold "[...]", which rich would read as markup.
        grid.add_row(*(Text(_shortened(_cell(value))) for value in row))
    console = Console(file=file)
    if not console.is_terminal:
        console.width = UNBOUNDED_CHARS  # rich would fold everything into 80 columns
    console.print(grid)
    left_out = table.num_rows - shown.num_rows
    note = f"{shown.num_rows} of {table.num_rows} rows shown, {left_out} left out"
    console.print(Text(note if left_out else f"{table.num_rows} rows"))


def _shortened(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= CELL_CHARS else f"{text[: CELL_CHARS - 1]}…"
