"""One decoded row to one prompt: which field holds it, which roles, which text, which id."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from gen.prompts.types import Mode, Prompt, Reason, RowError

PROMPT_FIELDS = ("messages", "prompt", "conversations", "turns")

# ShareGPT and its descendants (open-perfectblend among them) name the speakers of `conversations` in these ways.
SPEAKER_ROLES = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
}
ROLES = ("system", "developer", "user", "assistant")
TOOL_ROLES = ("tool", "function", "function_call", "observation", "ipython")
TOOL_FIELDS = ("tools", "functions", "tool_calls", "function_call")


@dataclass(frozen=True)
class _Conversation:
    messages: list[dict[str, Any]]
    later_turns: list[str]


def parse_row(row: int, record: Any, mode: Mode) -> Prompt:
    """The prompt in one decoded row of the source.

    A field whose value is null counts as absent: tables fill missing columns with nulls. Fields that are not named
    here are ignored. In generate mode trailing assistant messages are dropped, so the sample answers the last user
    turn; in extract mode messages after the last answer are dropped.

    Raises RowError with the reason when the row cannot be a prompt.
    """
    if not isinstance(record, dict):
        raise RowError(Reason.NOT_AN_OBJECT, f"a row is an object with a prompt field, got {_kind(record)}")
    for name in TOOL_FIELDS:
        if record.get(name):
            raise RowError(Reason.TOOLS_NOT_SUPPORTED, f"field {name!r}: prompts with tools cannot be rendered")
    conversation = _conversation(record)
    prompt_id = given_id(record)
    if prompt_id is None:
        prompt_id = _content_id(conversation)
    category = record.get("category")
    if category is not None:
        category = _clean(str(category), "category")
    messages, answered = _select(conversation, mode)
    return Prompt(row, prompt_id, messages, conversation.later_turns, category, answered)


def given_id(record: Any) -> str | None:
    """The id that the row itself names, as a string, or None. Raises RowError when it is not a string or integer."""
    value = record.get("id") if isinstance(record, dict) else None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RowError(Reason.INVALID_ID, f"id must be a non-empty string or an integer, got {_kind(value)}")
    return _clean(str(value), "id")


def _conversation(record: dict[str, Any]) -> _Conversation:
    present = [name for name in PROMPT_FIELDS if record.get(name) is not None]
    if not present:
        raise RowError(Reason.NO_PROMPT_FIELD, f"none of the fields {', '.join(PROMPT_FIELDS)} is set")
    if len(present) > 1:
        raise RowError(Reason.TWO_PROMPT_FIELDS, f"the fields {' and '.join(present)} are both set: which is it?")
    name = present[0]
    value = record[name]
    if name == "prompt":
        return _Conversation([{"role": "user", "content": _text(value, "prompt")}], [])
    if not isinstance(value, list | tuple):
        raise RowError(Reason.MALFORMED_MESSAGES, f"{name} must be a list, got {_kind(value)}")
    if name == "turns":
        if not value:
            raise RowError(Reason.NO_USER_TURN, "turns is empty")
        turns = [_text(turn, f"turns[{i}]") for i, turn in enumerate(value)]
        for i, turn in enumerate(turns):
            if not turn.strip():
                raise RowError(Reason.EMPTY_PROMPT, f"turns[{i}] is blank")
        return _Conversation([{"role": "user", "content": turns[0]}], turns[1:])
    return _Conversation([_message(entry, name, i) for i, entry in enumerate(value)], [])


def _message(entry: Any, name: str, index: int) -> dict[str, Any]:
    where = f"{name}[{index}]"
    if not isinstance(entry, dict):
        raise RowError(Reason.MALFORMED_MESSAGES, f"{where} must be an object, got {_kind(entry)}")
    role_key, content_key = "role", "content"
    if name == "conversations" and entry.get("from") is not None:
        role_key, content_key = "from", "value"
    speaker = entry.get(role_key)
    if not isinstance(speaker, str):
        raise RowError(Reason.UNKNOWN_ROLE, f"{where}.{role_key} must be a string, got {_kind(speaker)}")
    if speaker in TOOL_ROLES:
        raise RowError(
            Reason.TOOLS_NOT_SUPPORTED, f"{where}.{role_key} is {speaker!r}: prompts with tools cannot be used"
        )
    role = SPEAKER_ROLES.get(speaker) if name == "conversations" else speaker
    if role not in ROLES:
        known = ", ".join(SPEAKER_ROLES if name == "conversations" else ROLES)
        raise RowError(Reason.UNKNOWN_ROLE, f"{where}.{role_key} is {_shown(speaker)}, known are {known}")
    for field in TOOL_FIELDS:
        if entry.get(field):
            raise RowError(Reason.TOOLS_NOT_SUPPORTED, f"{where}.{field}: prompts with tools cannot be rendered")
    message: dict[str, Any] = {"role": role, "content": _content(entry.get(content_key), f"{where}.{content_key}")}
    # Both names are in use; where both are set the newer one counts, as in vLLM's chat endpoint.
    reasoning = entry.get("reasoning") if entry.get("reasoning") is not None else entry.get("reasoning_content")
    if reasoning is not None:
        message["reasoning"] = _text(reasoning, f"{where}.reasoning")
    if isinstance(entry.get("name"), str):
        message["name"] = _clean(entry["name"], f"{where}.name")
    return message


def _content(value: Any, where: str) -> str | list[dict[str, str]]:
    """Message text, or text parts left as parts: joining them is the chat template's affair."""
    if isinstance(value, str):
        return _clean(value, where)
    if not isinstance(value, list | tuple):
        raise RowError(Reason.CONTENT_NOT_TEXT, f"{where} must be text or a list of text parts, got {_kind(value)}")
    parts = []
    for i, part in enumerate(value):
        if isinstance(part, str):
            parts.append({"type": "text", "text": _clean(part, f"{where}[{i}]")})
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RowError(Reason.CONTENT_NOT_TEXT, f"{where}[{i}] must be a part with a type, got {_kind(part)}")
        if kind != "text":
            raise RowError(Reason.NOT_TEXT_PROMPT, f"{where}[{i}] is of type {_shown(kind)}: only text is read")
        parts.append({"type": "text", "text": _text(part.get("text"), f"{where}[{i}].text")})
    return parts


def _select(conversation: _Conversation, mode: Mode) -> tuple[list[dict[str, Any]], bool]:
    messages = list(conversation.messages)
    if not any(message["role"] == "user" for message in messages):
        raise RowError(Reason.NO_USER_TURN, "no message has the role user")
    if mode == "extract":
        while messages and messages[-1]["role"] != "assistant":
            last = messages.pop()
            if not messages and not plain_text(last["content"]).strip():
                raise RowError(Reason.EMPTY_PROMPT, "the only message is blank")
        if not any(message["role"] == "user" for message in messages):
            raise RowError(Reason.NO_ANSWER, "extract mode needs an assistant message after a user message")
        return messages, True
    while messages[-1]["role"] == "assistant":
        messages.pop()
    last = messages[-1]
    if last["role"] != "user":
        raise RowError(Reason.NO_USER_TURN, f"the turn to answer has the role {last['role']}, not user")
    if not plain_text(last["content"]).strip():
        raise RowError(Reason.EMPTY_PROMPT, "the user turn to answer is blank")
    return messages, False


def plain_text(content: str | list[dict[str, str]]) -> str:
    """The characters of a message's content, its parts in a row."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _content_id(conversation: _Conversation) -> str:
    """An id for a row without one: equal content gives equal ids, in either mode and whichever field held it."""
    content = json.dumps([conversation.messages, conversation.later_turns], ensure_ascii=True, sort_keys=True)
    return "content-" + hashlib.sha256(content.encode()).hexdigest()[:32]


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RowError(Reason.CONTENT_NOT_TEXT, f"{where} must be text, got {_kind(value)}")
    return _clean(value, where)


def _clean(text: str, where: str) -> str:
    """The text itself. JSON can spell lone surrogates, which no tokenizer and no Parquet file can take."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(Reason.INVALID_UNICODE, f"{where}: {error.reason} at character {error.start}") from error
    return text


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__}"


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 40 else text[:40] + "...")
