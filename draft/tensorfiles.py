"""A draft directory's safetensors files: names, shapes and dtypes from the headers, and the tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draft.weights import canonical_name

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as a file's header describes it; dtype is safetensors' name ("BF16", "I64")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path


def weight_files(directory: Path) -> list[Path]:
    """The files that vLLM would load: every *.safetensors in the directory. Raises FileNotFoundError without any."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors file")
    return files


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """All tensors of the directory by their names in the files.

    Raises ValueError for a file that is torn or no safetensors, and for a name that two files have.
    """
    from safetensors import SafetensorError, safe_open

    headers: dict[str, TensorHeader] = {}
    for file in weight_files(directory):
        try:
            with safe_open(file, framework="np") as content:
                for name in content.keys():  # noqa: SIM118 (safe_open is no mapping)
                    tensor = content.get_slice(name)
                    if name in headers:
                        raise ValueError(f"{name} is in {headers[name].file.name} and in {file.name}")
                    headers[name] = TensorHeader(name, tuple(tensor.get_shape()), str(tensor.get_dtype()), file)
        except SafetensorError as error:
            raise ValueError(f"{file} is no whole safetensors file: {error}") from error
    return headers


def read_tensor(header: TensorHeader) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(header.file, framework="pt") as content:
        return content.get_tensor(header.name)


def read_canonical(headers: Mapping[str, TensorHeader]) -> dict[str, torch.Tensor]:
    """All tensors by the speculators library's names."""
    return {canonical_name(name): read_tensor(header) for name, header in headers.items()}
