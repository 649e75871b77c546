"""A training checkpoint on disk: written by training, read by export, resume and validation.

    <directory>/
        draft_config.json      the draft's shape
        model.safetensors      weights by the speculators library's names (fp32 masters allowed), d2t and t2d in it
        training_state.json    whatever the training loop needs to go on, and the notes on how the draft came to be
        <name>.safetensors     more tensors of the training loop (optimizer state), as many files as it likes
        COMPLETE.json          the marker: names, sizes and digests of all the others

The directory appears under its name in one rename and the marker is written last, so both a local reader and one that
sees a copy made file by file (an object store, Ray's checkpoint upload) can tell a whole checkpoint from a torn one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draft.config import FILE_NAME as CONFIG_NAME
from draft.config import DraftConfig
from draft.notes import GenerationNotes
from draft.weights import EMBEDDING, tensor_shapes

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1
MODEL_NAME = "model.safetensors"
STATE_NAME = "training_state.json"
MARKER_NAME = "COMPLETE.json"


@dataclass(frozen=True)
class TrainingCheckpoint:
    """A checkpoint whose marker was read and whose files are all there."""

    directory: Path
    config: DraftConfig
    state: dict[str, Any]
    notes: GenerationNotes

    def tensors(self, name: str = "model") -> dict[str, torch.Tensor]:
        """The tensors of `<name>.safetensors`: the model's, or a file of the training loop."""
        from safetensors.torch import load_file

        return load_file(self.directory / f"{name}.safetensors")


def write_checkpoint(
    directory: Path,
    config: DraftConfig,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    notes: GenerationNotes | None = None,
    extra_tensors: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
) -> Path:
    """Write a whole checkpoint under a name that is not taken yet.

    `tensors` has the names and shapes of `config.tensor_shapes()`; the embedding may be there, `verifier_*` may not.
    `state` must be JSON-able. `extra_tensors` maps a file stem ("optimizer") to its tensors.

    Raises ValueError when the tensors are not those of `config`, FileExistsError when the name is taken.
    """
    check_tensors(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    if directory.exists():
        raise FileExistsError(f"{directory} exists: a checkpoint is never overwritten")
    from safetensors.torch import save_file

    files = {"model": tensors, **(extra_tensors or {})}
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        for stem, content in files.items():
            contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in content.items()}
            save_file(contiguous, staging / f"{stem}.safetensors", metadata={"format": "pt"})
        (staging / CONFIG_NAME).write_text(config.to_json())
        body = {
            "format_version": FORMAT_VERSION,
            "notes": (notes or GenerationNotes()).model_dump(mode="json"),
            "state": dict(state),
        }
        (staging / STATE_NAME).write_text(json.dumps(body, indent=2) + "\n")
        listing = {path.name: describe_file(path) for path in sorted(staging.iterdir())}
        marker = {"format_version": FORMAT_VERSION, "files": listing}
        publish_directory(staging, directory, MARKER_NAME, json.dumps(marker, indent=2) + "\n")
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


def read_checkpoint(directory: Path, *, verify: bool = False) -> TrainingCheckpoint:
    """Open a checkpoint; with `verify`, also compare every file's digest.

    Raises FileNotFoundError without a marker (a checkpoint that was never finished), ValueError when a file is missing,
    has another size or digest, or has an unknown version.
    """
    marker_file = directory / MARKER_NAME
    if not marker_file.is_file():
        raise FileNotFoundError(f"{directory} has no {MARKER_NAME}: it is not a finished training checkpoint")
    marker = json.loads(marker_file.read_text())
    _check_version(marker_file, marker)
    for name, expected in marker["files"].items():
        path = directory / Path(name).name
        if not path.is_file() or path.stat().st_size != expected["size"]:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "missing"
            raise ValueError(f"{path} is {found}, the marker says {expected['size']} bytes: the copy is torn")
        if verify and describe_file(path) != expected:
            raise ValueError(f"{path} has another digest than the marker says: its bytes changed")
    body = json.loads((directory / STATE_NAME).read_text())
    _check_version(directory / STATE_NAME, body)
    config = DraftConfig.load(directory / CONFIG_NAME)
    return TrainingCheckpoint(directory, config, body["state"], GenerationNotes.model_validate(body["notes"]))


def is_complete(directory: Path) -> bool:
    """Whether `directory` holds a checkpoint that was written to its end."""
    return (directory / MARKER_NAME).is_file()


def check_tensors(config: DraftConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError naming every tensor that is missing, unknown or of another shape than `config` implies."""
    expected = tensor_shapes(config, embedding=EMBEDDING in shapes)
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is no tensor of this draft" for name in shapes if name not in expected]
    problems += [
        f"{name} is {list(shapes[name])}, the configuration implies {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        raise ValueError("tensors do not fit the draft configuration: " + "; ".join(problems))


def describe_file(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file, as markers hold them."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def publish_directory(staging: Path, directory: Path, marker_name: str, marker: str) -> None:
    """Make a finished directory visible: its files to disk, then the marker, then one rename, then the parent to disk.

    Raises FileExistsError when `directory` is taken: rename(2) replaces only an empty directory.
    """
    for path in staging.iterdir():
        _sync(path)
    (staging / marker_name).write_text(marker)
    _sync(staging / marker_name)
    staging.chmod(0o755)  # mkdtemp makes it private
    _sync(staging)
    try:
        staging.rename(directory)
    except OSError as error:
        raise FileExistsError(f"{directory} exists: nothing is overwritten") from error
    _sync(directory.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_version(path: Path, body: Mapping[str, Any]) -> None:
    if body.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version {body.get('format_version')!r} is not known, expected {FORMAT_VERSION}"
        )
