"""The export for `speculators`, read back with that library's own loader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_data import Content, build
from typer.testing import CliRunner

from storage.errors import DamagedError
from storage.export import MANIFEST, export_speculators
from storage.types import SampleKey, StateSpec

LENGTHS = [2, 3, 9, 30, 17, 5, 40, 2, 11, 23]


def load(directory: Path, max_len: int = 64):
    from speculators.train.data import ArrowDataset

    return ArrowDataset(max_len, directory, on_missing="raise")


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("codec", ["none", "planes-zstd"])
def test_the_library_reads_what_was_stored_bit_by_bit(tmp_path, codec):
    content = build(tmp_path / "data", LENGTHS, order=[2, 0, 1], codec=codec, rejected={4: "empty"})
    summary = export_speculators(content.dataset.snapshot(), tmp_path / "out")
    keys = [SampleKey(*key) for key in json.loads((tmp_path / "out" / MANIFEST).read_text())["keys"]]
    assert keys == sorted(content.keys)
    loaded = load(tmp_path / "out")
    assert len(loaded) == summary.samples == 9
    assert loaded.approx_lengths == [LENGTHS[key.row] - 1 for key in keys]
    for index, key in enumerate(keys):
        sample = loaded[index]
        states_TLH = content.states[key]
        # The last token has no states: it is left out.
        assert sample["input_ids"].tolist() == content.token_ids[key][:-1]
        assert sample["loss_mask"].to(torch.bool).tolist() == content.loss_masks[key][:-1]
        assert sample["hidden_states"].dtype == torch.bfloat16
        np.testing.assert_array_equal(bits(sample["hidden_states"]), states_TLH[:, :-1].reshape(len(states_TLH), -1))
        np.testing.assert_array_equal(bits(sample["verifier_last_hidden_states"]), states_TLH[:, -1])
    assert summary.tokens == sum(LENGTHS[key.row] - 1 for key in keys)
    assert summary.state_bytes == sum(content.states[key].nbytes for key in keys)


def test_the_library_makes_training_batches_of_it(tmp_path):
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    content = build(tmp_path / "data", LENGTHS)
    export_speculators(content.dataset.snapshot(), tmp_path / "out")
    loaded = load(tmp_path / "out")
    collate = CollateFn(64, 8, num_target_layers=2, preprocess=shift_batch)
    batch = collate([loaded[3], loaded[6]])
    first, second = (content.states[SampleKey(row, 0, 0)] for row in (3, 6))
    # Row i: token i + 1, aux states i, target states i + 1; the second sample follows where the first ends.
    assert batch["input_ids"][0, :28].tolist() == content.token_ids[SampleKey(3, 0, 0)][1:-1]
    np.testing.assert_array_equal(bits(batch["verifier_last_hidden_states"][0, :28]), first[1:, -1])
    np.testing.assert_array_equal(bits(batch["hidden_states"][0, 28:64]), second[:36, :-1].reshape(36, -1))
    assert batch["error_records"] == 0


def test_an_export_appears_whole_or_not_at_all(tmp_path):
    content = build(tmp_path / "data", LENGTHS)
    path = next((tmp_path / "data" / "shards").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedError):
        export_speculators(content.dataset.snapshot(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    export_speculators(content.dataset.snapshot(), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"data", "out"}
    with pytest.raises(FileExistsError, match="is not empty"):
        export_speculators(content.dataset.snapshot(), tmp_path / "out")


def test_two_exports_into_one_place_do_not_mix(tmp_path):
    """The second begins and ends while the first is at work: the first finds the place taken and leaves nothing."""
    content = build(tmp_path / "data", LENGTHS)
    snapshot = content.dataset.snapshot()

    def other(done: int, total: int) -> None:
        if done == 3:
            export_speculators(snapshot, tmp_path / "out")

    with pytest.raises(FileExistsError, match="is not empty"):
        export_speculators(snapshot, tmp_path / "out", progress=other)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "out"}
    assert len(load(tmp_path / "out")) == len(LENGTHS)
    (tmp_path / "empty").mkdir()
    export_speculators(snapshot, tmp_path / "empty")
    assert len(load(tmp_path / "empty")) == len(LENGTHS)


def test_states_without_the_final_layer_are_refused(tmp_path):
    """The library takes the last layer it finds as the training target."""
    content = build(tmp_path / "data", LENGTHS, identity={"verifier": {"num_layers": 9}})
    with pytest.raises(ValueError, match=r"layer_ids \[1, 2, 4\] end at 4, .* 9 layers"):
        export_speculators(content.dataset.snapshot(), tmp_path / "out")


def test_samples_of_one_token_are_counted(tmp_path):
    content = build(tmp_path / "data", [1, 5])
    summary = export_speculators(content.dataset.snapshot(), tmp_path / "out")
    assert (summary.samples, summary.skipped) == (1, ["row 0 turn 0 n 0"])


@pytest.fixture
def small(tmp_path: Path) -> Content:
    return build(tmp_path / "data", [5, 6], spec=StateSpec((0, 2), 4))


def test_the_command(small, tmp_path):
    import typer

    from ray_jobs.commands.export import command

    app = typer.Typer()
    app.command()(command)
    arguments = [small.dataset.uri, "--to", "speculators", "--output", str(tmp_path / "out"), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["samples"] == 2
    assert len(load(tmp_path / "out")) == 2
    assert CliRunner().invoke(app, [small.dataset.uri, "--to", "other", "--output", "x"]).exit_code == 2
