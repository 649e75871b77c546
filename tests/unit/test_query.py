"""SQL over a snapshot: right answers, nothing but the tables, no column read for nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from sample_data import Content, build, commit_units, create
from typer.testing import CliRunner

from storage import sample_index, sample_table
from storage.dataset import Dataset
from storage.errors import DamagedError
from storage.lazy_table import LazyTable, filter_columns
from storage.query import QueryError, query, run_sandboxed
from storage.sample_table import load_narrow, try_update_index, update_index
from storage.snapshot import Snapshot
from storage.types import SAMPLES_SCHEMA, SampleKey

LENGTHS = [2, 3, 9, 30, 17, 5, 40, 2, 11, 23]


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Content:
    return build(tmp_path_factory.mktemp("data"), LENGTHS, order=[1, 0, 2], rejected={3: "too_long", 8: "empty"})


def rows(content: Content, sql: str) -> list[dict]:
    return query(content.dataset.snapshot(), sql).to_pylist()


def test_samples(content):
    assert rows(content, "SELECT count(*) AS n, sum(num_tokens)::BIGINT AS t FROM samples") == [
        {"n": 8, "t": sum(LENGTHS) - 30 - 11}
    ]
    found = rows(content, "SELECT row, text, token_ids FROM samples WHERE finish_reason = 'length' ORDER BY row")
    assert [(row["row"], row["text"]) for row in found] == [(0, "answer 0"), (5, "answer 5")]
    assert found[1]["token_ids"] == content.token_ids[SampleKey(5, 0, 0)]
    by_category = "SELECT category, count(*) n, max(num_tokens) m FROM samples GROUP BY ALL ORDER BY 1"
    assert rows(content, by_category) == [{"category": "even", "n": 4, "m": 40}, {"category": "odd", "n": 4, "m": 23}]


def test_the_other_tables_and_joins(content):
    assert rows(content, "SELECT row, unit, reason FROM rejects ORDER BY row") == [
        {"row": 3, "unit": 0, "reason": "too_long"},
        {"row": 8, "unit": 2, "reason": "empty"},
    ]
    joined = """SELECT u.unit, u.status, u.expected_samples, u.num_rejects, count(*) samples, any_value(s.codec) codec
                FROM units u JOIN samples USING (unit) JOIN shards s ON s.path = shard GROUP BY ALL ORDER BY u.unit"""
    assert rows(content, joined) == [
        {"unit": 0, "status": "committed", "expected_samples": 4, "num_rejects": 1, "samples": 3, "codec": "none"},
        {"unit": 1, "status": "committed", "expected_samples": 4, "num_rejects": 0, "samples": 4, "codec": "none"},
        {"unit": 2, "status": "committed", "expected_samples": 2, "num_rejects": 1, "samples": 1, "codec": "none"},
    ]
    assert [row["unit"] for row in rows(content, "SELECT unit FROM shards ORDER BY version")] == [1, 0, 2]
    assert [row["column_name"] for row in rows(content, "DESCRIBE samples")] == SAMPLES_SCHEMA.names


def test_versions(content):
    uri = content.dataset.uri
    assert query(uri, "SELECT count(*) n FROM samples", version=1)["n"].to_pylist() == [4]
    assert query(uri, "SELECT count(*) n FROM units WHERE status = 'pending'", version=1)["n"].to_pylist() == [2]
    assert query(uri, "SELECT count(*) n FROM samples", version=0)["n"].to_pylist() == [0]
    assert query(uri, "SELECT * FROM shards", version=0).num_rows == 0
    with pytest.raises(ValueError, match="no version 99"):
        query(uri, "SELECT 1", version=99)
    with pytest.raises(ValueError, match="contradicts"):
        query(content.dataset.snapshot(), "SELECT 1", version=1)


REFUSED = {
    "COPY": "COPY samples TO '{file}'",
    "COPY FROM": "COPY samples FROM '{file}'",
    "EXPORT": "EXPORT DATABASE '{file}'",
    "IMPORT": "IMPORT DATABASE '{file}'",
    "ATTACH": "ATTACH '{file}' AS other",
    "INSTALL": "INSTALL httpfs",
    "LOAD": "LOAD httpfs",
    "read_csv": "SELECT * FROM read_csv('{file}')",
    "read_text": "SELECT * FROM read_text('{file}')",
    "read_blob": "SELECT * FROM read_blob('{file}')",
    "read_json": "SELECT * FROM read_json('{file}')",
    "read_parquet": "SELECT * FROM read_parquet('{file}')",
    "parquet_metadata": "SELECT * FROM parquet_metadata('{file}')",
    "sniff_csv": "SELECT * FROM sniff_csv('{file}')",
    "glob": "SELECT * FROM glob('{file}*')",
    "file name as a table": "SELECT * FROM '{file}'",
    "http": "SELECT * FROM read_csv('http://127.0.0.1:9/x.csv')",
    "s3": "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
    "secrets": "SELECT * FROM duckdb_secrets()",
    "CREATE SECRET": "CREATE SECRET s (TYPE s3, KEY_ID 'a', SECRET 'b')",
    "SET": "SET enable_external_access = true",
    "SET lock": "SET lock_configuration = false",
    "PRAGMA": "PRAGMA enable_object_cache",
    "CALL": "CALL pragma_version()",
    "CREATE TABLE": "CREATE TABLE x AS SELECT 1",
    "CREATE VIEW": "CREATE OR REPLACE VIEW samples AS SELECT 1",
    "CREATE MACRO": "CREATE MACRO f(a) AS a",
    "INSERT": "INSERT INTO samples SELECT * FROM samples",
    "UPDATE": "UPDATE samples SET row = 1",
    "DELETE": "DELETE FROM samples",
    "DROP": "DROP VIEW samples",
    "ALTER": "ALTER TABLE samples ADD COLUMN x INT",
    "EXPLAIN ANALYZE": "EXPLAIN ANALYZE CREATE TABLE x AS SELECT 1",
    "two statements": "SELECT 1; SELECT 2",
    "hidden second statement": "SELECT 1; COPY samples TO '{file}'",
    "nothing": "",
    "syntax": "SELEKT 1",
    "unknown table": "SELECT * FROM secrets",
    "python variable": "SELECT * FROM python_table",
    "query()": "SELECT * FROM query('COPY samples TO ''{file}''')",
}


@pytest.mark.parametrize("name", REFUSED)
def test_sql_reaches_nothing_but_the_tables(content, tmp_path, name):
    python_table = pa.table({"a": [1]})
    file = tmp_path / "secret.csv"
    file.write_text("a\n1\n")
    with pytest.raises(QueryError):
        query(content.dataset.snapshot(), REFUSED[name].format(file=file))
    assert file.read_text() == "a\n1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]
    assert python_table.num_rows == 1


def test_a_query_after_a_refused_one_still_sees_the_tables(content):
    with pytest.raises(QueryError, match="read-only"):
        query(content.dataset.snapshot(), "DELETE FROM samples")
    assert query(content.dataset.snapshot(), "SELECT count(*) n FROM samples")["n"].to_pylist() == [8]


def test_only_what_a_query_uses_is_read(content, monkeypatch):
    asked: list[tuple[str, ...]] = []
    original = Snapshot.iter_samples

    def iter_samples(self, columns=None, units=None, keys=None):
        asked.append(tuple(columns))
        return original(self, columns, units, keys)

    monkeypatch.setattr(Snapshot, "iter_samples", iter_samples)
    assert rows(content, "SELECT sum(num_tokens)::INT t FROM samples WHERE category = 'odd' AND turn = 0") == [
        {"t": 3 + 5 + 2 + 23}
    ]
    assert set(asked[0]) == {"num_tokens", "category", "turn"}
    asked.clear()
    rows(content, "SELECT count(*) FROM samples")
    assert len(asked[0]) == 1


def test_wide_columns_are_fetched_for_matching_rows_only(content, monkeypatch):
    opened: list[str] = []
    original = Snapshot.read_file

    def read_file(self, entry, columns=None, rows=None):
        if "token_ids" in columns:
            opened.append(entry.path)
        return original(self, entry, columns, rows)

    monkeypatch.setattr(Snapshot, "read_file", read_file)
    found = rows(content, "SELECT token_ids FROM samples WHERE row = 5 AND turn = 0 AND n = 0")
    assert found == [{"token_ids": content.token_ids[SampleKey(5, 0, 0)]}]
    assert len(opened) == 1
    opened.clear()
    assert len(rows(content, "SELECT row FROM samples WHERE len(token_ids) = 40")) == 1
    assert len(opened) == 3


@pytest.fixture
def one_arrow_thread():
    cpus = pa.cpu_count()
    pa.set_cpu_count(1)
    yield
    pa.set_cpu_count(cpus)


@pytest.mark.usefixtures("one_arrow_thread")
def test_a_wide_query_streams_file_by_file(tmp_path, monkeypatch):
    """What is read ahead is a few files, not the table: a query that stops early has opened no more.

    With one thread in Arrow's pool: a reader that waits in it for files that it has to read would never end.
    """
    lengths = [3] * 400
    content = build(tmp_path, lengths)
    snapshot = content.dataset.snapshot()
    opened: list[str] = []
    original = Snapshot.read_file

    def read_file(self, entry, columns=None, rows=None):
        opened.append(entry.path)
        return original(self, entry, columns, rows)

    monkeypatch.setattr(Snapshot, "read_file", read_file)
    assert len(list(zip(range(3), snapshot.iter_samples(), strict=False))) == 3
    assert len(opened) <= 3 + 2 * 8
    opened.clear()
    assert query(snapshot, "SELECT text, token_ids FROM samples LIMIT 1").num_rows == 1
    assert len(opened) < 60  # DuckDB asks for a block of rows
    opened.clear()
    whole = query(snapshot, "SELECT sum(length(text))::INT t, sum(len(token_ids))::INT n FROM samples").to_pylist()
    assert whole == [{"t": sum(len(f"answer {row}") for row in range(400)), "n": 1200}]
    assert len(opened) == 100


def test_queries_side_by_side_see_their_own_snapshots(content):
    """All queries of a process share one empty database, and nothing in it."""
    snapshots = [content.dataset.snapshot(version) for version in range(4)]

    def count(version: int) -> int:
        return query(snapshots[version], "SELECT count(*)::INT n FROM samples")["n"].to_pylist()[0]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(count, [0, 1, 2, 3] * 5)) == [0, 4, 7, 8] * 5
    with pytest.raises(QueryError, match="nothing does not exist"):
        query(snapshots[0], "SELECT * FROM nothing")


FILTERS = [
    "row = 5",
    "row IN (1, 5, 7)",
    "row BETWEEN 2 AND 6 AND category = 'even'",
    "category <> 'odd' OR num_tokens > 20",
    "reasoning_text IS NULL",
    "text LIKE 'answer _' AND turn = 0",
    "stop_reason IS NOT NULL",
    "started_at < TIMESTAMP '2020-01-01'",
    "len(token_ids) > 8 AND finish_reason = 'stop'",
    "NOT (row = 5 OR row = 6)",
]


@pytest.mark.parametrize("where", FILTERS)
@pytest.mark.parametrize("columns", ["row, text", "count(*)::INT c, sum(row)::INT s", "*"])
def test_pushed_filters_give_the_answers_of_a_plain_table(content, where, columns):
    snapshot = content.dataset.snapshot()
    sql = f"SELECT {columns} FROM samples WHERE {where} ORDER BY ALL"
    plain = LazyTable(SAMPLES_SCHEMA, lambda names, _: [snapshot.samples(names)])
    assert query(snapshot, sql).to_pylist() == run_sandboxed(sql, {"samples": plain}).to_pylist()


def test_the_columns_of_a_filter():
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.int64())])
    assert filter_columns(schema, (ds.field("a") > 1) & ds.field("b").is_null()) == ["a", "b"]
    assert filter_columns(schema, None) == []


def test_a_damaged_file_is_named_not_a_query_error(tmp_path):
    content = build(tmp_path, LENGTHS)
    path = next((tmp_path / "samples").iterdir())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.chmod(0o644)
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedError, match=path.name):
        query(content.dataset.uri, "SELECT sum(num_tokens) FROM samples")


class TestIndex:
    """The narrow columns of many sample files in one."""

    SQL = "SELECT * EXCLUDE (token_ids, loss_spans, text, reasoning_text) FROM samples ORDER BY row"

    def answers(self, snapshot: Snapshot) -> list[dict]:
        return query(snapshot, self.SQL).to_pylist()

    def test_gives_the_answers_of_the_files_at_every_version(self, tmp_path):
        content = create(tmp_path, LENGTHS)
        uri = content.dataset.uri
        for unit in (2, 0):
            commit_units(content, LENGTHS, [unit])
        assert len(update_index(content.dataset.snapshot())) == 1
        assert update_index(content.dataset.snapshot()) == []
        commit_units(content, LENGTHS, [1])  # not in an index
        content.dataset.delete([SampleKey(8, 0, 0), SampleKey(5, 0, 0)])
        content.dataset.expire([0])
        for version in range(content.dataset.snapshot().version + 1):
            snapshot = Dataset.open(uri).snapshot(version)
            expected = snapshot.samples().drop_columns(["token_ids", "loss_spans", "text", "reasoning_text"])
            assert self.answers(snapshot) == expected.sort_by("row").to_pylist()
            table = load_narrow(snapshot, ["unit", "row", "checksum"])
            assert table.to_pylist() == snapshot.samples(["unit", "row", "checksum"]).to_pylist()

    def test_covered_files_are_not_opened(self, tmp_path, monkeypatch):
        content = build(tmp_path, LENGTHS)
        snapshot = content.dataset.snapshot()
        expected = self.answers(snapshot)
        assert len(expected) == len(LENGTHS)
        update_index(content.dataset.snapshot())
        monkeypatch.setattr(Snapshot, "read_file", lambda *_: pytest.fail("a sample file was opened"))
        assert self.answers(snapshot) == expected
        assert self.answers(Dataset.open(content.dataset.uri).snapshot()) == expected

    @pytest.mark.parametrize("position", [0, 9, 25, 200, -1])
    def test_a_damaged_index_is_passed_over_with_a_warning(self, tmp_path, caplog, position):
        content = build(tmp_path, LENGTHS)
        path = tmp_path / update_index(content.dataset.snapshot())[0]
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.chmod(0o644)
        path.write_bytes(bytes(data))
        assert len(self.answers(Dataset.open(content.dataset.uri).snapshot())) == len(LENGTHS)
        assert path.name in caplog.text

    def test_a_damaged_index_is_replaced_by_a_fresh_one(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sample_table, "MAX_INDEX_FILES", 2)
        content = build(tmp_path, LENGTHS)
        paths = update_index(content.dataset.snapshot())
        assert len(paths) == 2
        (tmp_path / paths[0]).chmod(0o644)
        (tmp_path / paths[0]).write_bytes(b"")
        commit = Dataset.open(content.dataset.uri)
        commit.delete([SampleKey(0, 0, 0)])
        assert len(update_index(commit.snapshot())) == 1
        monkeypatch.setattr(Snapshot, "read_file", lambda *_: pytest.fail("a sample file was opened"))
        assert len(self.answers(Dataset.open(content.dataset.uri).snapshot())) == len(LENGTHS) - 1

    def test_a_committer_is_only_warned(self, tmp_path, monkeypatch, caplog):
        content = build(tmp_path, LENGTHS)
        assert try_update_index(content.dataset.snapshot())
        other = build(tmp_path / "other", LENGTHS)
        path = next((tmp_path / "other" / "samples").iterdir())
        path.chmod(0o644)
        path.write_bytes(b"x")
        assert not try_update_index(other.dataset.snapshot())
        assert path.name in caplog.text
        newer = build(tmp_path / "newer", LENGTHS)
        monkeypatch.setattr(sample_index, "SCHEMA", sample_index.SCHEMA + 1)
        update_index(newer.dataset.snapshot())
        monkeypatch.undo()
        assert not try_update_index(Dataset.open(tmp_path / "newer").snapshot())
        assert f"schema version {sample_index.SCHEMA + 1}" in caplog.text

    def test_a_newer_index_is_refused_by_name(self, tmp_path, monkeypatch):
        content = build(tmp_path, LENGTHS)
        monkeypatch.setattr(sample_index, "SCHEMA", sample_index.SCHEMA + 1)
        path = tmp_path / update_index(content.dataset.snapshot())[0]
        monkeypatch.undo()
        known = sample_index.SCHEMA
        with pytest.raises(ValueError, match=rf"{path.name}: schema version {known + 1}, this code knows {known}"):
            self.answers(Dataset.open(content.dataset.uri).snapshot())

    def test_a_flipped_version_is_damage(self, tmp_path, caplog):
        content = build(tmp_path, LENGTHS)
        path = tmp_path / update_index(content.dataset.snapshot())[0]
        data = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(data.replace(b" index 2 ", b" index 3 ", 1))
        self.answers(Dataset.open(content.dataset.uri).snapshot())
        assert path.name in caplog.text

    def test_a_replaced_sample_file_is_not_taken_from_the_index(self, tmp_path, monkeypatch):
        content = build(tmp_path, LENGTHS)
        snapshot = content.dataset.snapshot()
        update_index(snapshot)
        index = sample_table._indexes(content.dataset).get()[0]
        path = next(iter(index.files))
        index.files[path] = "0" * 64
        opened: list[str] = []
        original = Snapshot.read_file

        def read_file(self, entry, columns=None, rows=None):
            opened.append(entry.path)
            return original(self, entry, columns, rows)

        monkeypatch.setattr(Snapshot, "read_file", read_file)
        assert len(self.answers(snapshot)) == len(LENGTHS)
        assert opened == [path]


class TestCommand:
    """`headrace query`."""

    @staticmethod
    def run(*arguments: str):
        import typer

        from ray_jobs.commands.query import command

        app = typer.Typer()
        app.command()(command)
        return CliRunner().invoke(app, list(arguments))

    def test_a_table_shows_a_bounded_number_of_rows(self, content):
        result = self.run(content.dataset.uri, "SELECT row, text FROM samples ORDER BY row", "--rows", "3")
        assert result.exit_code == 0
        assert "answer 2" in result.stdout
        assert "answer 4" not in result.stdout
        assert "3 of 8 rows shown, 5 left out" in result.stdout

    def test_json(self, content):
        sql = "SELECT row, started_at, loss_spans, 'nan'::DOUBLE x, 1.5::DECIMAL(4,2) d FROM samples WHERE row = 2"
        result = self.run(content.dataset.uri, sql, "--json")
        assert json.loads(result.stdout) == [
            {
                "row": 2,
                "started_at": "1970-01-01T00:00:01+00:00",
                "loss_spans": [{"start": 4, "end": 9}],
                "x": None,
                "d": 1.5,
            }
        ]
        assert json.loads(self.run(content.dataset.uri, "SELECT 1 a WHERE false", "--format", "json").stdout) == []

    def test_csv(self, content, tmp_path):
        output = tmp_path / "deep" / "answer.csv"
        sql = "SELECT row, token_ids, 'a,\"b\"' q FROM samples WHERE row = 0"
        result = self.run(content.dataset.uri, sql, "--format", "csv", "--output", str(output))
        assert result.exit_code == 0
        table = pyarrow.csv.read_csv(output)
        assert table["q"].to_pylist() == ['a,"b"']
        assert json.loads(table["token_ids"].to_pylist()[0]) == content.token_ids[SampleKey(0, 0, 0)]

    def test_parquet(self, content, tmp_path):
        output = tmp_path / "answer.parquet"
        sql = "SELECT row, token_ids FROM samples ORDER BY row"
        assert self.run(content.dataset.uri, sql, "--format", "parquet", "--output", str(output)).exit_code == 0
        assert pq.read_table(output).to_pylist() == rows(content, sql)
        assert [path.name for path in tmp_path.iterdir()] == ["answer.parquet"]

    def test_what_is_wrong_is_a_value_error_for_exit_code_2(self, content, tmp_path):
        assert isinstance(self.run(content.dataset.uri, "SELECT", "--json").exception, QueryError)
        assert isinstance(self.run(str(Path(tmp_path) / "none"), "SELECT 1").exception, FileNotFoundError)
        result = self.run(content.dataset.uri, "SELECT 1", "--format", "parquet")
        assert isinstance(result.exception, ValueError)
        assert "--output" in str(result.exception)
