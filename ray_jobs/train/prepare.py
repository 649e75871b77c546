"""What a run fixes once, before its first step: snapshot versions, the draft's configuration and its vocabulary.

<run>/train.yaml            the resolved configuration
<run>/draft_config.json     the draft's shape
<run>/vocab.safetensors     d2t and t2d (only where the draft vocabulary is a subset)
<run>/run.json              the marker: data sets with pinned versions, coverage
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft.config import FILE_NAME as DRAFT_CONFIG_NAME
from draft.config import DraftConfig
from draft.frequencies import count_weighted
from draft.notes import DatasetNote
from draft.vocab import VocabMapping, build_vocab
from ray_jobs.config import differing_keys, dump_config, load_config
from ray_jobs.train.config import TrainConfig
from storage import Dataset, Snapshot
from storage.identity import canonical_json

RUN_VERSION = 1
CONFIG_NAME = "train.yaml"
VOCAB_NAME = "vocab.safetensors"
MARKER_NAME = "run.json"

# What may change between two starts of one run: it changes how the run goes, not what it computes.
FREE_SECTIONS = ("workers", "checkpoint")
# Below this share of loss tokens in the draft vocabulary, most of what is lost is lost to the vocabulary.
LOW_COVERAGE = 0.9


@dataclass(frozen=True)
class PreparedRun:
    """A run directory whose marker was read."""

    directory: Path
    draft: DraftConfig
    vocab: VocabMapping | None
    datasets: tuple[DatasetNote, ...]

    @property
    def sources(self) -> list[tuple[str, int | None, float]]:
        """The data sets as `TrainingStream` takes them."""
        return [(note.uri, note.version, note.weight) for note in self.datasets]


def absolute_uri(uri: str) -> str:
    """A local path made absolute: Ray Train workers run in a directory of their own."""
    return uri if "://" in uri else str(Path(uri).expanduser().resolve())


def check_run(config: TrainConfig) -> Path:
    """The run's directory, absolute. Raises ValueError when it holds a run with another configuration."""
    directory = config.checkpoint.directory.expanduser().resolve()
    if (directory / MARKER_NAME).is_file():
        started_with = load_config(directory / CONFIG_NAME, [], TrainConfig)
        differences = differing_keys(started_with, config, ignore=FREE_SECTIONS)
        if differences:
            raise ValueError(
                f"checkpoint.directory {directory} holds a run with another configuration ({'; '.join(differences)}): "
                "give another directory, or the same configuration to go on with it"
            )
    return directory


def prepare_run(config: TrainConfig) -> PreparedRun:
    """Set up the run directory, or read the one that is there.

    Raises ValueError for a run with another configuration, and naming what is wrong with data or draft.
    """
    directory = check_run(config)
    if (directory / MARKER_NAME).is_file():
        return load_run(directory)
    snapshots = [
        (Dataset.open(absolute_uri(source.uri)).snapshot(source.version), source.weight)
        for source in config.dataset.all_sources
    ]
    draft = _draft_config(config, snapshots[0][0])
    _check_fit(draft, [snapshot for snapshot, _ in snapshots])
    directory.mkdir(parents=True, exist_ok=True)
    vocab = None
    if draft.uses_draft_vocab:
        counts = count_weighted(snapshots, draft.vocab_size)
        vocab = build_vocab(counts, draft.draft_vocab_size, _special_ids(draft, config.draft.special_token_ids))
        _write_vocab(vocab, directory / VOCAB_NAME)
        if vocab.coverage < LOW_COVERAGE:
            print(
                f"warning: the draft vocabulary of {draft.draft_vocab_size} covers {vocab.coverage:.1%} of the loss "
                "tokens; raise draft.vocab_size",
                file=sys.stderr,
            )
    draft.save(directory / DRAFT_CONFIG_NAME)
    dump_config(config, directory / CONFIG_NAME)
    datasets = [
        DatasetNote(
            uri=snapshot.dataset.uri,
            identity_digest=hashlib.sha256(canonical_json(snapshot.dataset.identity.to_json())).hexdigest(),
            version=snapshot.version,
            weight=weight,
        )
        for snapshot, weight in snapshots
    ]
    marker = {
        "run_version": RUN_VERSION,
        "datasets": [note.model_dump(mode="json") for note in datasets],
        "coverage": None if vocab is None else vocab.coverage,
    }
    temporary = directory / f".{MARKER_NAME}.tmp"
    temporary.write_text(json.dumps(marker, indent=2) + "\n")
    temporary.replace(directory / MARKER_NAME)
    return load_run(directory)


def load_run(directory: Path) -> PreparedRun:
    """Read what `prepare_run` wrote. Raises ValueError for an unknown version."""
    marker: dict[str, Any] = json.loads((directory / MARKER_NAME).read_text())
    if marker.get("run_version") != RUN_VERSION:
        raise ValueError(f"{directory / MARKER_NAME}: run_version {marker.get('run_version')!r} is not known here")
    draft = DraftConfig.load(directory / DRAFT_CONFIG_NAME)
    vocab = _read_vocab(directory / VOCAB_NAME, marker["coverage"]) if draft.uses_draft_vocab else None
    return PreparedRun(directory, draft, vocab, tuple(DatasetNote.model_validate(note) for note in marker["datasets"]))


def _draft_config(config: TrainConfig, snapshot: Snapshot) -> DraftConfig:
    if config.draft.config is not None:
        return DraftConfig.load(config.draft.config)
    from gen.config import VerifierConfig

    identity = snapshot.dataset.identity
    name = config.draft.verifier or str(identity.verifier.get("name", ""))
    try:
        directory = VerifierConfig(model=name).directory()
    except FileNotFoundError as error:
        raise ValueError(
            f"the configuration of the verifier is needed to derive the draft's shape: {error}. Set draft.verifier to "
            "the verifier's directory, or draft.config to a draft_config.json"
        ) from error
    # The deepest stored layer is the training target (the last layer's output), the others feed the draft.
    fields: dict[str, Any] = {
        "draft_vocab_size": config.draft.vocab_size,
        "aux_layer_ids": list(identity.states.layer_ids[:-1]),
        "verifier_name": None if name == "embedded" else name,
    }
    return DraftConfig.from_verifier(directory, **(fields | config.draft.fields))


def _check_fit(draft: DraftConfig, snapshots: list[Snapshot]) -> None:
    """What would else be found only by a worker, after the cluster gave its machines."""
    from draft.alignment import StateColumns

    for snapshot in snapshots:
        try:
            StateColumns.for_draft(draft, snapshot.dataset.identity.states)
        except ValueError as error:
            raise ValueError(f"{snapshot.dataset.uri}: {error}") from error
    first = snapshots[0]  # the head of the first one is trained with
    if first.head is None:
        raise ValueError(
            f"{first.dataset.uri} has no verifier head (embedding, final norm, lm_head), which training needs: "
            "`headrace generate` stores it, `Dataset.put_head` adds it to a data set from elsewhere"
        )


def _special_ids(draft: DraftConfig, more: tuple[int, ...]) -> list[int]:
    eos = draft.eos_token_id if isinstance(draft.eos_token_id, list) else [draft.eos_token_id]
    return [token for token in (*eos, draft.bos_token_id, draft.pad_token_id, *more) if token is not None]


def _write_vocab(vocab: VocabMapping, path: Path) -> None:
    from safetensors.numpy import save_file

    temporary = path.with_name(f".{path.name}.tmp")
    save_file({"d2t": vocab.d2t, "t2d": vocab.t2d}, temporary)
    temporary.replace(path)


def _read_vocab(path: Path, coverage: float) -> VocabMapping:
    from safetensors.numpy import load_file

    tensors = load_file(path)
    return VocabMapping(tensors["d2t"], tensors["t2d"], coverage)
