"""Where a draft came from and what was measured: carried by training checkpoints and by exports (`headrace.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draft.jsonfile import read_json_object

FILE_NAME = "headrace.json"


class _Note(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DatasetNote(_Note):
    """One data set that the draft was trained on."""

    uri: str
    identity_digest: str = Field(description="Digest of the data set's identity.")
    version: int = Field(description="Snapshot version that was read.")
    weight: float = Field(default=1.0, description="Share in a weighted mix.")


class TrainingMetrics(_Note):
    """What training reported for this very checkpoint.

    `position_accuracy[k]` is measured with teacher forcing over the tokens that the loss counts: the share for which
    the argmax of the draft's logits equals the argmax of the verifier's logits restricted to the draft vocabulary at
    *every* test-time-training step from 0 to k. This is the speculators library's `full_acc_k`, and the closest thing
    to an engine's acceptance rate of position k.
    """

    position_accuracy: list[float]
    num_tokens: int = Field(description="Loss tokens at step 0 that the accuracies were measured on.")
    split: Literal["train", "heldout"] = "train"
    loss: float | None = None


class Acceptance(_Note):
    """Acceptance measured in an engine with `headrace evaluate`."""

    acceptance_length: float = Field(description="Tokens per verifier step, 1 + sum of the positions' rates.")
    position_rates: list[float]
    num_drafts: int
    prompts: str = Field(description="What it was measured on.")
    num_speculative_tokens: int


class GenerationNotes(_Note):
    """The whole note."""

    schema_version: Literal[1] = 1
    created: str | None = Field(default=None, description="UTC time of training, ISO 8601.")
    headrace_version: str | None = None
    datasets: list[DatasetNote] = Field(default_factory=list)
    recipe: dict[str, Any] = Field(default_factory=dict, description="Resolved training configuration.")
    step: int | None = Field(default=None, description="Optimizer steps.")
    coverage: float | None = Field(default=None, description="Share of loss tokens inside the draft vocabulary.")
    training_metrics: TrainingMetrics | None = None
    acceptance: list[Acceptance] = Field(default_factory=list)


class ExportRecord(_Note):
    """`headrace.json` of an exported draft."""

    schema_version: Literal[1] = 1
    form: Literal["flat", "nested"]
    engine: Literal["vllm", "sglang"] = "vllm"
    files: dict[str, dict[str, Any]] = Field(description="Size and sha256 of each weight file.")
    notes: GenerationNotes = Field(default_factory=lambda: GenerationNotes.model_validate({}))

    @classmethod
    def load(cls, path: Path) -> ExportRecord:
        """Read the record, or the `headrace.json` in a directory. Raises ValueError naming the file."""
        path = path / FILE_NAME if path.is_dir() and path.name != FILE_NAME else path
        data = read_json_object(path)
        try:
            if data.get("schema_version") != 1:
                raise ValueError(f"schema_version {data.get('schema_version')!r} is not known here, expected 1")
            return cls.model_validate(data)
        except (ValueError, ValidationError) as error:
            raise ValueError(f"{path}: {error}") from error

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"
