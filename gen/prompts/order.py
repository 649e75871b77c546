"""The order of a prompt source and its digest: what a data set's identity records about its prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from gen.prompts.types import BadRow, Prompt

T = TypeVar("T")


def shuffled(items: Sequence[T], seed: int, *, key: Callable[[T], int]) -> list[T]:
    """The items in an order that depends on the seed and their rows (`key`) alone.

    They are sorted by a hash of (seed, row), so that no release of a random number library can change the order
    under a data set that is half generated.
    """
    return sorted(items, key=lambda item: hashlib.blake2b(b"%d:%d" % (seed, key(item)), digest_size=16).digest())


class SourceDigest:
    """Digest and counts of the items in their order; feed it every item once, good or bad."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256(b"headrace prompts 1\n")
        self.num_prompts = 0
        self.num_bad_rows = 0

    def update(self, item: Prompt | BadRow) -> None:
        kind = "prompt" if isinstance(item, Prompt) else "bad"
        content = item.to_json()
        content.pop("detail", None)  # wording may improve, the decision is what counts
        line = json.dumps([kind, content], ensure_ascii=True, sort_keys=True, separators=(",", ":"))
        self._sha256.update(line.encode() + b"\n")
        self.num_prompts += kind == "prompt"
        self.num_bad_rows += kind == "bad"

    def identity(self) -> dict[str, int | str]:
        """The part of a data set's identity that says which prompts, in which order."""
        return {
            "digest": "sha256:" + self._sha256.hexdigest(),
            "num_prompts": self.num_prompts,
            "num_bad_rows": self.num_bad_rows,
        }
