"""Random damage to a draft's directory: configuration, header and data of the weights, and the file system itself."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from draft_helpers import edit_config, edit_tensors, seal

from draft.checkpoint import MODEL_NAME

STRANGE_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 1.5, 1e-5, 10**12, 2**63, float("nan"), float("inf")),
    *("", "576", "silu", "gelu", "llama", "yarn", [], [2, 15, 27], [1, 14, 26], [27, 15, 2], [2, 15, 30], {}, {"a": 1}),
]
DTYPES = [torch.float32, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int32, torch.int64, torch.bool]
CONFIG_FILES = ["config.json", "draft_config.json", "headrace.json"]
# Fields that engines read and that a writer may get wrong, beside those that the file has.
EXTRA_FIELDS = [
    *("layer_types", "sliding_window", "use_sliding_window", "is_causal", "logit_scale", "qkv_bias", "bias"),
    *("quantization_config", "partial_rotary_factor", "kv_lora_rank", "num_local_experts", "n_predict", "auto_map"),
]


def corrupt(draft: Path, seed: int) -> str:
    """Damage `draft` in one way that `seed` chooses; returns what was done."""
    choice = random.Random(seed)
    damage = choice.choice(DAMAGES)
    return f"{damage.__name__}: {damage(draft, choice)}"


def _objects(value: Any) -> list[dict[str, Any]]:
    """The object and every object inside it."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    found = [value] if isinstance(value, dict) and value else []
    return found + [inner for item in inside for inner in _objects(item)]


def change_field(draft: Path, choice: random.Random) -> str:
    said = ""

    def change(data: dict[str, Any]) -> None:
        nonlocal said
        target = choice.choice(_objects(data))
        name = choice.choice([*target, *EXTRA_FIELDS])
        target[name] = choice.choice(STRANGE_VALUES)
        said = f"{name} = {target[name]!r}"

    file = choice.choice(CONFIG_FILES)
    edit_config(draft, change, file)
    return f"{file} {said}"


def drop_field(draft: Path, choice: random.Random) -> str:
    said = ""

    def drop(data: dict[str, Any]) -> None:
        nonlocal said
        target = choice.choice(_objects(data))
        said = choice.choice(list(target))
        del target[said]

    file = choice.choice(CONFIG_FILES)
    edit_config(draft, drop, file)
    return f"{file} {said}"


def flip_config_byte(draft: Path, choice: random.Random) -> str:
    return _flip(draft / choice.choice(CONFIG_FILES), choice, 0, None)


def flip_header_byte(draft: Path, choice: random.Random) -> str:
    weights = draft / MODEL_NAME
    [length] = struct.unpack("<Q", weights.read_bytes()[:8])
    said = _flip(weights, choice, 0, 8 + length)
    seal(draft)
    return said


def flip_data_byte(draft: Path, choice: random.Random) -> str:
    weights = draft / MODEL_NAME
    [length] = struct.unpack("<Q", weights.read_bytes()[:8])
    said = _flip(weights, choice, 8 + length, None)
    seal(draft)
    return said


def _flip(file: Path, choice: random.Random, first: int, last: int | None) -> str:
    content = bytearray(file.read_bytes())
    position = choice.randrange(first, last or len(content))
    content[position] ^= 1 << choice.randrange(8)
    file.write_bytes(content)
    return f"{file.name} byte {position}"


def cut(draft: Path, choice: random.Random) -> str:
    file = draft / choice.choice([MODEL_NAME, *CONFIG_FILES])
    content = file.read_bytes()
    kept = choice.choice([0, 1, 7, 8, len(content) // 2, len(content) - 1])
    file.write_bytes(content[:kept])
    seal(draft) if file.name == MODEL_NAME else None
    return f"{file.name} to {kept} bytes"


def change_tensor(draft: Path, choice: random.Random) -> str:
    said = ""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        nonlocal said
        name = choice.choice(list(tensors))
        tensor = tensors[name]
        ways: list[Callable[[], object]] = [
            lambda: tensors.pop(name),
            lambda: tensors.update({f"x.{name}": tensors.pop(name)}),
            lambda: tensors.update({name.replace("midlayer.", "layers.0."): tensors.pop(name)}),
            lambda: tensors.update({f"{name}.bias": torch.zeros(3)}),
            lambda: tensors.update({name: tensor.to(choice.choice(DTYPES))}),
            lambda: tensors.update({name: tensor[:-1]}),
            lambda: tensors.update({name: tensor.flatten()}),
            lambda: tensors.update({name: tensor.T.contiguous() if tensor.dim() == 2 else tensor.unsqueeze(0)}),
            lambda: tensors.update({name: torch.zeros_like(tensor)}),
            lambda: tensors.update({name: tensor[:0]}),
            lambda: tensors.update({choice.choice(list(tensors)): tensor.clone()}),
        ]
        number = choice.randrange(len(ways))
        ways[number]()
        said = f"{name}, way {number}"

    edit_tensors(draft, change)
    return said


def change_files(draft: Path, choice: random.Random) -> str:
    file = draft / choice.choice([MODEL_NAME, *CONFIG_FILES])
    way = choice.choice(["directory", "loop", "absent", "binary", "index", "list"])
    if way == "index":
        (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "b.safetensors"}}))
        return way
    file.unlink()
    if way == "directory":
        file.mkdir()
    elif way == "loop":
        file.symlink_to(file.name)
    elif way == "binary":
        file.write_bytes(choice.randbytes(300))
    elif way == "list":
        file.write_text("[1, 2]")
    return f"{way} {file.name}"


def copy_and_corrupt(sound: Path, broken: Path, seed: int) -> str:
    shutil.copytree(sound, broken)
    return corrupt(broken, seed)


DAMAGES: list[Callable[[Path, random.Random], str]] = [
    *(change_field, change_field, change_field, drop_field, flip_config_byte, flip_header_byte, flip_data_byte),
    *(cut, change_tensor, change_tensor, change_files),
]
