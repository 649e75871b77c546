"""Where rows come from: JSON lines (plain, gzip, zstd), the built-in prompts, or the `datasets` library."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from gen.prompts.types import Reason, RowError

BUILTIN = "builtin:"
BUILTIN_SPLITS = ("train", "heldout")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
COMPRESSIONS = (".gz", ".zst")
TABLE_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".arrow": "arrow"}

# Longer lines are rejected instead of being held in memory; 64 MiB is beyond any context window in use.
MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class Undecodable:
    """A line that is no row at all."""

    reason: Reason
    detail: str


def iter_rows(
    source: str, *, split: str | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[int, Any]]:
    """(row, decoded row or Undecodable) of every row of `source`, in order.

    Raises FileNotFoundError and ValueError at once, not at the first row.
    """
    path = Path(source)
    if source.startswith(BUILTIN):
        name = source.removeprefix(BUILTIN)
        if name not in BUILTIN_SPLITS:
            known = " and ".join(BUILTIN + s for s in BUILTIN_SPLITS)
            raise ValueError(f"prompts.source {source!r}: the built-in prompts are {known}")
        return _json_lines(files("gen.builtin_prompts").joinpath(f"{name}.jsonl").open("rb"), max_line_bytes)
    if _is_json_lines(path):
        if not path.is_file():
            raise FileNotFoundError(f"prompts.source {source!r}: there is no such file")
        return _json_lines(_open(path), max_line_bytes)
    return enumerate(_dataset_rows(source, path, split))


def _is_json_lines(path: Path) -> bool:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    if not suffixes:
        return False
    if suffixes[-1] in JSON_LINES_SUFFIXES:
        return True
    # `.json` may hold one array or, often enough, JSON lines: the first character tells.
    if suffixes[-1] == ".json" and path.is_file():
        with _open(path) as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"["
    return False


def _open(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"))
    if suffix == ".zst":
        import zstandard

        stream = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return io.BufferedReader(stream)
    return path.open("rb")


def _json_lines(file: IO[bytes], max_line_bytes: int) -> Iterator[tuple[int, Any]]:
    with file:
        row = -1
        while line := file.readline(max_line_bytes + 1):
            row += 1
            if len(line) > max_line_bytes and not line.endswith(b"\n"):
                length = len(line)
                while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
                    length += len(line)
                detail = f"the line has {length} bytes, more than {max_line_bytes}"
                yield row, Undecodable(Reason.LINE_TOO_LONG, detail)
                continue
            if row == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            line = line.strip()
            if line:
                yield row, _decode(line)


def _decode(line: bytes) -> Any:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return Undecodable(Reason.INVALID_UNICODE, f"not UTF-8: {error.reason} at byte {error.start} of the line")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_fields)
    except RowError as error:
        return Undecodable(error.reason, error.detail)
    except json.JSONDecodeError as error:
        return Undecodable(Reason.NOT_JSON, f"{error.msg} at character {error.pos} of the line")
    except ValueError as error:  # an integer of more digits than Python converts
        return Undecodable(Reason.NOT_JSON, str(error))
    except RecursionError:
        return Undecodable(Reason.NOT_JSON, "nested too deeply")


def _refuse_constant(name: str) -> Any:
    raise RowError(Reason.NOT_JSON, f"{name} is not JSON")


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(Reason.DUPLICATE_FIELD, f"the field {twice[:40]!a} is given twice")
    return fields


def _dataset_rows(source: str, path: Path, split: str | None) -> Iterator[Any]:
    from datasets import load_dataset, load_from_disk

    if (path / "dataset_info.json").is_file():
        return iter(load_from_disk(str(path)))
    if (path / "dataset_dict.json").is_file():
        splits = load_from_disk(str(path))
        if (split or "train") not in splits:
            raise ValueError(f"prompts.split {split or 'train'!r} is not in {source}: it has {', '.join(splits)}")
        return iter(splits[split or "train"])
    if path.is_file():
        builder = TABLE_BUILDERS.get(path.suffix.lower())
        if builder is None:
            known = ", ".join([*JSON_LINES_SUFFIXES, *TABLE_BUILDERS])
            raise ValueError(f"prompts.source {source!r}: the file's name must end in one of {known}")
        return iter(load_dataset(builder, data_files=str(path), split=split or "train", streaming=True))
    return iter(load_dataset(source, split=split or "train", streaming=True))
