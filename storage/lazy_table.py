"""A table that is read when a query asks for it, and only the columns and rows that the query needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.dataset as ds

Loader = Callable[[list[str], "ds.Expression | None"], pa.Table]


class LazyTable(ds.Dataset):
    """An Arrow data set for DuckDB, which calls `scanner` with the columns and filters it pushes down.

    DuckDB recognises any subclass of `pyarrow.dataset.Dataset` by its type and uses only `schema` and `scanner`; it
    takes a pushed filter for applied, so `scanner` applies it whatever the loader did with it.

    Args:
        schema: of the whole table.
        load: called with the columns needed (those of the filter included) and the filter, which it may use to read
            less; returns a table that holds at least the matching rows.
    """

    def __init__(self, schema: pa.Schema, load: Loader) -> None:
        self._schema = schema
        self._load = load
        self.error: Exception | None = None  # DuckDB turns what `load` raises into text: kept for the caller

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def scanner(
        self, columns: Sequence[str] | None = None, filter: ds.Expression | None = None, **options: object
    ) -> ds.Scanner:
        wanted = self._schema.names if columns is None else list(columns)
        needed = list(dict.fromkeys([*wanted, *filter_columns(self._schema, filter)]))
        try:
            table = self._load(needed, filter)
        except Exception as error:
            self.error = error
            raise
        return ds.dataset(table).scanner(columns=wanted, filter=filter)


def filter_columns(schema: pa.Schema, expression: ds.Expression | None) -> list[str]:
    """The columns that `expression` reads: those without which it does not bind. pyarrow has no call that tells."""
    if expression is None:
        return []
    text = str(expression)  # names every column it reads, and perhaps others: a cheap first sieve
    return [name for name in schema.names if name in text and not binds(schema, expression, without={name})]


def binds(schema: pa.Schema, expression: ds.Expression, without: set[str]) -> bool:
    """Whether `expression` can be evaluated on `schema` with the columns `without` left out."""
    rest = pa.schema([field for field in schema if field.name not in without])
    try:
        ds.dataset(rest.empty_table()).scanner(filter=expression)
    except pa.ArrowInvalid:
        return False
    return True
