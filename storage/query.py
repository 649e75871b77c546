"""SQL over a snapshot: the tables samples, rejects, shards and units, through DuckDB.

A query can read these tables and nothing else: one SELECT, no files, no network, no extensions, no settings. DuckDB
never opens a file itself; it is handed Arrow data, and pushes the columns and filters it needs down to where they are
read, so token ids and texts cost nothing to a query that does not ask for them.
"""

from __future__ import annotations

import os
from functools import cache

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from storage.dataset import Dataset
from storage.lazy_table import LazyTable
from storage.sample_table import iter_samples
from storage.snapshot import Snapshot
from storage.types import REJECTS_SCHEMA, SAMPLES_SCHEMA

SHARDS_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string()),
        pa.field("unit", pa.int64()),  # null for a shard that compact merged from several units
        pa.field("units", pa.list_(pa.int64())),
        pa.field("version", pa.int64()),  # of the log entry that made it visible
        pa.field("size", pa.int64()),
        pa.field("digest", pa.string()),
        pa.field("num_samples", pa.int64()),
        pa.field("rows", pa.int64()),
        pa.field("raw_bytes", pa.int64()),
        pa.field("shard_format", pa.string()),
        pa.field("codec", pa.string()),
    ]
)

UNITS_SCHEMA = pa.schema(
    [
        pa.field("unit", pa.int64()),
        pa.field("first", pa.int64()),
        pa.field("num_prompts", pa.int64()),
        pa.field("expected_samples", pa.int64()),
        pa.field("expected_bytes", pa.int64()),
        pa.field("status", pa.string()),  # "pending", "committed" or "expired"
        pa.field("version", pa.int64()),  # of the log entry that made it so
        pa.field("num_samples", pa.int64()),
        pa.field("num_rejects", pa.int64()),
        pa.field("num_tokens", pa.int64()),
        pa.field("raw_bytes", pa.int64()),
        pa.field("writer", pa.string()),
        pa.field("time", pa.timestamp("us", tz="UTC")),
        pa.field("info", pa.string()),  # JSON: what the committer recorded about itself
    ]
)

_SANDBOX: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",  # nothing spills to disk: a query that outgrows memory fails instead
}


class QueryError(ValueError):
    """The query is not a single SELECT over the tables, or DuckDB refuses it."""


def query(source: Snapshot | str | os.PathLike[str], sql: str, version: int | None = None) -> pa.Table:
    """Runs one SELECT over a snapshot.

    Args:
        source: a snapshot, or the URI of a data set.
        sql: DuckDB's dialect, over the tables samples, rejects, shards and units.
        version: of the data set when `source` is a URI; None is the newest.

    Raises:
        QueryError: for anything but one SELECT over these tables, with DuckDB's reason.
        DamagedError: when a file that the query reads is not what the manifest says.
    """
    if isinstance(source, Snapshot):
        if version is not None and version != source.version:
            raise ValueError(f"version {version} contradicts the snapshot, which is version {source.version}")
        snapshot = source
    else:
        snapshot = Dataset.open(os.fspath(source)).snapshot(version)
    tables = {
        "samples": LazyTable(SAMPLES_SCHEMA, lambda columns, where: iter_samples(snapshot, columns, where)),
        "rejects": LazyTable(REJECTS_SCHEMA, lambda columns, where: [snapshot.rejects(columns)]),
        "shards": LazyTable(SHARDS_SCHEMA, lambda columns, where: [_shards(snapshot)]),
        "units": LazyTable(UNITS_SCHEMA, lambda columns, where: [_units(snapshot)]),
    }
    return run_sandboxed(sql, tables)


def run_sandboxed(sql: str, tables: dict[str, LazyTable]) -> pa.Table:
    """Runs one SELECT in a DuckDB that sees `tables` and can reach nothing else."""
    with _connection() as connection:
        # Temporary views: they belong to this connection and go with it.
        for name, table in tables.items():
            connection.register(name, table)
        try:
            statements = connection.extract_statements(sql)
            kinds = [statement.type for statement in statements]
            if kinds != [duckdb.StatementType.SELECT]:
                found = ", ".join(kind.name for kind in kinds) or "nothing"
                raise QueryError(f"a query is one SELECT statement, this is {found}: the tables are read-only")
            return connection.sql(statements[0]).to_arrow_table()
        except duckdb.Error as error:
            for table in tables.values():
                if table.error is not None:
                    raise table.error from error
            raise QueryError(str(error)) from error


def _connection() -> duckdb.DuckDBPyConnection:
    """A new connection to this process's empty database: making a database takes longer than most queries."""
    return _database(os.getpid()).cursor()


@cache
def _database(process_id: int) -> duckdb.DuckDBPyConnection:
    # By process: a fork does not inherit the database's threads.
    database = duckdb.connect(":memory:", config=_SANDBOX)
    database.execute("SET lock_configuration = true")
    return database


def _shards(snapshot: Snapshot) -> pa.Table:
    files = snapshot.files_table()
    files = files.filter(pc.equal(files["kind"], "shard"))
    is_single = pc.equal(pc.list_value_length(files["units"]), 1)
    first = pc.list_element(files["units"], 0) if files.num_rows else pa.chunked_array([], pa.int64())
    unit = pc.if_else(is_single, first, pa.scalar(None, pa.int64()))
    return files.append_column("unit", unit).select(SHARDS_SCHEMA.names).cast(SHARDS_SCHEMA)


def _units(snapshot: Snapshot) -> pa.Table:
    return snapshot.units_table().select(UNITS_SCHEMA.names).cast(UNITS_SCHEMA)
