"""A table that is read when a query asks for it, a part at a time, and only the columns and rows that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.dataset as ds

Loader = Callable[[list[str], "ds.Expression | None"], Iterable[pa.Table]]


class LazyTable(ds.Dataset):
    """An Arrow data set for DuckDB, which calls `scanner` with the columns and filters it pushes down.

    DuckDB recognises any subclass of `pyarrow.dataset.Dataset` by its type and uses only `schema`, `scanner` and the
    scanner's `to_reader`; it takes a pushed filter for applied, so it is applied here whatever the loader did with it.

    Args:
        schema: of the whole table.
        load: called with the columns needed (those of the filter included) and the filter, which it may use to read
            less; gives tables that together hold at least the matching rows.
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
    ) -> Scan:
        names = self._schema.names if columns is None else list(columns)
        schema = pa.schema([self._schema.field(name) for name in names])
        return Scan(schema, self._batches(schema, filter))

    def _batches(self, schema: pa.Schema, filter: ds.Expression | None) -> Iterator[pa.RecordBatch]:
        needed = list(dict.fromkeys([*schema.names, *filter_columns(self._schema, filter)]))
        try:
            for table in self._load(needed, filter):
                found = table if filter is None else table.filter(filter)
                yield from found.select(schema.names).cast(schema).to_batches()
        except Exception as error:
            self.error = error
            raise


@dataclass(frozen=True)
class Scan:
    """What DuckDB takes for a scanner. It reads in the thread that asks.

    pyarrow's own scanner asks from a thread of Arrow's pool. What is loaded here uses that pool too, and with as few
    threads as cores both would wait for each other for ever.
    """

    projected_schema: pa.Schema
    batches: Iterator[pa.RecordBatch]

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self.batches)


def filter_columns(schema: pa.Schema, expression: ds.Expression | None) -> list[str]:
    """The columns that `expression` reads: those without which it does not bind. pyarrow has no call that tells."""
    if expression is None:
        return []
    text = str(expression)  # names every column it reads, and perhaps others: a cheap first sieve
    return [name for name in schema.names if name in text and not binds(schema, expression, without={name})]


def binds(schema: pa.Schema, expression: ds.Expression, without: Set[str]) -> bool:
    """Whether `expression` can be evaluated on `schema` with the columns `without` left out."""
    rest = pa.schema([field for field in schema if field.name not in without])
    try:
        ds.dataset(rest.empty_table()).scanner(filter=expression)
    except pa.ArrowInvalid:
        return False
    return True
