"""Export of a snapshot into the layouts of other libraries.

`speculators` 0.9 trains from a directory of its own:

    dataset_info.json, state.json, *.arrow    a `datasets` table: input_ids, loss_mask, seq_len (torch format)
    hidden_states/hs_{i}.safetensors          token_ids int64 [S], hidden_states [S, L, H], last layer last

read by `speculators.train.data.ArrowDataset(max_len, directory, on_missing="raise")`. Its samples have a row of states
for every token, ours of T tokens have T - 1 rows: the last token, which the verifier never read, is left out. Training
loses nothing, since row i needs the states i + 1 as its target and token i + 2 only through them.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from storage.prefetch import prefetched
from storage.reader import SampleReader
from storage.snapshot import Snapshot
from storage.types import SampleKey

MANIFEST = "headrace_export.json"
MANIFEST_VERSION = 1


@dataclass
class ExportSummary:
    """What an export wrote."""

    directory: str
    samples: int = 0
    tokens: int = 0
    state_bytes: int = 0
    # A sample of one token has no states: nothing to train on.
    skipped: list[str] = field(default_factory=list)


def export_speculators(
    snapshot: Snapshot, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> ExportSummary:
    """Writes every sample of the snapshot in the layout that `speculators` trains from.

    File i holds the i-th sample by key, so that two exports of one snapshot are equal. `headrace_export.json` in the
    directory, written last, names the data set, the version, the layer ids and the key of every file.

    Args:
        snapshot: what to export.
        directory: must not exist, or be empty. It appears under its name only when it is whole; an export that is
            killed leaves `<name>.partial-...` beside it.
        progress: called with samples done and in all.

    Raises:
        FileExistsError: when the directory holds something.
        ValueError: when the states do not end with the verifier's final layer, which the library trains towards.
        DamagedError: naming the sample whose bytes are not what was committed.
    """
    _check_final_layer(snapshot)
    _check_empty(directory)
    # A name of its own: two exports into one place must not write into each other's files.
    partial = directory.with_name(f"{directory.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    try:
        summary = _write(snapshot, partial, str(directory), progress)
        _check_empty(directory)  # another one may have been faster
        partial.rename(directory)  # takes the place of an empty directory
    except BaseException:
        shutil.rmtree(partial)
        raise
    return summary


def _check_empty(directory: Path) -> None:
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty: export into a new directory")


def _write(snapshot: Snapshot, partial: Path, directory: str, progress: Callable[[int, int], None]) -> ExportSummary:
    """Writes the whole export into the directory `partial`."""
    from datasets import Dataset, Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    (partial / "hidden_states").mkdir()
    reader = SampleReader(snapshot)
    locations = reader.locations
    order = np.lexsort([locations.ns, locations.turns, locations.rows])
    summary = ExportSummary(directory)
    summary.skipped = [str(locations.key(index)) for index in order if locations.num_tokens[index] < 2]
    order = order[locations.num_tokens[order] > 1]
    keys: list[SampleKey] = []

    def write(numbered: tuple[int, int]) -> tuple[SampleKey, int, dict[str, Any]]:
        number, index = numbered
        return _write_sample(reader, index, partial / "hidden_states" / f"hs_{number}.safetensors")

    # Rows go to disk as they come: token ids of millions of samples do not fit into memory.
    features = Features(
        {"input_ids": List(Value("int64")), "loss_mask": List(Value("int64")), "seq_len": Value("int64")}
    )
    rows_file = partial / "rows" / "rows.arrow"  # the library does not save into the directory it reads from
    rows_file.parent.mkdir()
    with ArrowWriter(path=str(rows_file), features=features) as writer:
        for key, state_bytes, row in prefetched(write, enumerate(order.tolist()), depth=4):
            writer.write(row)
            keys.append(key)
            summary.samples += 1
            summary.tokens += row["seq_len"]
            summary.state_bytes += state_bytes
            progress(summary.samples, len(order))
        writer.finalize()
    table = Dataset.from_file(str(rows_file))
    table.set_format("torch")
    table.save_to_disk(str(partial))
    del table
    shutil.rmtree(rows_file.parent)
    _write_manifest(partial / MANIFEST, snapshot, summary, keys)
    return summary


def _check_final_layer(snapshot: Snapshot) -> None:
    identity = snapshot.dataset.identity
    layer_ids = list(identity.states.layer_ids)
    num_layers = identity.verifier.get("num_layers")
    if layer_ids[-1] != num_layers:
        raise ValueError(
            f"layer_ids {layer_ids} end at {layer_ids[-1]}, the verifier has {num_layers} layers: speculators takes "
            "the last one for the training target, so there would be no right target"
        )


def _write_sample(reader: SampleReader, index: int, path: Path) -> tuple[SampleKey, int, dict[str, Any]]:
    """Writes the file of one sample; returns its key, the bytes of its states and its row of the table."""
    import torch
    from safetensors.torch import save_file

    sample = reader.read_at([index])[0]
    states_TLH = sample.states_torch().contiguous()
    token_ids = sample.token_ids[:-1].astype(np.int64)
    save_file({"token_ids": torch.from_numpy(token_ids), "hidden_states": states_TLH}, path)
    row = {
        "input_ids": token_ids.tolist(),
        "loss_mask": sample.loss_mask[:-1].astype(np.int64).tolist(),
        "seq_len": len(token_ids),
    }
    return sample.key, states_TLH.nbytes, row


def _write_manifest(path: Path, snapshot: Snapshot, summary: ExportSummary, keys: list[SampleKey]) -> None:
    identity = snapshot.dataset.identity
    content = {
        "export_version": MANIFEST_VERSION,
        "layout": "speculators",
        "uri": snapshot.dataset.uri,
        "version": snapshot.version,
        "identity": identity.to_json(),
        "layer_ids": list(identity.states.layer_ids),
        "samples": summary.samples,
        "skipped": summary.skipped,
        "keys": [list(key) for key in keys],
    }
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
