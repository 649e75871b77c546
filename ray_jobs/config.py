"""Loading a run configuration: YAML, then `k=v` overrides, into a pydantic model; unknown keys name the nearest one."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union

import yaml
from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def load_config(path: Path, overrides: Sequence[str], model: type[Model]) -> Model:
    """Read `path`, apply overrides in order, validate.

    An override is `dotted.key=value`; the value is YAML, so `a.b=3`, `a.b=null` and `a.b=[1, 2]` mean what they do in
    a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a YAML mapping, or naming every key that is unknown (with the nearest known one), missing
            or of a wrong value.
    """
    if not path.is_file():
        raise FileNotFoundError(f"configuration {path} does not exist")
    try:
        values = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"configuration {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"configuration {path} must be a mapping of sections, not {type(values).__name__}")
    for override in overrides:
        _apply(values, override)
    return validate_config(values, model, str(path))


def validate_config(values: Mapping[str, Any], model: type[Model], source: str) -> Model:
    """Build `model` from nested values. Raises ValueError, prefixed with `source`, naming every wrong key."""
    problems = list(_unknown_keys(values, model))
    if not problems:
        try:
            return model.model_validate(values)
        except ValidationError as error:
            problems = [_describe(detail) for detail in error.errors(include_url=False)]
    raise ValueError(f"{source}: " + "; ".join(problems))


def dump_config(settings: BaseModel, path: Path) -> None:
    """Write the resolved configuration as YAML that `load_config` reads back to an equal model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = json.loads(settings.model_dump_json())
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    temporary.replace(path)


def differing_keys(first: BaseModel, second: BaseModel, ignore: Sequence[str] = ()) -> list[str]:
    """`key: value there, value here` for each leaf in which two configurations differ; `ignore` names top sections."""
    left, right = (dict(_leaves(json.loads(settings.model_dump_json()))) for settings in (first, second))
    return [
        f"{key}: {json.dumps(left.get(key))}, now {json.dumps(right.get(key))}"
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key) and key.split(".")[0] not in ignore
    ]


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise ValueError(f"override {override!r} must look like section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is not YAML: {error}") from error
    *sections, last = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if inner is None:
            inner = values[section] = {}
        if not isinstance(inner, dict):
            raise ValueError(f"override {override!r}: {section} is a value, not a section")
        values = inner
    values[last] = value


def _unknown_keys(values: Any, annotation: Any, path: str = "") -> Iterator[str]:
    """Problems for keys that a model, however nested in lists and optional types, does not have."""
    models = [kind for kind in _alternatives(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    if isinstance(values, Mapping) and len(models) == 1:
        known = models[0].model_fields
        for key, value in values.items():
            name = f"{path}{key}"
            if key in known:
                yield from _unknown_keys(value, known[key].annotation, f"{name}.")
            else:
                yield f"unknown key {name}{_suggestion(str(key), list(known), path)}"
    elif isinstance(values, list):
        for element in _alternatives(annotation):
            if typing.get_origin(element) in (list, tuple, Sequence):
                for index, value in enumerate(values):
                    yield from _unknown_keys(value, typing.get_args(element)[0], f"{path}{index}.")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _suggestion(key: str, known: Sequence[str], path: str) -> str:
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if nearest:
        return f", did you mean {path}{nearest[0]}?"
    return f"; known here: {', '.join(known)}"


def _describe(detail: Any) -> str:
    """One pydantic error as `key: message (got value)`."""
    key = ".".join(str(part) for part in detail["loc"]) or "configuration"
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] in ("missing", "value_error"):
        return f"{key}: {message}"
    return f"{key}: {message} (got {detail['input']!r})"


def _leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, values
