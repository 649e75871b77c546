"""Field-by-field comparison of any number of statements about one draft, and of what its weights themselves imply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draft.config import FILE_NAME as CONFIG_NAME
from draft.config import DraftConfig
from draft.decoder import find_foreign_parts
from draft.formats import assumptions, engine_view, form_of
from draft.jsonfile import read_json_object
from draft.tensorfiles import read_headers
from draft.tolerance import same
from draft.weights import implied_numbers

# Fields that say nothing of the draft's arithmetic.
NOT_COMPARED = ("schema_version", "layer_convention", "verifier")
IGNORED_WHERE_ABSENT = ("num_speculative_tokens", "algorithm", "dtype")


@dataclass(frozen=True)
class Statement:
    """What one file says. `stated` holds what it writes out, `assumed` what vLLM would read where it is silent."""

    source: str
    kind: str  # "draft_config", "flat" or "nested"
    stated: dict[str, Any]
    assumed: dict[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        return self.stated.get(name, self.assumed.get(name))


@dataclass(frozen=True)
class Disagreement:
    """One field on which the statements, or a statement and the weights, differ."""

    field: str
    values: dict[str, str]  # source -> what it says, for people
    weights: str | None  # what the weights imply, where they imply anything
    wrong: tuple[str, ...]  # sources that the weights contradict


def read_statement(path: Path) -> Statement:
    """Read a draft_config.json or a config.json of either form. Raises ValueError or FileNotFoundError naming it."""
    data = read_json_object(path)
    if path.name == CONFIG_NAME or "schema_version" in data:
        config = DraftConfig.load(path)
        stated = {name: value for name, value in config.model_dump().items() if value is not None}
        return Statement(str(path), "draft_config", {k: v for k, v in stated.items() if k not in NOT_COMPARED})
    foreign = find_foreign_parts(data)
    if foreign:
        raise ValueError(f"{path}: only drafts with plain Llama layers are supported, not {'; '.join(foreign)}")
    try:
        return Statement(str(path), form_of(data), engine_view(data), assumptions(data))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def collect_statements(paths: Sequence[Path]) -> list[Statement]:
    """The statements in files and directories; a directory contributes its draft_config.json and its config.json."""
    statements: list[Statement] = []
    for path in paths:
        if path.is_dir():
            inside = [path / name for name in (CONFIG_NAME, "config.json") if (path / name).is_file()]
            if not inside:
                raise FileNotFoundError(f"{path} has neither {CONFIG_NAME} nor config.json")
            statements += [read_statement(file) for file in inside]
        else:
            statements.append(read_statement(path))
    return statements


def implied_by_weights(path: Path) -> dict[str, int]:
    """What the weights in a directory imply; empty where it has none."""
    directory = path if path.is_dir() else path.parent
    if not any(directory.glob("*.safetensors")):
        return {}
    return implied_numbers({name: header.shape for name, header in read_headers(directory).items()})


def find_disagreements(statements: Sequence[Statement], weights: dict[str, int] | None = None) -> list[Disagreement]:
    """Every field that the statements, or a statement and the weights, do not agree on, in a stable order."""
    names = sorted({name for statement in statements for name in (*statement.stated, *statement.assumed)})
    return [
        disagreement for name in names if (disagreement := _compare_field(name, statements, weights or {})) is not None
    ]


def _compare_field(name: str, statements: Sequence[Statement], weights: dict[str, int]) -> Disagreement | None:
    values: dict[str, str] = {}
    wrong: list[str] = []
    distinct: list[Any] = []
    implied: str | None = None
    for statement in statements:
        value = statement.value(name)
        if value is None:
            if name in IGNORED_WHERE_ABSENT or statement.kind == "draft_config":
                continue
            values[statement.source] = "absent"
        else:
            note = "" if name in statement.stated else " (absent: vLLM reads this)"
            values[statement.source] = f"{_show(value)}{note}"
        if not any(same(value, other) for other in distinct):
            distinct.append(value)
        verdict = _implied(name, statement, weights)
        if verdict is not None:
            implied = _show(verdict)
            if not same(value, verdict):
                wrong.append(statement.source)
    if name in _NEUTRAL_WHERE_ABSENT and None in distinct:
        distinct.remove(None)
    if len(distinct) <= 1 and not wrong:
        return None
    return Disagreement(name, values, implied, tuple(wrong))


# Token ids and limits that a file may leave to the engine; they bear on no tensor.
_NEUTRAL_WHERE_ABSENT = ("bos_token_id", "eos_token_id", "pad_token_id")


def _implied(name: str, statement: Statement, weights: dict[str, int]) -> Any:
    """The value that the weights imply for a field, given what else the statement says.

    Shapes show only heads times head_dim: where the product is wrong, head_dim is blamed and not the number of heads.
    """
    heads, kv_heads = statement.value("num_attention_heads"), statement.value("num_key_value_heads")
    if name == "head_dim" and heads and "q_rows" in weights:
        return weights["q_rows"] / heads if weights["q_rows"] % heads else weights["q_rows"] // heads
    if name == "num_key_value_heads" and "kv_rows" in weights and "q_rows" in weights and heads and kv_heads:
        heads_of_kv = weights["kv_rows"] * heads / max(weights["q_rows"], 1)
        return int(heads_of_kv) if heads_of_kv.is_integer() else heads_of_kv
    if name == "aux_layer_ids" and "num_aux_layers" in weights:
        ids = statement.value(name)
        return ids if ids and len(ids) == weights["num_aux_layers"] else f"{weights['num_aux_layers']} ids"
    return weights.get(name)


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
