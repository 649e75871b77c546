"""A draft directory's safetensors files: names, shapes and dtypes from the headers, and the tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draft.jsonfile import read_json_object
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


INDEX_NAME = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """The files that vLLM would load: those of the index where there is one, else every *.safetensors.

    Raises FileNotFoundError without any, ValueError for an index that names files which are not there.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        why = f", only {', '.join(pickled)}: save the tensors as safetensors, pickles are not read" if pickled else ""
        raise FileNotFoundError(f"{directory} has no *.safetensors file{why}")
    if not (directory / INDEX_NAME).exists():
        return files
    listed = read_json_object(directory / INDEX_NAME).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{directory / INDEX_NAME} has no weight_map")
    wanted = {str(name) for name in listed.values()}
    missing = sorted(wanted - {file.name for file in files})
    if missing:
        raise ValueError(f"{directory / INDEX_NAME} names files that are not there: {', '.join(missing)}")
    return [file for file in files if file.name in wanted]


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """All tensors of the directory by their names in the files.

    Raises ValueError for a file that is torn or no safetensors, and for a name that two files have.
    """
    from safetensors import SafetensorError, safe_open

    headers: dict[str, TensorHeader] = {}
    for file in weight_files(directory):
        if not file.is_file():
            raise ValueError(f"{file} is no file")
        try:
            with safe_open(file, framework="np") as content:
                for name in content.keys():  # noqa: SIM118 (safe_open is no mapping)
                    tensor = content.get_slice(name)
                    if name in headers:
                        raise ValueError(f"{name} is in {headers[name].file.name} and in {file.name}")
                    headers[name] = TensorHeader(name, tuple(tensor.get_shape()), str(tensor.get_dtype()), file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is no whole safetensors file: {error}") from error
    return headers


# What safetensors' names mean in torch; a draft has no use for the others (complex numbers, packed 4-bit floats).
READABLE_DTYPES = ("BOOL", "U8", "I8", "I16", "I32", "I64", "F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64")


def read_tensor(header: TensorHeader) -> torch.Tensor:
    """Raises ValueError for a dtype that no draft has."""
    from safetensors import safe_open

    if header.dtype not in READABLE_DTYPES:
        raise ValueError(f"{header.name} is {header.dtype}, which no draft holds")
    with safe_open(header.file, framework="pt") as content:
        return content.get_tensor(header.name)


def read_canonical(headers: Mapping[str, TensorHeader]) -> dict[str, torch.Tensor]:
    """All tensors by the speculators library's names."""
    return {canonical_name(name): read_tensor(header) for name, header in headers.items()}
