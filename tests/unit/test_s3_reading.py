"""Reading for training from a bucket: ranged, a sample does not cost its shard; and through a failing server."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from s3_server import BUCKET, S3Server, s3_server
from sample_data import Content, build

from storage.reader import LoadedSample, SampleReader
from storage.stream import TrainingStream
from storage.types import SampleKey, StateSpec
from storage.verify import verify

SPEC = StateSpec((1, 2, 4), 64)
LENGTHS = [40] * 10 + [300, 7]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _clean(server: S3Server) -> Iterator[None]:
    server.faults.clear()
    yield
    server.faults.clear()


@pytest.fixture(scope="module", params=[("safetensors", "none"), ("parquet", "planes-zstd")], ids=str)
def content(request: pytest.FixtureRequest, server: S3Server) -> Content:
    shard_format, codec = request.param
    return build(server.new_uri(), LENGTHS, spec=SPEC, shard_format=shard_format, codec=codec)


def check(content: Content, sample: LoadedSample) -> None:
    assert sample.token_ids.tolist() == content.token_ids[sample.key]
    np.testing.assert_array_equal(sample.states_TLH, content.states[sample.key])


def sent_of_shards(server: S3Server, content: Content) -> int:
    prefix = f"/{BUCKET}/" + content.dataset.uri.removeprefix(f"s3://{BUCKET}/") + "/shards/"
    return sum(count for path, count in server.sent.items() if path.startswith(prefix))


def stored_bytes(reader: SampleReader) -> int:
    return sum(reader.locations.receipt(index).nbytes for index in range(len(reader)))


def test_a_sample_costs_its_own_bytes_of_its_shard(server: S3Server, content: Content) -> None:
    reader = SampleReader(content.dataset.snapshot())
    for row in (6, 10, 11):
        key = SampleKey(row, 0, 0)
        receipt = reader.locations.receipt(list(reader.keys()).index(key))
        assert content.dataset.store.size(receipt.shard) > receipt.nbytes + 10_000
        server.sent.clear()
        check(content, reader.read(key))
        assert sent_of_shards(server, content) == receipt.nbytes


def test_an_epoch_costs_every_stored_byte_once(server: S3Server, content: Content) -> None:
    """One sample a pack: neighbours in one pack are read as one range, with what lies between them."""
    stream = TrainingStream([(content.dataset.uri, None, 1.0)], seed=3, pack_tokens=40, max_sample_tokens=40)
    server.sent.clear()
    keys = []
    for pack in stream:
        for sample in pack.samples:
            keys.append(sample.key)
            np.testing.assert_array_equal(sample.states_TLH, content.states[sample.key][: sample.num_tokens - 1])
    assert sorted(keys) == sorted(content.keys)
    assert sent_of_shards(server, content) == stored_bytes(stream.readers[0])


@pytest.mark.parametrize("fault", ["500", "503", "cut"])
def test_a_stream_survives_a_failing_server(server: S3Server, content: Content, fault: str) -> None:
    stream = TrainingStream([(content.dataset.uri, None, 1.0)], seed=4, pack_tokens=300, rank=1, world_size=2)
    other = TrainingStream([(content.dataset.uri, None, 1.0)], seed=4, pack_tokens=300, rank=0, world_size=2)
    failed = server.num_failed
    if fault == "cut":
        server.cut("GET", times=3)
    else:
        server.fail("GET", int(fault), times=3)
    samples = [sample for worker in (stream, other) for pack in worker for sample in pack.samples]
    assert server.num_failed == failed + 3
    assert sorted(sample.key for sample in samples) == sorted(content.keys)
    for sample in samples:
        check(content, sample)


def test_opening_and_reading_by_key_survive_a_failing_server(server: S3Server, content: Content) -> None:
    failed = server.num_failed
    for status in (500, 503):
        server.fail("GET", status, times=1)
        server.fail("HEAD", status, times=1)
        server.cut("GET", times=1)
        check(content, SampleReader(content.dataset.snapshot()).read(SampleKey(9, 0, 0)))
    assert server.num_failed == failed + 6
    assert verify(content.dataset.uri, deep=True).is_sound


def test_a_server_that_never_answers_well_is_a_clear_error(
    server: S3Server, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storage import Dataset, StoreError, store_s3

    monkeypatch.setattr(store_s3, "MAX_RETRIES", 1)
    reader = SampleReader(Dataset.open(content.dataset.uri).snapshot())
    server.cut("GET", times=1000)
    with pytest.raises(StoreError, match=r"samples/u0000000|shards/u0000000"):
        reader.read(SampleKey(9, 0, 0))
    server.faults.clear()
    check(content, reader.read(SampleKey(9, 0, 0)))
