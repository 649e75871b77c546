"""Identity, units, commits, accounting and time travel, on a local disk and on S3."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from s3_server import S3Server, s3_server
from storage_helpers import SPEC, create, files_below, identity, keys_of, plan, sample, states, write_opaque, write_real

from storage import (
    SAMPLES_SCHEMA,
    CompleteError,
    DamagedError,
    Dataset,
    FencedError,
    IdentityError,
    Receipt,
    Reject,
    SampleKey,
    SchemaError,
    StateSpec,
    StoreError,
    UnitFiles,
    UnitPlan,
)
from storage.dataset import _seal
from storage.shards import open_shard_writer
from storage.status import status


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(params=["local", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> str:
    server.faults.clear()
    return str(tmp_path / "data") if request.param == "local" else server.new_uri()


def test_creating_again_with_the_same_identity_opens_it(uri: str) -> None:
    first, second = create(uri), create(uri)
    assert first.identity == second.identity == Dataset.open(uri).identity
    assert second.units == plan(4)
    assert second.snapshot().version == 0
    assert first.identity.units_digest


def test_another_identity_is_refused_naming_each_field(tmp_path: Path) -> None:
    create(tmp_path)
    other = identity(
        verifier={
            "name": "tiny",
            "revision": "r2",
            "weights_digest": "ab" * 32,
            "num_layers": 4,
            "quantization": "int4",
        },
        states=StateSpec((1, 2), 16),
        prompts={"digest": "01" * 32, "seed": 8},
    )
    with pytest.raises(IdentityError) as caught:
        Dataset.create(tmp_path, other, plan(3))
    message = str(caught.value)
    for line in (
        "verifier.revision: 'r1' in the data set, 'r2' now",
        "verifier.quantization: absent in the data set, 'int4' now",
        "states.layer_ids: [1, 3] in the data set, [1, 2] now",
        "prompts.seed: 7 in the data set, 8 now",
        "units_digest: ",
    ):
        assert line in message
    for same in ("weights_digest", "hidden_size", "sampling", "tokenizer", "codec"):
        assert same not in message


def test_identity_takes_only_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sampling"):
        identity(sampling={"temperature": float("nan")})
    with pytest.raises(ValueError, match="mode 'guess'"):
        identity(mode="guess")
    assert identity(sampling={"stop": ("a", "b")}) == identity(sampling={"stop": ["a", "b"]})


@pytest.mark.parametrize(
    "units",
    [
        [UnitPlan(1, 0, 1, 1)],
        [UnitPlan(0, 0, 2, 2), UnitPlan(1, 1, 1, 1)],
        [UnitPlan(0, 0, 0, 0)],
    ],
)
def test_bad_unit_plans_are_refused(tmp_path: Path, units: list[UnitPlan]) -> None:
    with pytest.raises(ValueError, match="UnitPlan"):
        Dataset.create(tmp_path, identity(), units)


def test_no_data_set(uri: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no data set at .*dataset\.json"):
        Dataset.open(uri)


def test_a_newer_data_set_is_refused_by_name(tmp_path: Path) -> None:
    create(tmp_path)
    file = tmp_path / "dataset.json"
    import json

    content = json.loads(file.read_text())
    del content["digest"]
    file.write_bytes(_seal({**content, "schema": 2}))
    with pytest.raises(SchemaError, match=r"dataset\.json: schema version 2, this code knows 1"):
        Dataset.open(tmp_path)


def test_the_log_belongs_to_its_dataset_json(tmp_path: Path) -> None:
    for name in ("a", "b"):
        dataset = create(tmp_path / name)
        dataset.writer().commit([write_opaque(dataset.writer(), 0)], {})
    (tmp_path / "b/dataset.json").replace(tmp_path / "a/dataset.json")
    with pytest.raises(DamagedError, match=r"0001\.json: its predecessor's digest"):
        Dataset.open(tmp_path / "a").snapshot()


def test_a_unit_is_invisible_until_its_commit(uri: str) -> None:
    dataset = create(uri)
    writer = dataset.writer()
    files = write_opaque(writer, 1, rejected=[SampleKey(4, 0, 0)])
    before = dataset.snapshot()
    assert before.samples().num_rows == before.rejects().num_rows == len(before.files()) == 0
    assert before.pending_units() == [0, 1, 2, 3]
    result = writer.commit([files], {"engine": "vllm 0.32"})
    assert (result.version, result.accepted, result.dropped) == (1, [1], [])
    after = Dataset.open(uri).snapshot()
    assert after.pending_units() == [0, 2, 3]
    assert after.unit_states() == {1: "committed"}
    assert after.samples(columns=["row", "unit"]).to_pylist() == [{"row": 3, "unit": 1}, {"row": 5, "unit": 1}]
    assert after.samples().schema.equals(SAMPLES_SCHEMA, check_metadata=True)
    assert [(r["row"], r["reason"]) for r in after.rejects().to_pylist()] == [(4, "test")]
    assert {f.kind: (f.unit, f.version) for f in after.files()} == dict.fromkeys(
        ("shard", "samples", "rejects"), (1, 1)
    )
    assert before.samples().num_rows == 0  # a snapshot does not move
    info = after.units_table().to_pylist()[1]
    assert (info["status"], info["info"], info["num_samples"]) == ("committed", '{"engine": "vllm 0.32"}', 2)


def test_every_field_of_a_sample_is_stored(tmp_path: Path) -> None:
    dataset = create(tmp_path, 1, 1)
    writer = dataset.writer("w")
    key = SampleKey(0, 0, 0)
    files = write_opaque(writer, 0)
    made = sample(key, 0, Receipt(key, files.files[0].path, 60, 90, 2, "cafe"))
    made = replace(
        made,
        token_ids=[5, 6, 7],
        num_prompt_tokens=1,
        loss_spans=[(1, 2), (2, 3)],
        reasoning_text="because",
        stop_reason="</s>",
        category="math",
        seed=2**40,
        replica="r3",
        started_at=1_700_000_000.5,
        finished_at=1_700_000_001.25,
    )
    writer.commit([writer.write_unit(0, 1, [made], [], [files.files[0]])], {})
    row = dataset.snapshot().samples().to_pylist()[0]
    assert {
        name: row[name] for name in ("num_tokens", "num_prompt_tokens", "num_output_tokens", "num_loss_tokens")
    } == {
        "num_tokens": 3,
        "num_prompt_tokens": 1,
        "num_output_tokens": 2,
        "num_loss_tokens": 2,
    }
    assert row["token_ids"] == [5, 6, 7]
    assert row["loss_spans"] == [{"start": 1, "end": 2}, {"start": 2, "end": 3}]
    assert (row["reasoning_text"], row["stop_reason"], row["category"], row["replica"]) == (
        "because",
        "</s>",
        "math",
        "r3",
    )
    assert (row["seed"], row["offset"], row["nbytes"], row["rows"], row["checksum"]) == (2**40, 60, 90, 2, "cafe")
    assert row["started_at"].timestamp() == 1_700_000_000.5


def test_replayed_units_are_dropped(uri: str) -> None:
    dataset = create(uri)
    first, ghost = dataset.writer(), Dataset.open(uri).writer()
    ghost_files = [write_opaque(ghost, unit) for unit in (0, 1)]
    first.commit([write_opaque(first, 0)], {})
    result = ghost.commit([UnitFiles.from_json(unit.to_json()) for unit in ghost_files], {})
    assert (result.version, result.accepted, result.dropped) == (2, [1], [0])
    again = ghost.commit(ghost_files, {})
    assert (again.version, again.accepted, again.dropped) == (None, [], [0, 1])
    snapshot = dataset.snapshot()
    assert snapshot.version == 2
    assert snapshot.samples(columns=["row"])["row"].to_pylist() == [0, 1, 2, 3, 4, 5]
    twice = first.commit([write_opaque(first, 2), write_opaque(first, 2, 1)], {})
    assert (twice.accepted, twice.dropped) == ([2], [2])


def test_accounting_balances_at_every_version(uri: str) -> None:
    dataset = create(uri)
    writer = dataset.writer()
    writer.commit([write_opaque(writer, 0, rejected=[SampleKey(1, 0, 0)])], {})
    writer.commit([write_opaque(writer, 1), write_opaque(writer, 2, rejected=keys_of(dataset, 2))], {})
    dataset.delete([SampleKey(3, 0, 0), SampleKey(0, 0, 0)])
    dataset.expire([0])
    writer.commit([write_opaque(writer, 3)], {})
    dataset.complete()
    found = []
    for version in range(dataset.snapshot().version + 1):
        snapshot = Dataset.open(uri).snapshot(version)
        a = snapshot.accounting()
        assert a.balances
        assert a.samples == snapshot.samples().num_rows
        assert a.rejects == snapshot.rejects().num_rows
        found.append((a.samples, a.rejects, a.expired, a.pending, a.deleted, snapshot.is_complete))
    assert found == [
        (0, 0, 0, 12, 0, False),
        (2, 1, 0, 9, 0, False),
        (5, 4, 0, 3, 0, False),
        (3, 4, 0, 3, 2, False),
        (2, 3, 3, 3, 1, False),
        (5, 3, 3, 0, 1, False),
        (5, 3, 3, 0, 1, True),
    ]


def test_versions_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    for version in (-1, 1, 99):
        with pytest.raises(ValueError, match=f"has no version {version}; the newest is 0"):
            dataset.snapshot(version)


def test_a_complete_data_set_is_closed(uri: str) -> None:
    dataset = create(uri, 2)
    writer = dataset.writer()
    writer.commit([write_opaque(writer, 0)], {})
    with pytest.raises(ValueError, match=r"1 of 2 units are pending, the first \[1\]"):
        dataset.complete()
    late = write_opaque(writer, 1)
    writer.commit([late], {})
    assert dataset.complete() == dataset.complete() == Dataset.open(uri).complete() == 3
    with pytest.raises(CompleteError, match="completed at version 3"):
        Dataset.open(uri).append("commit", lambda manifest: {"units": [late.to_json()], "info": {}})


def test_a_late_commit_to_a_complete_data_set_is_dropped(uri: str) -> None:
    """An old driver that woke up after another one had finished the data set: a duplicate like any other."""
    dataset, old = create(uri, 2), Dataset.open(uri)
    old_writer = old.writer()
    late = [write_opaque(old_writer, unit) for unit in range(2)]
    writer = dataset.writer()
    writer.commit([write_opaque(writer, unit) for unit in range(2)], {})
    dataset.complete()
    result = old_writer.commit(late, {})
    assert (result.version, result.accepted, result.dropped) == (None, [], [0, 1])
    assert old.complete() == dataset.snapshot().version == 2


def test_what_nobody_was_given_to_commit_can_be_discarded(uri: str) -> None:
    dataset = create(uri, 2)
    writer = dataset.writer()
    with open_shard_writer(writer.shard_target(0, 0, target_bytes=1)) as shard_writer:
        for key in keys_of(dataset, 0):
            shard_writer.add(key, states(key, 2))
        shards = shard_writer.close()
    assert len(shards) == len(list(dataset.store.list("shards"))) == 3
    stranger = dataset.writer()
    with pytest.raises(ValueError, match=f"{shards[0].path} is not named after writer {stranger.id}"):
        stranger.discard(shards)
    assert len(list(dataset.store.list("shards"))) == 3
    dataset.store.delete(shards[1].path)
    writer.discard(shards)
    assert list(dataset.store.list("shards")) == []
    writer.discard(shards)  # again: gone is gone


def test_a_unit_that_cannot_be_written_leaves_no_table(tmp_path: Path) -> None:
    dataset = create(tmp_path, 1)
    writer = dataset.writer()
    (tmp_path / "rejects").write_bytes(b"a file where the folder should be")
    before = set(files_below(tmp_path))
    with pytest.raises(StoreError, match="rejects/u00000000"):
        write_opaque(writer, 0, rejected=keys_of(dataset, 0)[:1])
    assert {path.parent.name for path in set(files_below(tmp_path)) - before} == {"shards"}


def test_what_was_committed_is_never_discarded(uri: str) -> None:
    dataset = create(uri, 2)
    writer = dataset.writer()
    units = [write_opaque(writer, unit) for unit in range(2)]
    loser = write_opaque(writer, 0, 1)
    Dataset.open(uri).writer().commit(units, {})
    for unit in units:
        with pytest.raises(ValueError, match=f"{unit.files[0].path} was committed to {dataset.uri}"):
            writer.discard([*loser.files, *unit.files])
    # Expired is not forgotten: readers of the version before still read it.
    dataset.expire([1])
    with pytest.raises(ValueError, match="was committed"):
        writer.discard(units[1].files)
    assert dataset.snapshot(1).samples().num_rows == 6
    writer.discard(loser.files)  # of a unit that is visible, by other files
    stored = {info.path for folder in ("shards", "samples") for info in dataset.store.list(folder)}
    assert stored == {file.path for unit in units for file in unit.files}


def test_fenced_writers_cannot_commit(uri: str) -> None:
    dataset = create(uri)
    sleeper, replica = dataset.writer(), dataset.writer()
    files, of_replica = write_opaque(sleeper, 0), write_opaque(replica, 1)
    Dataset.open(uri).fence([sleeper.id, replica.id])
    with pytest.raises(FencedError, match=f"writer {sleeper.id} was fenced at version 1"):
        sleeper.commit([files], {})
    # The committer is alive; the writer of the files is fenced.
    with pytest.raises(FencedError, match=f"unit 1 was written by {replica.id}, fenced at version 1"):
        dataset.writer().commit([of_replica], {})
    assert dataset.snapshot().unit_states() == {}
    assert dataset.fence([sleeper.id]) == 1  # again: nothing to append


def test_expired_units_are_gone_for_good(uri: str) -> None:
    dataset = create(uri)
    writer = dataset.writer()
    again = write_opaque(writer, 0, 1)
    writer.commit([write_opaque(writer, 0), write_opaque(writer, 1)], {})
    with pytest.raises(ValueError, match=r"units \[2\] cannot expire"):
        dataset.expire([0, 2])
    assert dataset.expire([0]) == dataset.expire([0]) == 2
    snapshot = dataset.snapshot()
    assert snapshot.pending_units() == [2, 3]
    assert {file.unit for file in snapshot.files()} == {1}
    assert writer.commit([again], {}).dropped == [0]
    assert dataset.snapshot(1).samples().num_rows == 6  # an older snapshot reads on until gc


def test_deleted_samples_are_hidden(uri: str) -> None:
    dataset = create(uri)
    writer = dataset.writer()
    writer.commit([write_opaque(writer, 0), write_opaque(writer, 1)], {})
    with pytest.raises(ValueError, match=r"2 keys are no samples of .*: row 0 turn 1 n 0, row 9 turn 0 n 0"):
        dataset.delete([SampleKey(0, 0, 0), SampleKey(0, 1, 0), SampleKey(9, 0, 0)])
    assert dataset.snapshot().version == 1
    dataset.delete([SampleKey(0, 0, 0), SampleKey(4, 0, 0)])
    dataset.delete([SampleKey(0, 0, 0)])
    snapshot = dataset.snapshot()
    assert snapshot.version == 2
    assert snapshot.samples(columns=["row"])["row"].to_pylist() == [1, 2, 3, 5]
    assert snapshot.samples(columns=["text"], keys=[SampleKey(4, 0, 0)]).num_rows == 0
    assert dataset.snapshot(1).samples().num_rows == 6


def test_selections_of_the_samples_table(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    writer = dataset.writer()
    for unit in (2, 0, 3):
        writer.commit([write_opaque(writer, unit)], {})
    snapshot = dataset.snapshot()
    assert snapshot.samples(columns=["row"])["row"].to_pylist() == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert snapshot.samples(columns=["row"], units=[3, 1])["row"].to_pylist() == [9, 10, 11]
    keys = [SampleKey(7, 0, 0), SampleKey(1, 0, 0), SampleKey(4, 0, 0), SampleKey(1, 0, 1)]
    table = snapshot.samples(columns=["text", "row"], keys=keys)
    assert table.column_names == ["text", "row"]
    assert table["row"].to_pylist() == [1, 7]
    assert snapshot.samples(units=[]).num_rows == snapshot.samples(keys=[]).num_rows == 0
    with pytest.raises(ValueError, match=r"columns \['colour'\] are not in the samples table"):
        snapshot.samples(columns=["colour"])


def test_a_key_lookup_opens_only_files_that_can_hold_it(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    writer = dataset.writer()
    writer.commit([write_opaque(writer, unit) for unit in range(4)], {})
    for path in (tmp_path / "samples").glob("u0000000[023]*"):
        path.write_bytes(b"damaged")
    snapshot = dataset.snapshot()
    assert snapshot.samples(columns=["row"], keys=[SampleKey(4, 0, 0)])["row"].to_pylist() == [4]
    assert snapshot.samples(columns=["row"], units=[1]).num_rows == 3
    with pytest.raises(DamagedError, match="samples/u0000000"):
        snapshot.samples(columns=["row"])


def test_what_a_unit_must_be(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    writer = dataset.writer("w")
    files = write_real(writer, 0, 9)
    shard = next(file for file in files.files if file.kind == "shard")
    keys = keys_of(dataset, 0)
    good = [sample(key, 0, Receipt(key, shard.path, 0, 1, len(states(key, 2 + key.row % 5)), "0")) for key in keys]
    reject = Reject(keys[0], "p0", 0, "why", "")
    cases = [
        (r"unit 0: 2 samples and 0 rejects for 3 expected keys", good[:2], [], [shard]),
        (r"row 0 turn 0 n 0: comes twice in unit 0", good, [reject], [shard]),
        (r"unit 0: .* holds 3 samples of 9 rows, its receipts are 2 of 7", good[1:], [reject], [shard]),
        (r"unit 0: samples are in .*safetensors, which is not among its shards", good, [], []),
        (r"sample row 0 turn 0 n 0: 2 rows for 2 tokens", [replace(good[0], token_ids=[1, 2]), *good[1:]], [], [shard]),
        (r"row 0 turn 0 n 0: is of unit 1, not 0", [replace(good[0], unit=1), *good[1:]], [], [shard]),
    ]
    for message, samples, rejects, shards in cases:
        with pytest.raises(ValueError, match=message):
            writer.write_unit(0, 0, samples, rejects, shards)
    with pytest.raises(ValueError, match="is not named after this unit and its writer other"):
        dataset.writer("other").write_unit(0, 0, good, [], [shard])
    with pytest.raises(ValueError, match="is not named after this unit and its writer other"):
        writer.commit([replace(files, writer="other")], {})
    with pytest.raises(ValueError, match="unit 7 is not in the plan"):
        writer.write_unit(7, 0, good, [], [shard])
    with pytest.raises(ValueError, match="unit 0: 2 samples and 0 rejects for 3 expected"):
        writer.commit([replace(files, num_samples=2)], {})
    (tmp_path / shard.path).unlink()
    with pytest.raises(ValueError, match=f"unit 0: {shard.path} is not in"):
        writer.commit([files], {})
    outside = replace(files, files=(replace(shard, path="../x"),))
    with pytest.raises(ValueError, match=r"path '\.\./x'"):
        writer.commit([outside], {})
    assert dataset.snapshot().version == 0


def test_samples_files_can_be_read_by_any_parquet_tool(tmp_path: Path) -> None:
    dataset = create(tmp_path, 1, 600)
    writer = dataset.writer()
    writer.commit([write_opaque(writer, 0)], {})
    (path,) = (tmp_path / "samples").iterdir()
    metadata = pq.read_metadata(path)
    assert metadata.num_row_groups == 3
    column = metadata.row_group(1).column(0)
    assert (column.path_in_schema, column.statistics.min, column.statistics.max) == ("row", 256, 511)
    assert column.compression == "ZSTD"
    assert pq.read_table(path)["row"].to_pylist() == list(range(600))


def test_the_verifier_head_is_stored_once(uri: str, tmp_path: Path) -> None:
    dataset = create(uri)
    head, other = tmp_path / "head.bin", tmp_path / "other.bin"
    head.write_bytes(os.urandom(100_000))
    other.write_bytes(b"other")
    with pytest.raises(ValueError, match="has no verifier head"):
        dataset.snapshot().fetch_head(tmp_path)
    first = dataset.put_head(head)
    assert dataset.put_head(head) == first == Dataset.open(uri).snapshot().head
    with pytest.raises(ValueError, match="the weights are not those"):
        dataset.put_head(other)
    fetched = dataset.snapshot().fetch_head(tmp_path / "fetched")
    assert fetched.read_bytes() == head.read_bytes()
    assert dataset.snapshot().fetch_head(tmp_path / "fetched") == fetched
    assert head.exists()


def test_a_head_that_changes_while_it_is_stored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest in the log is that of the stored copy."""
    dataset = create(tmp_path / "d")
    source = tmp_path / "head.bin"
    source.write_bytes(b"h" * 1000)
    copy = shutil.copyfileobj

    def changed(source_file, copy_file, length):  # type: ignore[no-untyped-def]
        source.write_bytes(b"i" * 1000)
        copy(source_file, copy_file, length)

    monkeypatch.setattr(shutil, "copyfileobj", changed)
    with pytest.raises(ValueError, match=r"head\.bin changed while it was stored"):
        dataset.put_head(source)
    monkeypatch.undo()
    assert dataset.snapshot().head is None
    assert not list((tmp_path / "d").rglob("*.safetensors"))
    stored = dataset.put_head(source)
    assert (tmp_path / "d" / stored.path).read_bytes() == b"i" * 1000


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    dataset = create(tmp_path / "d")
    source = tmp_path / "head.bin"
    source.write_bytes(b"h" * 1000)
    path = tmp_path / "d" / dataset.put_head(source).path
    for damage in (b"h" * 999 + b"i", b"h" * 999):
        path.write_bytes(damage)
        with pytest.raises(DamagedError, match="head/"):
            dataset.snapshot().fetch_head(tmp_path / "fetched")
    assert list((tmp_path / "fetched").iterdir()) == []


def test_follow_sees_other_writers_commits(uri: str) -> None:
    reader, dataset = create(uri, 12), create(uri, 12)
    writer = dataset.writer()
    for unit in range(12):
        writer.commit([write_opaque(writer, unit)], {})
        if unit in (0, 10):
            assert reader.snapshot().version == unit + 1
    assert len(reader.snapshot().unit_states()) == 12


def test_status_counts(tmp_path: Path) -> None:
    dataset = create(tmp_path)
    assert (status(dataset.snapshot()).rate, status(dataset.snapshot()).num_files) == (None, 0)
    writer = dataset.writer()
    for unit in range(3):
        writer.commit([write_opaque(writer, unit, rejected=keys_of(dataset, unit)[:1])], {})
    dataset.expire([0])
    found = status(dataset.snapshot())
    assert found.units == {"committed": 2, "expired": 1, "pending": 1, "planned": 4}
    assert (found.samples.samples, found.samples.rejects, found.samples.pending) == (4, 2, 3)
    snapshot = dataset.snapshot()
    assert found.num_tokens == sum(snapshot.samples(columns=["num_tokens"])["num_tokens"].to_pylist())
    assert found.raw_bytes == sum(snapshot.samples(columns=["rows"])["rows"].to_pylist()) * SPEC.row_bytes
    assert found.stored_bytes == sum((tmp_path / file.path).stat().st_size for file in snapshot.files())


def test_importing_storage_needs_no_engine() -> None:
    script = "import sys, storage; print(sorted({'torch', 'ray', 'vllm', 'duckdb', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
