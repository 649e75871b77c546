"""The draft under validation: everything that checks share, read once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from draft.config import FILE_NAME as CONFIG_NAME
from draft.config import DraftConfig
from draft.formats import Form, engine_view, form_of, from_engine
from draft.jsonfile import is_there, read_json_object
from draft.notes import FILE_NAME as RECORD_NAME
from draft.notes import ExportRecord
from draft.tensorfiles import TensorHeader, read_headers, read_tensor
from draft.validate.probe import EngineReport
from draft.validate.result import CheckSkipped
from draft.verifier import VerifierShape
from draft.weights import canonical_name, implied_numbers

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Subject:
    """A draft directory beside its verifier and what vLLM's own code reported of it.

    Properties that need a sound file raise CheckSkipped where the file is not: the check named after the file reports
    the defect, the others say that they could not look.
    """

    directory: Path
    verifier: VerifierShape
    report: EngineReport | None
    dataset_uri: str | None = None

    def load_config(self) -> dict[str, Any]:
        """config.json. Raises ValueError or FileNotFoundError."""
        return read_json_object(self.directory / "config.json")

    def load_headers(self) -> dict[str, TensorHeader]:
        """Headers of all tensors by their names in the files. Raises ValueError or FileNotFoundError."""
        return read_headers(self.directory)

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            return self.load_config()
        except (ValueError, FileNotFoundError) as error:
            raise CheckSkipped("config.json cannot be read", "see the check `files`") from error

    @cached_property
    def headers(self) -> dict[str, TensorHeader]:
        try:
            return self.load_headers()
        except (ValueError, FileNotFoundError) as error:
            raise CheckSkipped("the weights cannot be read", "see the check `files`") from error

    @property
    def form(self) -> Form:
        return form_of(self.config)

    @property
    def decoder(self) -> dict[str, Any]:
        """The part of config.json that describes the decoder; skips where it is no object."""
        decoder = self.config.get("transformer_layer_config") if self.form == "nested" else self.config
        if not isinstance(decoder, dict):
            raise CheckSkipped("transformer_layer_config is missing", "see the check `config`")
        return decoder

    @cached_property
    def view(self) -> dict[str, Any]:
        """The fields that config.json states, by DraftConfig names; skips where there is nothing to read them from."""
        try:
            return engine_view(self.config)
        except ValueError as error:
            raise CheckSkipped(f"config.json cannot be read as a draft's: {error}", "see the check `config`") from error

    @cached_property
    def implied_config(self) -> DraftConfig:
        """The draft that config.json describes as vLLM reads it; skips where that is no possible draft."""
        try:
            return from_engine(self.config, self.verifier)
        except ValueError as error:
            raise CheckSkipped("config.json describes no possible draft", "see the check `config`") from error

    @cached_property
    def own_config(self) -> DraftConfig | None:
        """draft_config.json, None where there is none; skips where it cannot be read."""
        path = self.directory / CONFIG_NAME
        if not is_there(path):
            return None
        try:
            return DraftConfig.load(path)
        except ValueError as error:
            raise CheckSkipped(f"{CONFIG_NAME} cannot be read", "see the check `schema`") from error

    @cached_property
    def record(self) -> ExportRecord | None:
        """headrace.json, None where there is none; skips where it cannot be read."""
        path = self.directory / RECORD_NAME
        if not is_there(path):
            return None
        try:
            return ExportRecord.load(path)
        except ValueError as error:
            raise CheckSkipped(f"{RECORD_NAME} cannot be read", "see the check `schema`") from error

    @cached_property
    def canonical_headers(self) -> dict[str, TensorHeader]:
        """Headers by the speculators library's names."""
        return {canonical_name(name): header for name, header in self.headers.items()}

    @cached_property
    def weights_imply(self) -> dict[str, int]:
        """What the shapes of the weights say of the configuration; empty where the weights cannot be read."""
        try:
            return implied_numbers({name: header.shape for name, header in self.headers.items()})
        except CheckSkipped:
            return {}

    def has_tensor(self, name: str) -> bool:
        """Whether the weights can be read and have a tensor of the speculators library's name."""
        try:
            return name in self.canonical_headers
        except CheckSkipped:
            return False

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor by the speculators library's name; skips where the file has none."""
        if name not in self.canonical_headers:
            raise CheckSkipped(f"there is no {name}", "see the check `names`")
        try:
            return read_tensor(self.canonical_headers[name])
        except ValueError as error:
            raise CheckSkipped(str(error), "see the check `dtypes`") from error

    def integers(self, name: str) -> npt.NDArray[np.int64]:
        """A tensor of whole numbers, such as d2t; skips where it holds anything else."""
        tensor = self.tensor(name)
        if tensor.is_floating_point():
            raise CheckSkipped(f"{name} is {self.canonical_headers[name].dtype}", "see the check `dtypes`")
        return tensor.numpy().astype(np.int64)

    def engine_report(self) -> EngineReport:
        if self.report is None:
            raise CheckSkipped("vLLM was not asked", "run validation with vLLM installed")
        return self.report
