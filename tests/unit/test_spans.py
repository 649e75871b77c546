"""Text regions become token spans of what a verifier emits, with tokenizers that merge across borders."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen.spans import Region, decoded_offsets, prefix_region, token_span, whole_offsets

END = 0
VOCABULARY = ["<end>", "<think>", "</think>", "\n\n", " the", "ab"]
PIECES = re.compile("|".join(map(re.escape, VOCABULARY)) + "|.", re.DOTALL)


def encode(text: str) -> list[int]:
    """A greedy tokenizer that merges some neighbours, line breaks among them."""
    return [VOCABULARY.index(piece) if piece in VOCABULARY else 100 + ord(piece) for piece in PIECES.findall(text)]


def decode(token_ids: list[int]) -> str:
    return "".join(VOCABULARY[i] if i < 100 else chr(i - 100) for i in token_ids)


def offsets_of(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in PIECES.finditer(text)]


def span_text(text: str, region: Region) -> str | None:
    token_ids = encode(text)
    span = token_span(region, text, token_ids, offsets_of(text), {END})
    return None if span is None else decode(token_ids[span[0] : span[1]])


@pytest.mark.parametrize(
    ("inside", "answer", "expected"),
    [
        ("hello<end>\n", "hello", "hello<end>"),  # the line break after the end token is the template's
        ("<think>\n\n</think>\n\nhello<end>\n", "hello", "hello<end>"),  # so is an empty think block
        ("<think></think>hello<end>", "hello", "hello<end>"),
        ("<think>\nwhy\n</think>\n\nhello<end>\n", "hello", "<think>\nwhy\n</think>\n\nhello<end>"),
        # A block that the answer itself has was emitted.
        ("<think></think>hi<end>\n", "<think></think>hi", "<think></think>hi<end>"),
        ("<end>\n", "", "<end>"),  # an empty answer is its end token
        ("hello\n", "hello", "hello"),  # a template without end tokens
        ("hello \n", "hello \n", "hello \n"),  # white space that the answer has
        ("a<end>b<end>\n", "a<end>b", "a<end>b<end>"),  # an end token inside the answer is no end
        ("\n", "", None),
        ("", "", None),
    ],
)
def test_emitted_part(inside: str, answer: str, expected: str | None) -> None:
    before, after = "Q: x<end>\nA:", "Q: next"
    text = before + inside + after
    start = len(before)
    assert span_text(text, Region(start, start + len(inside), answer)) == expected


def test_token_across_the_border_is_left_out() -> None:
    # The header ends in a line break and the answer begins with one: the tokenizer makes one token of both.
    text = "A:\n\nhello<end>\n"
    assert encode("\n\n") == [VOCABULARY.index("\n\n")]
    assert span_text(text, Region(3, len(text), "\nhello")) == "hello<end>"
    assert span_text("A:\n\n", Region(3, 4, "\n")) is None


def test_prefix_region() -> None:
    assert prefix_region("Qx Ay Qz", "Qx A", "Qx Ay", "y") == Region(4, 5, "y")
    # Rewritten once a later turn follows, or not built upon the invitation at all.
    assert prefix_region("Qx y Qz", "Qx A", "Qx Ay", "y") is None
    assert prefix_region("Qx B", "Qx A", "Qx B", "y") is None


def test_end_token_behind_a_mark_is_taken_in() -> None:
    text = "A:hello<end>\nmore"
    assert span_text(text, Region(2, 7, "hello")) == "hello<end>"
    assert span_text("A:hello\n<end>", Region(2, 7, "hello")) == "hello"
    assert span_text("A:hello", Region(2, 7, "hello")) == "hello"


def test_offsets_without_leading_spaces_are_made_whole() -> None:
    # As a byte-level tokenizer reports "a b  c" and one character that two tokens share.
    trimmed = [(0, 1), (2, 3), (5, 5), (5, 6), (6, 7), (6, 7)]
    whole = [(0, 1), (1, 3), (3, 5), (5, 6), (6, 7), (6, 7)]
    assert whole_offsets(trimmed, ["a", "Ġb", "ĠĠ", "c", "ð", "Ł"]) == whole
    assert whole_offsets(whole, ["a", "Ġb", "ĠĠ", "c", "ð", "Ł"]) == whole  # a tokenizer that does not trim
    # White space that a tokenizer drops belongs to no token.
    assert whole_offsets([(0, 1), (2, 3)], ["a", "b"]) == [(0, 1), (2, 3)]


@given(st.text(max_size=20))
def test_offsets_by_decoding(text: str) -> None:
    # One token a byte, so that characters are spread over tokens.
    token_ids = list(text.encode("utf-8", "replace"))
    text = bytes(token_ids).decode()
    expected = [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]
    assert decoded_offsets(token_ids, text, lambda ids: bytes(ids).decode(errors="replace")) == expected


def test_offsets_that_decoding_cannot_give() -> None:
    def lossy(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace").lower()

    assert decoded_offsets(list(b"abCde"), "abCde", lossy) is None
    assert decoded_offsets(list(b"ab"), "abc", lossy) is None


pieces = st.lists(st.sampled_from([*VOCABULARY[1:], "a", "b", "\n", " ", "x"]), max_size=8).map("".join)


@given(before=pieces, answer=pieces, after=pieces)
def test_span_holds_the_answer_and_nothing_else(before: str, answer: str, after: str) -> None:
    text = f"{before}:{answer}<end>\n{after}"
    start = len(before) + 1
    found = span_text(text, Region(start, start + len(answer) + 6, answer))
    # The header ends in a character that merges with nothing, so not one token of the answer is lost.
    assert found == answer + "<end>"
