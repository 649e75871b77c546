"""The scanned prompts of a job on local disk: written once in order, then read a unit at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from gen.prompts import BadRow, Prompt

SCHEMA = pa.schema([("kind", pa.string()), ("row", pa.string())])
BATCH_ROWS = 1024


class PromptSpool:
    """Prompts and bad rows in an Arrow file that is memory-mapped, so that millions of prompts cost no memory."""

    def __init__(self, path: Path) -> None:
        self._source = pa.memory_map(str(path))
        self._table = pa.ipc.open_file(self._source).read_all()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __enter__(self) -> PromptSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._source.close()

    def rows(self, positions: Sequence[int]) -> list[Prompt | BadRow]:
        """The rows at these positions of the source, in the given order."""
        kinds: dict[str, type[Prompt] | type[BadRow]] = {"Prompt": Prompt, "BadRow": BadRow}
        table = self._table.take(pa.array(positions, pa.int64()))
        return [
            kinds[kind].from_json(json.loads(row))
            for kind, row in zip(table["kind"].to_pylist(), table["row"].to_pylist(), strict=True)
        ]

    @staticmethod
    def write(path: Path, rows: Iterable[Prompt | BadRow]) -> None:
        """Write rows in order; holds one batch in memory."""
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            for batch in _batches(rows):
                kinds = [type(row).__name__ for row in batch]
                writer.write_batch(
                    pa.record_batch([kinds, [json.dumps(row.to_json()) for row in batch]], schema=SCHEMA)
                )


def _batches(rows: Iterable[Prompt | BadRow]) -> Iterator[list[Prompt | BadRow]]:
    batch: list[Prompt | BadRow] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch
