"""A prompt, a row that cannot become one, and the reasons for that."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Literal

Mode = Literal["generate", "extract"]


class Reason(StrEnum):
    """Why a row has no sample. The values are stored with rejects and are never renamed."""

    NOT_JSON = "not_json"
    LINE_TOO_LONG = "line_too_long"
    INVALID_UNICODE = "invalid_unicode"
    NOT_AN_OBJECT = "not_an_object"
    DUPLICATE_FIELD = "duplicate_field"
    NO_PROMPT_FIELD = "no_prompt_field"
    TWO_PROMPT_FIELDS = "two_prompt_fields"
    MALFORMED_MESSAGES = "malformed_messages"
    UNKNOWN_ROLE = "unknown_role"
    CONTENT_NOT_TEXT = "content_not_text"
    NOT_TEXT_PROMPT = "not_text_prompt"
    TOOLS_NOT_SUPPORTED = "tools_not_supported"
    NO_USER_TURN = "no_user_turn"
    EMPTY_PROMPT = "empty_prompt"
    INVALID_ID = "invalid_id"
    DUPLICATE_ID = "duplicate_id"
    # extract mode
    NO_ANSWER = "no_answer"
    NO_LOSS_TOKENS = "no_loss_tokens"
    # found when the chat template and the tokenizer see the prompt
    TEMPLATE_ERROR = "template_error"
    TOO_LONG = "too_long"


@dataclass(frozen=True)
class Prompt:
    """One usable row of the prompt source.

    `messages` are chat messages (role, content, optionally reasoning and name). In generate mode they end with the
    first turn to answer and `later_turns` holds the user turns that follow it, each to be asked after the answer
    to the one before. In extract mode they end with the last given answer and `answered` is true.
    """

    row: int  # 0-based position in the source; for JSON lines the line number - 1
    prompt_id: str
    messages: list[dict[str, Any]]
    later_turns: list[str] = field(default_factory=list)
    category: str | None = None
    answered: bool = False

    @property
    def num_turns(self) -> int:
        """Samples that one answer to every turn of this prompt gives."""
        return 1 + len(self.later_turns)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Prompt:
        return cls(**data)


@dataclass(frozen=True)
class BadRow:
    """A row of the prompt source that cannot be a sample; it ends as a recorded reject."""

    row: int
    prompt_id: str | None
    reason: Reason
    detail: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BadRow:
        return cls(**{**data, "reason": Reason(data["reason"])})


class RowError(ValueError):
    """A row cannot become a prompt. Carries the stable reason code beside the message for people."""

    def __init__(self, reason: Reason, detail: str) -> None:
        # Both arguments go to the base class, so that the error survives pickling.
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return self.detail
