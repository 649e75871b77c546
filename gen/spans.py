"""Which tokens of an already answered conversation the verifier emitted: text regions to token spans.

The stored loss span covers what a verifier emits and nothing that the chat template inserts: not the role headers,
not an empty think block, not the line break after the end-of-turn token; the end-of-turn token itself is emitted.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

# How chat templates mark reasoning. An empty block is written by templates into turns that were answered without
# reasoning (Qwen3, DeepSeek-V3.1, Kimi-K2.5 and their kin); the verifier emitted none of it.
EMPTY_THINK_BLOCK = re.compile(
    r"\s*(?:<think>\s*</think>|<seed:think>\s*</seed:think>|◁think▷\s*◁/think▷|\[THINK\]\s*\[/THINK\])\s*"
)

BYTE_LEVEL_SPACE = "Ġ"

# A character has at most 4 bytes, and no tokenizer spreads one over more tokens.
MAX_TOKENS_PER_CHARACTER = 4


@dataclass(frozen=True)
class Region:
    """Half-open range of characters of the rendered conversation that holds one answer."""

    start: int
    end: int
    answer: str  # as the row gives it


def prefix_region(full: str, before: str, after: str, answer: str) -> Region | None:
    """Where one answer stands in the rendered conversation `full`.

    `before` is the rendering of the messages ahead of the answer, with the header that invites it; `after` the
    rendering up to and including the answer. None when the template renders this turn differently once later turns
    follow (it drops earlier reasoning, say): what stands there then is not what a verifier emitted.
    """
    if not full.startswith(after) or not after.startswith(before):
        return None
    return Region(len(before), len(after), answer)


def token_span(
    region: Region,
    text: str,
    token_ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    end_token_ids: Collection[int],
) -> tuple[int, int] | None:
    """The half-open range of tokens in `region` that the verifier emitted, or None when there is none.

    `token_ids` and `offsets` (see `whole_offsets`) are those of `text`. A token that straddles the region's border is
    left out.
    """
    start_char = region.start
    block = EMPTY_THINK_BLOCK.match(text, region.start, region.end)
    if block and not EMPTY_THINK_BLOCK.match(region.answer):
        start_char = block.end()
    start = bisect_left(offsets, start_char, key=lambda offset: offset[0])
    end = bisect_right(offsets, region.end, key=lambda offset: offset[1])
    for position in reversed(range(start, end)):
        if token_ids[position] in end_token_ids:
            return start, position + 1
    # A mark in the template often closes just before the end token.
    if start < end < len(token_ids) and token_ids[end] in end_token_ids:
        return start, end + 1
    # No end token: the template's white space after the answer is not the verifier's.
    if not region.answer[-1:].isspace():
        end_char = start_char + len(text[start_char : region.end].rstrip())
        end = bisect_right(offsets, end_char, key=lambda offset: offset[1])
    return (start, end) if start < end else None


def whole_offsets(offsets: Sequence[tuple[int, int]], tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Offsets as a fast tokenizer gives them, each with the leading spaces that its token stands for.

    Byte-level tokenizers leave these spaces out of the offsets (`trim_offsets`); `tokens` spell them as "Ġ".
    """
    whole = []
    previous_end = 0
    for (start, end), token in zip(offsets, tokens, strict=True):
        num_spaces = len(token) - len(token.lstrip(BYTE_LEVEL_SPACE))
        whole.append((max(start - num_spaces, min(start, previous_end)), end))
        previous_end = end
    return whole


def decoded_offsets(
    token_ids: Sequence[int], text: str, decode: Callable[[list[int]], str]
) -> list[tuple[int, int]] | None:
    """Offsets for a tokenizer that gives none, found by decoding token by token; None when that does not give `text`.

    Tokens that share one character get its offsets each.
    """
    offsets: list[tuple[int, int]] = []
    group: list[int] = []
    position = 0
    for token_id in token_ids:
        group.append(token_id)
        piece = decode(group)
        if text.startswith(piece, position):
            offsets += [(position, position + len(piece))] * len(group)
            position += len(piece)
            group = []
        elif len(group) == MAX_TOKENS_PER_CHARACTER:
            return None
    return offsets if position == len(text) and not group else None
