"""Reading prompts: every row of a source ends as a Prompt or as a BadRow, in order, one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from gen.prompts.rows import given_id, parse_row
from gen.prompts.sources import MAX_LINE_BYTES, Undecodable, iter_rows
from gen.prompts.types import BadRow, Mode, Prompt, Reason, RowError


def read_prompts(
    source: str,
    *,
    split: str | None = None,
    mode: Mode = "generate",
    limit: int | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Prompt | BadRow]:
    """Stream the rows of `source` as prompts and bad rows.

    `source` is `builtin:train`, `builtin:heldout`, a JSON lines file (also .gz and .zst), or whatever the `datasets`
    library opens: a Parquet or CSV file, a folder, a hub name; `split` (default "train") is for those. `limit` stops
    after that many rows, bad ones included. A later row with an id seen before is a bad row. Memory grows by about
    150 bytes a row (the digests of the ids seen).

    Raises ValueError for an unknown mode or split and FileNotFoundError for a source that is not there.
    """
    if mode not in ("generate", "extract"):
        raise ValueError(f"mode {mode!r} must be 'generate' or 'extract'")
    if limit is not None and limit < 1:
        raise ValueError(f"prompts.limit {limit} must be positive; leave it out to read every row")
    return _read(iter_rows(source, split=split, max_line_bytes=max_line_bytes), mode, limit)


def _read(rows: Iterator[tuple[int, object]], mode: Mode, limit: int | None) -> Iterator[Prompt | BadRow]:
    row_by_id: dict[bytes, int] = {}
    for count, (row, record) in enumerate(rows):
        if count == limit:
            return
        result = _parse(row, record, mode)
        if isinstance(result, Prompt):
            key = hashlib.blake2b(result.prompt_id.encode(), digest_size=16).digest()
            first = row_by_id.setdefault(key, row)
            if first != row:
                detail = f"id {result.prompt_id!r} was already used by row {first}"
                result = BadRow(row, result.prompt_id, Reason.DUPLICATE_ID, detail)
        yield result


def _parse(row: int, record: object, mode: Mode) -> Prompt | BadRow:
    if isinstance(record, Undecodable):
        return BadRow(row, None, record.reason, record.detail)
    try:
        return parse_row(row, record, mode)
    except RowError as error:
        return BadRow(row, _known_id(record), error.reason, error.detail)


def _known_id(record: object) -> str | None:
    try:
        return given_id(record)
    except RowError:
        return None
