"""The capture service without an engine: commands, checks of every sample, back-pressure, and errors that arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from storage_helpers import disk_of, files_below

from gen.capture.config import CaptureOptions, capture_engine_args
from gen.capture.messages import (
    UnitAttempt,
    decode_files,
    decode_receipt,
    decode_request,
    encode_request,
    encode_target,
    token_digest,
)
from gen.capture.service import CaptureService
from gen.capture.shard_thread import ShardThread
from gen.capture.transfer import StepSource
from storage.shards import open_shard_reader
from storage.store import open_store
from storage.types import SampleKey, ShardTarget, StateSpec

SPEC = StateSpec((1, 3), 4)
KEY = SampleKey(3, 1, 2)
UNIT = UnitAttempt(0, 1)


@pytest.fixture
def service() -> Iterator[CaptureService]:
    service = CaptureService(CaptureOptions("one_pass", SPEC, queue_bytes=1 << 20), torch.device("cpu"))
    yield service
    service.shutdown()


def command(service: CaptureService, op: str, unit: UnitAttempt = UNIT, **arguments: Any) -> dict[str, Any]:
    """Give one command and exchange until its answer comes, as the client does."""
    answers = service.exchange([{"ticket": 7, "op": op, "unit": list(unit), **arguments}])
    deadline = time.monotonic() + 20
    while not answers and time.monotonic() < deadline:
        time.sleep(0.002)
        answers = service.exchange([])
    [answer] = answers
    assert answer.pop("ticket") == 7
    return answer


def run_request(
    service: CaptureService,
    token_ids: list[int],
    key: SampleKey = KEY,
    bad: float | None = None,
    unit: UnitAttempt = UNIT,
) -> torch.Tensor:
    """Compute a whole request in one step; returns its states [T, L, H]."""
    states = torch.randn(len(token_ids), len(SPEC.layer_ids), SPEC.hidden_size).to(torch.bfloat16)
    if bad is not None:
        states[1, 1] = bad
    service.store.begin("r", unit, key, 32)
    layers = [states[:, layer].contiguous() for layer in range(len(SPEC.layer_ids))]
    service.take_step(StepSource(layers, torch.tensor(token_ids, dtype=torch.int32)), [("r", 0, len(token_ids))])
    service.store.end("r")
    return states


def finish(service: CaptureService, token_ids: list[int], key: SampleKey = KEY) -> dict[str, Any]:
    return command(service, "finish", key=list(key), num_tokens=len(token_ids), digest=token_digest(token_ids[:-1]))


def open_unit(service: CaptureService, directory: Path) -> None:
    assert command(service, "open", target=encode_target(ShardTarget(str(directory), "w", *UNIT, SPEC))) == {}


def test_states_reach_a_closed_shard(service: CaptureService, tmp_path: Path) -> None:
    open_unit(service, tmp_path)
    states = run_request(service, [5, 6, 7])
    answer = finish(service, [5, 6, 7, 8])
    [entry] = decode_files(command(service, "close")["files"])
    receipt = decode_receipt(answer["receipt"])
    assert receipt.key == KEY
    read = open_shard_reader(open_store(str(tmp_path)), entry, SPEC).read(receipt)
    np.testing.assert_array_equal(read, states.view(torch.uint16).numpy())


def test_a_row_too_many_is_trimmed(service: CaptureService, tmp_path: Path) -> None:
    open_unit(service, tmp_path)
    run_request(service, [5, 6, 7, 8])
    assert decode_receipt(finish(service, [5, 6, 7, 8])["receipt"]).rows == 3


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [([5, 6, 7, 8, 9], "missing_rows"), ([5, 9, 7, 8], "wrong_tokens"), ([6, 5, 7, 8], "wrong_tokens")],
)
def test_rows_that_do_not_fit_the_tokens_are_faults(
    service: CaptureService, tmp_path: Path, token_ids: list[int], reason: str
) -> None:
    open_unit(service, tmp_path)
    run_request(service, [5, 6, 7])
    assert finish(service, token_ids)["fault"] == reason
    assert command(service, "close")["files"] == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_bad_rows_are_faults_and_the_key_may_be_tried_again(
    service: CaptureService, tmp_path: Path, value: float
) -> None:
    open_unit(service, tmp_path)
    run_request(service, [5, 6, 7], bad=value)
    answer = finish(service, [5, 6, 7, 8])
    assert answer["fault"] == "bad_rows"
    assert "layer 3" in answer["detail"]
    run_request(service, [5, 6, 7])
    assert "receipt" in finish(service, [5, 6, 7, 8])


def test_an_unseen_request_is_a_fault(service: CaptureService, tmp_path: Path) -> None:
    open_unit(service, tmp_path)
    assert finish(service, [5, 6])["fault"] == "not_captured"


def test_a_write_error_fails_the_unit_and_only_it(service: CaptureService, tmp_path: Path) -> None:
    open_unit(service, tmp_path)
    run_request(service, [5, 6, 7])

    class Full:
        def add_encoded(self, key: SampleKey, sample: Any) -> None:
            raise OSError(28, "No space left on device")

        def abort(self) -> None:
            pass

    service._shards._writers[UNIT] = Full()  # type: ignore[assignment]
    assert "No space left" in finish(service, [5, 6, 7, 8])["error"]
    assert "has failed" in command(service, "close")["error"]
    assert command(service, "abort") == {}
    open_unit(service, tmp_path / "other")
    run_request(service, [5, 6, 7])
    assert "receipt" in finish(service, [5, 6, 7, 8])


def test_a_unit_whose_close_failed_leaves_nothing_when_it_is_aborted(service: CaptureService, tmp_path: Path) -> None:
    """One sample a shard; the disk is full when the last one gets its Parquet footer, the others are published."""
    others = {thread for thread in threading.enumerate() if thread.name.startswith("shard-writer")}
    target = ShardTarget(str(tmp_path), "w", *UNIT, SPEC, shard_format="parquet", target_bytes=1)
    assert command(service, "open", target=encode_target(target)) == {}
    for n in range(3):
        key = KEY._replace(n=n)
        run_request(service, [5, 6, 7], key)
        assert "receipt" in finish(service, [5, 6, 7, 8], key)
    with disk_of(0):
        error = command(service, "close")["error"]
    assert "StoreError" in error
    assert "shards/u00000000-a1-ww-00002.parquet" in error
    assert len(list(files_below(tmp_path))) == 3
    assert command(service, "abort") == {}
    assert list(files_below(tmp_path)) == []
    assert {thread for thread in threading.enumerate() if thread.name.startswith("shard-writer")} <= others


def test_commands_about_no_unit_are_errors(service: CaptureService, tmp_path: Path) -> None:
    assert "unit 0 (attempt 1) is not open" in finish(service, [5, 6])["error"]
    assert "unit 0 (attempt 1) is not open" in command(service, "close")["error"]
    assert command(service, "abort") == {}
    open_unit(service, tmp_path)
    target = encode_target(ShardTarget(str(tmp_path), "w", *UNIT, SPEC))
    assert "open already" in command(service, "open", target=target)["error"]


def test_rows_of_an_aborted_attempt_never_end_in_the_next_one(service: CaptureService, tmp_path: Path) -> None:
    """A request that outlives its abort in the engine has the same sample key, and its answer may be another."""
    open_unit(service, tmp_path)
    assert command(service, "abort") == {}
    again = UNIT._replace(attempt=2)
    target = encode_target(ShardTarget(str(tmp_path), "w", *again, SPEC))
    assert command(service, "open", again, target=target) == {}
    right = run_request(service, [5, 6, 7], unit=again)
    run_request(service, [5, 6, 7], unit=UNIT)
    assert "not open" in finish(service, [5, 6, 7, 8])["error"]
    answer = command(service, "finish", again, key=list(KEY), num_tokens=4, digest=token_digest([5, 6, 7]))
    [entry] = decode_files(command(service, "close", again)["files"])
    read = open_shard_reader(open_store(str(tmp_path)), entry, SPEC).read(decode_receipt(answer["receipt"]))
    np.testing.assert_array_equal(read, right.view(torch.uint16).numpy())


def test_the_engine_waits_for_a_full_queue() -> None:
    shards = ShardThread(max_queued_bytes=100)
    gate: Future[None] = Future()
    shards.submit(60, gate.result)
    shards.wait_for_room()
    shards.submit(60, gate.result)
    waiter = threading.Thread(target=shards.wait_for_room)
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    gate.set_result(None)
    waiter.join(10)
    assert not waiter.is_alive()
    shards.shutdown()


def test_encoders_work_side_by_side_and_writes_keep_their_order() -> None:
    shards = ShardThread(max_queued_bytes=100, num_encoders=2)
    first: Future[str] = Future()
    written: list[str] = []
    slow = shards.submit_encoded(1, first.result, written.append)
    encoded = threading.Event()
    quick = shards.submit_encoded(1, lambda: encoded.set() or "second", written.append)
    assert encoded.wait(10), "the second sample waits for the first one's encoder"
    first.set_result("first")
    slow.result(10)
    quick.result(10)
    assert written == ["first", "second"]
    failed = shards.submit_encoded(101, lambda: [][0], written.append)
    with pytest.raises(IndexError):
        failed.result(10)
    assert written == ["first", "second"]
    room = threading.Thread(target=shards.wait_for_room, daemon=True)
    room.start()
    room.join(10)
    assert not room.is_alive(), "a failed sample keeps its bytes, and the engine waits for ever"
    shards.shutdown()


def test_request_marks_survive_the_way() -> None:
    assert decode_request({"headrace_capture": encode_request(UNIT, KEY)}) == (UNIT, KEY)
    assert decode_request({"kv_transfer_params": {}}) is None
    assert decode_request(None) is None


def test_options_are_checked_and_survive_the_way() -> None:
    options = CaptureOptions("stock", SPEC, num_pieces=2)
    assert CaptureOptions.from_json(options.to_json()) == options
    with pytest.raises(ValueError, match=r"capture\.mode 'magic'"):
        CaptureOptions("magic", SPEC)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"capture\.queue_bytes 0"):
        capture_engine_args("one_pass", SPEC, queue_bytes=0)


def test_token_digest_sees_order_and_length() -> None:
    digests = {token_digest(ids) for ids in ([1, 2, 3], [1, 2], [3, 2, 1], [1, 2, 3, 0])}
    assert len(digests) == 4
    assert token_digest(np.array([1, 2, 3], np.int64)) == token_digest([1, 2, 3])
