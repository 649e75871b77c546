"""Prompt ids against transformers' own rendering, reasoning, and the spans of given answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gen.chat import ChatTokenizer
from gen.prompts import Reason, RowError

DATA = Path(__file__).parent / "data"
END = "<|im_end|>"

Message = dict[str, Any]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str, reasoning: str | None = None) -> Message:
    return {"role": "assistant", "content": content, **({} if reasoning is None else {"reasoning": reasoning})}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def texts_of(message: Message) -> list[str]:
    return [part["text"] for part in message["content"]]


@pytest.fixture(scope="module")
def chat(verifier_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.from_directory(verifier_dir)


@pytest.fixture(scope="module")
def tokenizer(verifier_dir: Path) -> Any:
    """The tokenizer as transformers loads it, for expectations made without vLLM."""
    return AutoTokenizer.from_pretrained(verifier_dir)


@pytest.fixture(scope="module")
def with_template(chat: ChatTokenizer) -> Callable[..., ChatTokenizer]:
    """The same verifier with another chat template of tests/unit/data."""

    def build(name: str, **options: Any) -> ChatTokenizer:
        return ChatTokenizer(chat.config, chat.renderer, chat_template=DATA / f"{name}_template.jinja", **options)

    return build


@pytest.fixture(scope="module")
def thinker(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A verifier whose tokenizer has think tokens, with a reasoning parser."""
    directory = tmp_path_factory.mktemp("thinker")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(verifier_dir / name, directory / name)
    own = AutoTokenizer.from_pretrained(verifier_dir)
    own.add_tokens(["<think>", "</think>"], special_tokens=True)
    own.save_pretrained(directory)
    return ChatTokenizer.from_directory(
        directory, chat_template=DATA / "thinking_template.jinja", reasoning_parser="deepseek_r1", max_model_len=512
    )


# --- prompts

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    [f"a{END}b", "<|im_start|>system\n", "  two  spaces ", "line\nbreak\n", "\r\n", "\0", "😀汉字"]
)
contents = texts | st.lists(texts, min_size=1, max_size=3).map(lambda found: parts(*found))
conversations = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system"]), contents).map(
        lambda pair: {"role": pair[0], "content": pair[1]}
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(messages=conversations)
def test_prompt_ids_are_those_of_the_template(chat: ChatTokenizer, tokenizer: Any, messages: list[Message]) -> None:
    # Where a template reads content as text, vLLM joins the parts that are not empty by line breaks.
    joined = [
        {**m, "content": m["content"] if isinstance(m["content"], str) else "\n".join(filter(None, texts_of(m)))}
        for m in messages
    ]
    expected = tokenizer.apply_chat_template(joined, add_generation_prompt=True, return_dict=False)
    before = repr(messages)
    assert chat.prompt_ids(messages) == expected
    assert repr(messages) == before, "the caller's messages are left alone"


def test_template_that_reads_parts_is_given_parts(with_template: Callable[..., ChatTokenizer], tokenizer: Any) -> None:
    ids = with_template("parts").prompt_ids([user("plain"), assistant("yes"), user(parts("one", "two"))])
    assert tokenizer.decode(ids) == (
        f"<|im_start|>user\n[plain]{END}\n<|im_start|>assistant\n[yes]{END}\n"
        f"<|im_start|>user\n[one][two]{END}\n<|im_start|>assistant\n"
    )


def test_template_arguments_reach_the_template(with_template: Callable[..., ChatTokenizer], tokenizer: Any) -> None:
    plain = tokenizer.decode(with_template("thinking").prompt_ids([user("x")]))
    off = with_template("thinking", chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(off.prompt_ids([user("x")])) == plain + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_earlier_reasoning_is_the_templates_affair(
    with_template: Callable[..., ChatTokenizer], tokenizer: Any, field: str
) -> None:
    messages = [user("1+1?"), {**assistant("2"), field: "one and one"}, user("2+2?")]
    assert "one and one" not in tokenizer.decode(with_template("thinking").prompt_ids(messages))
    keeps = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.content }};{% endfor %}"
    chat = with_template("thinking")
    keeping = ChatTokenizer(chat.config, chat.renderer, chat_template=keeps)
    assert "assistant:one and one2;" in tokenizer.decode(keeping.prompt_ids(messages))


def test_long_prompts_are_rejected_with_tokens_and_limit(chat: ChatTokenizer) -> None:
    messages = [user("word " * 300)]
    num_tokens = len(chat.prompt_ids(messages))
    assert chat.prompt_ids(messages, max_tokens=num_tokens) == chat.prompt_ids(messages)
    with pytest.raises(RowError, match=f"{num_tokens} tokens, the limit is {num_tokens - 1} tokens") as caught:
        chat.prompt_ids(messages, max_tokens=num_tokens - 1)
    assert caught.value.reason is Reason.TOO_LONG


def test_text_that_cannot_fit_is_not_tokenised(chat: ChatTokenizer) -> None:
    with pytest.raises(RowError, match=r"30000000 characters.*the limit is 100 tokens"):
        chat.prompt_ids([user("x" * 30_000_000)], max_tokens=100)


def test_refusals_of_the_template_are_the_rows_fault(chat: ChatTokenizer) -> None:
    refusing = ChatTokenizer(chat.config, chat.renderer, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RowError, match="roles must alternate") as caught:
        refusing.prompt_ids([user("x")])
    assert caught.value.reason is Reason.TEMPLATE_ERROR


def test_verifier_without_chat_template_is_refused(verifier_dir: Path, tmp_path: Path) -> None:
    for path in verifier_dir.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, tmp_path / path.name)
    with pytest.raises(ValueError, match=r"verifier\.chat_template: .* has no chat template of its own; give a file"):
        ChatTokenizer.from_directory(tmp_path)
    given = ChatTokenizer.from_directory(tmp_path, chat_template=DATA / "thinking_template.jinja")
    assert given.prompt_ids([user("x")])


def test_unknown_reasoning_parser_is_refused(chat: ChatTokenizer) -> None:
    with pytest.raises(ValueError, match=r"verifier\.reasoning_parser 'none-such'"):
        ChatTokenizer(chat.config, chat.renderer, reasoning_parser="none-such")
    with pytest.raises(ValueError, match=r"could not locate\s+think"):
        ChatTokenizer(chat.config, chat.renderer, reasoning_parser="deepseek_r1")


# --- answers


def test_without_a_parser_an_answer_is_all_text(chat: ChatTokenizer) -> None:
    assert chat.split_reasoning("<think>a</think>b") == (None, "<think>a</think>b")
    assert chat.skip_special_tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>why</think>because", ("why", "because")),
        ("why</think>because", ("why", "because")),  # the template opened the block
        ("<think>cut off", ("cut off", "")),
    ],
)
def test_reasoning_is_split_off(thinker: ChatTokenizer, text: str, expected: tuple[str, str]) -> None:
    assert thinker.split_reasoning(text) == expected


def test_answers_become_context(thinker: ChatTokenizer) -> None:
    first = [user("1+1?")]
    messages = thinker.append_answer(first, "2", "one and one")
    assert first == [user("1+1?")]
    assert messages == [user("1+1?"), assistant("2", "one and one")]
    decoded = thinker.renderer.get_tokenizer().decode(thinker.prompt_ids([*messages, user("why?")]))
    assert f"<|im_start|>assistant\n2{END}\n" in decoded
    assert thinker.append_answer(first, "2", None)[-1] == {"role": "assistant", "content": "2"}


def test_model_length_comes_from_configuration(chat: ChatTokenizer, thinker: ChatTokenizer) -> None:
    assert (chat.max_model_len, thinker.max_model_len) == (8192, 512)


# --- given answers


def spans(chat: ChatTokenizer, messages: list[Message]) -> list[str]:
    answered = chat.answered(messages)
    tokenizer = chat.renderer.get_tokenizer()
    assert answered.num_prompt_tokens == answered.loss_spans[0][0]
    assert len(answered.token_ids) == answered.loss_spans[-1][1]
    return [tokenizer.decode(answered.token_ids[start:end]) for start, end in answered.loss_spans]


def test_every_answer_of_a_conversation_counts(chat: ChatTokenizer) -> None:
    messages = [user("Hi"), assistant("Hello!"), user("Bye"), assistant("See you.")]
    assert spans(chat, messages) == [f"Hello!{END}", f"See you.{END}"]
    answered = chat.answered(messages)
    # Exactly what generating these answers would have stored.
    assert answered.token_ids[: answered.num_prompt_tokens] == chat.prompt_ids(messages[:1])
    assert answered.token_ids[: answered.loss_spans[1][0]] == chat.prompt_ids(messages[:3])
    assert (answered.text, answered.reasoning_text) == ("See you.", None)


def test_greeting_ahead_of_the_first_question_is_no_answer(chat: ChatTokenizer) -> None:
    messages = [assistant("Welcome!"), user("Hi"), assistant("Hello!")]
    assert spans(chat, messages) == [f"Hello!{END}"]


def test_think_blocks(with_template: Callable[..., ChatTokenizer], thinker: ChatTokenizer) -> None:
    for chat in (with_template("thinking"), thinker):  # think marks as text and as tokens of their own
        # An empty block is the template's; a filled one was emitted.
        assert spans(chat, [user("Hi"), assistant("Hello")]) == [f"Hello{END}"]
        assert spans(chat, [user("Hi"), assistant("Hello", "greet")]) == [f"<think>\ngreet\n</think>\n\nHello{END}"]
        # The template rewrites the first answer once a second question follows: only the last one is the verifier's.
        messages = [user("Hi"), assistant("Hello", "greet"), user("Bye"), assistant("See you", "part")]
        assert spans(chat, messages) == [f"<think>\npart\n</think>\n\nSee you{END}"]
        assert chat.answered(messages).reasoning_text == "part"
    off = with_template("thinking", chat_template_kwargs={"enable_thinking": False})
    assert spans(off, [user("Hi"), assistant("Hello")]) == [f"Hello{END}"]


def test_generation_marks(with_template: Callable[..., ChatTokenizer]) -> None:
    messages = [user("Hi"), assistant("Hello"), user("Bye"), assistant("See you")]
    assert spans(with_template("marked"), messages) == [f"Hello{END}", f"See you{END}"]


def test_marks_and_prefixes_agree(chat: ChatTokenizer, with_template: Callable[..., ChatTokenizer]) -> None:
    marked = with_template("marked").answered([user("Hi"), assistant("Hello")])
    template = (DATA / "marked_template.jinja").read_text()
    unmarked_template = template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    unmarked = ChatTokenizer(chat.config, chat.renderer, chat_template=unmarked_template)
    assert unmarked.answered([user("Hi"), assistant("Hello")]) == marked


def test_no_token_of_the_verifier_is_an_error(chat: ChatTokenizer) -> None:
    mute = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    no_marks = (
        "{% for m in messages %}{{ m.content }}{% if false %}{% generation %}{% endgeneration %}{% endif %}{% endfor %}"
    )
    for template in (mute, no_marks):
        silent = ChatTokenizer(chat.config, chat.renderer, chat_template=template)
        with pytest.raises(RowError) as caught:
            silent.answered([user("Hi"), assistant("Hello")])
        assert caught.value.reason is Reason.NO_LOSS_TOKENS
    with pytest.raises(RowError) as caught:
        chat.answered([user("Hi")])
    assert caught.value.reason is Reason.NO_ANSWER


def test_long_conversations_are_rejected(chat: ChatTokenizer) -> None:
    messages = [user("Hi"), assistant("Hello " * 50)]
    num_tokens = len(chat.answered(messages).token_ids)
    assert len(chat.answered(messages, max_tokens=num_tokens).token_ids) == num_tokens
    with pytest.raises(RowError, match=f"{num_tokens} tokens, the limit is {num_tokens - 1}"):
        chat.answered(messages, max_tokens=num_tokens - 1)


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_spans_hold_the_answers(chat: ChatTokenizer, tokenizer: Any, turns: list[tuple[str, str]]) -> None:
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    answered = chat.answered(messages)
    assert len(answered.loss_spans) == len(turns)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert answered.token_ids == whole[: len(answered.token_ids)]
    for (start, end), (_, answer) in zip(answered.loss_spans, turns, strict=True):
        found, expected = answered.token_ids[start:end], tokenizer.encode(answer, add_special_tokens=False)
        assert found[-1] == tokenizer.eos_token_id
        # White space at the answer's head may share a token with the header before it; that token is left out.
        if not answer[:1].isspace():
            assert found[:-1] == expected
        else:
            missing = (tokenizer.decode(expected) + END).removesuffix(tokenizer.decode(found))
            assert not missing.strip()
