"""What a process may be doing when it is killed: how its data set came about, what it does, what may be visible then.

    python kill_scenarios.py SCENARIO DIRECTORY

runs the scenario once for each step at which it can die, in a data set of its own below the directory, kills it there,
and prints how many there were. A step is a call that changes the disk. The process is forked from one that has imported
everything and started no thread, so a death costs milliseconds.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage_helpers import SPEC, create, keys_of, states, write_real

from storage import Dataset, SampleKey, checkpoint
from storage.codec import decode, encode
from storage.compact import compact
from storage.gc import collect

STEPS = [(os, "link"), (os, "fsync"), (Path, "unlink"), (Path, "mkdir"), (Path, "open")]
HEAD = b"head" * 10_000


@dataclass(frozen=True)
class Scenario:
    """`before` and `after` are source rows of the samples that are visible then; in between one of both."""

    prepare: Callable[[Path], None]
    act: Callable[[Dataset], object]
    before: list[int]
    after: list[int]
    least_steps: int


def _empty(root: Path) -> None:
    create(root, 2)


def _filled(root: Path) -> None:
    """Three committed units of two samples and a reject each; a fourth is pending."""
    dataset = create(root, 4)
    writer = dataset.writer("first")
    for unit in range(3):
        writer.commit([write_real(writer, unit, 0, keys_of(dataset, unit)[:1], target_bytes=1 << 16)], {})


def _with_garbage(root: Path) -> None:
    """Expired, replaced, purged and orphaned files, an unfinished one, and a checkpoint of no use."""
    _filled(root)
    dataset = Dataset.open(root)
    dataset.expire([0])
    compact(dataset, target_bytes=1 << 20)
    dead = dataset.writer("dead")
    write_real(dead, 3, 0, [], target_bytes=1 << 16)
    dataset.store.staging_file(dead.shard_target(3, 1).shard_path(0, "safetensors")).write_bytes(b"half a shard")
    (root / checkpoint.checkpoint_path(2)).parent.mkdir(exist_ok=True)
    (root / checkpoint.checkpoint_path(2)).write_bytes(b"damaged")


def _with_deleted(root: Path) -> None:
    _filled(root)
    Dataset.open(root).delete([SampleKey(4, 0, 0)])


def _commit(dataset: Dataset) -> None:
    """Every pending unit, in one entry."""
    writer = dataset.writer()
    units = dataset.snapshot().pending_units()
    files = [write_real(writer, unit, 0, keys_of(dataset, unit)[:1], target_bytes=1 << 16) for unit in units]
    if files:
        writer.commit(files, {})


def _commit_with_checkpoints(dataset: Dataset) -> None:
    """Each commit writes a checkpoint and an index, and so does the end."""
    interval, checkpoint.INTERVAL = checkpoint.INTERVAL, 1
    try:
        _commit(dataset)
        dataset.complete()
    finally:
        checkpoint.INTERVAL = interval


def _put_head(dataset: Dataset) -> None:
    source = Path(dataset.uri).with_suffix(".head")
    source.write_bytes(HEAD)
    dataset.put_head(source)


ALL = [1, 2, 4, 5, 7, 8]
SCENARIOS = {
    "commit": Scenario(_empty, _commit, [], ALL[:4], 30),
    "checkpoint": Scenario(_filled, _commit_with_checkpoints, ALL, [*ALL, 10, 11], 40),
    "compact": Scenario(_filled, lambda d: compact(d, target_bytes=1 << 20), ALL, ALL, 25),
    "purge": Scenario(_with_deleted, lambda d: compact(d, 1 << 20, purge=True), [1, 2, 5, 7, 8], [1, 2, 5, 7, 8], 30),
    "gc": Scenario(
        _with_garbage,
        lambda d: collect(d, apply=True, older_than_s=-1, keep_superseded_s=0),
        [4, 5, 7, 8],
        [4, 5, 7, 8],
        15,
    ),
    "expire": Scenario(_filled, lambda d: d.expire([1]), ALL, [1, 2, 7, 8], 5),
    "delete": Scenario(_filled, lambda d: d.delete([SampleKey(4, 0, 0)]), ALL, [1, 2, 5, 7, 8], 5),
    "put_head": Scenario(_filled, _put_head, ALL, ALL, 10),
}


def _child(root: Path, scenario: Scenario, kill_at: int) -> None:
    count = 0

    def step(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == kill_at:
                os._exit(9)
            return function(*args, **kwargs)

        return wrapped

    dataset = Dataset.open(root)
    for owner, name in STEPS:
        setattr(owner, name, step(getattr(owner, name)))
    scenario.act(dataset)
    os._exit(0)


def main(name: str, directory: Path) -> None:
    scenario = SCENARIOS[name]
    # The codec is compiled once here, not in every process that is about to die.
    array = states(SampleKey(0, 0, 0), 4)
    decode(encode(array, SPEC, "planes-zstd"), 4, SPEC, "planes-zstd", where="")
    template = directory / "template"
    pid = os.fork()
    if pid == 0:  # it may start threads
        scenario.prepare(template)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    killed, code = 0, 9
    while code == 9:
        root = directory / str(killed + 1)
        shutil.copytree(template, root)
        pid = os.fork()
        if pid == 0:
            _child(root, scenario, killed + 1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, 9), code
        killed += code == 9
    print(killed)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
