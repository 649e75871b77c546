"""Prompt ids against vLLM's chat endpoint itself: a running server says which ids it read for each conversation."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gen.chat import ChatTokenizer
from gen.prompts import Prompt, RowError, read_prompts

DATA = Path(__file__).parent.parent / "unit" / "data"
START_TIMEOUT_S = 480
MAX_MODEL_LEN = 1024


class Server:
    """vLLM's OpenAI-compatible server on the embedded verifier."""

    def __init__(self, url: str) -> None:
        self._url = url

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The endpoint's answer of one token, with the ids that it read and emitted."""
        return self._post(
            "", {"messages": messages, "max_tokens": 1, "temperature": 0, "return_token_ids": True} | fields
        )

    def prompt_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        """The ids that the endpoint read."""
        ids: list[int] = self.chat(messages)["prompt_token_ids"]
        return ids

    def rendered_ids(self, messages: list[dict[str, Any]], **fields: Any) -> list[int] | None:
        """The ids that the endpoint would read, without a step of the engine; None when it refuses the messages."""
        try:
            ids: list[int] = self._post("/render", {"messages": messages} | fields)["token_ids"]
        except urllib.error.HTTPError as error:
            if error.code == 400:
                return None
            raise
        return ids

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"{self._url}/v1/chat/completions{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


@pytest.fixture(scope="module")
def server(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "vllm.log"
    # Not the command `vllm serve`: it asks for the version of a package `vllm`, which the CPU build is not called.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(verifier_dir)]
    options = ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN)]
    options += ["--max-num-seqs", "8", "--trust-request-chat-template", "--enable-scale-out"]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *options], stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, process, log)
            yield Server(url)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    pytest.fail(f"the server was not ready after {START_TIMEOUT_S} s:\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def chat(verifier_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.from_directory(verifier_dir, max_model_len=MAX_MODEL_LEN)


def raw_messages(line: bytes) -> list[dict[str, Any]]:
    """A row as its author would send it to the endpoint, without any of this project's normalisation."""
    row = json.loads(line)
    if row.get("messages"):
        # A table fills missing fields with nulls, which the endpoint refuses and this project takes as absent.
        messages = [{name: value for name, value in m.items() if value is not None} for m in row["messages"]]
        while messages[-1]["role"] == "assistant":
            messages.pop()
        return messages
    if row.get("conversations"):
        roles = {"system": "system", "human": "user", "gpt": "assistant"}
        messages = [{"role": roles[entry["from"]], "content": entry["value"]} for entry in row["conversations"]]
        while messages[-1]["role"] == "assistant":
            messages.pop()
        return messages
    return [{"role": "user", "content": row["prompt"] if row.get("prompt") else row["turns"][0]}]


def test_awkward_rows(server: Server, chat: ChatTokenizer) -> None:
    lines = (DATA / "awkward_prompts.jsonl").read_bytes().split(b"\n")
    prompts = [item for item in read_prompts(str(DATA / "awkward_prompts.jsonl")) if isinstance(item, Prompt)]
    assert len(prompts) > 10
    for prompt in prompts:
        assert chat.prompt_ids(prompt.messages) == server.prompt_ids(raw_messages(lines[prompt.row])), prompt.prompt_id


TEXTS = [
    "Hello",
    "",
    " ",
    "<|im_end|>",
    "<|im_start|>system\nx",
    "a\n\nb",
    "\t\r\n",
    "😀",
    "Grüße 汉字",
    "{{ x }}",
    "\0",
]


def random_conversation(rng: random.Random) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 5)):
        content: Any = "".join(rng.choices(TEXTS, k=rng.randint(1, 4)))
        if rng.random() < 0.3:
            content = [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.randint(1, 3))]
        message = {"role": rng.choice(["user", "user", "assistant", "system", "developer"]), "content": content}
        if message["role"] == "assistant" and rng.random() < 0.5:
            message[rng.choice(["reasoning", "reasoning_content"])] = rng.choice(TEXTS)
        messages.append(message)
    return messages


@pytest.mark.parametrize("template", [None, "thinking", "parts", "marked"])
def test_random_conversations(server: Server, chat: ChatTokenizer, template: str | None) -> None:
    rng = random.Random(str(template))
    fields: dict[str, Any] = {}
    mine = chat
    if template is not None:
        path = DATA / f"{template}_template.jinja"
        kwargs = {"enable_thinking": False} if template == "thinking" else {}
        fields = {"chat_template": path.read_text(), "chat_template_kwargs": kwargs}
        mine = ChatTokenizer(chat.config, chat.renderer, chat_template=path, chat_template_kwargs=kwargs)
    num_compared = 0
    for _ in range(50):
        messages = random_conversation(rng)
        expected = server.rendered_ids(messages, **fields)
        if expected is None:  # a template fails on messages that vLLM rewrote for it
            with pytest.raises(RowError):
                mine.prompt_ids(messages)
            continue
        assert mine.prompt_ids(messages) == expected, messages
        num_compared += 1
    assert num_compared >= 30


def test_answers_turn_by_turn(server: Server, chat: ChatTokenizer) -> None:
    messages = [{"role": "user", "content": "Think of a number."}]
    for question in ("Double it.", "Add one."):
        answer = server.chat(messages, max_tokens=8)
        assert answer["prompt_token_ids"] == chat.prompt_ids(messages)
        [choice] = answer["choices"]
        reasoning, text = chat.split_reasoning(choice["message"]["content"], choice["token_ids"])
        assert reasoning is None
        messages = [*chat.append_answer(messages, text, reasoning), {"role": "user", "content": question}]
    assert server.prompt_ids(messages) == chat.prompt_ids(messages)


def test_given_answers_extend_what_the_endpoint_reads(server: Server, chat: ChatTokenizer) -> None:
    messages = [
        {"role": "user", "content": "Why is the sky blue?"},
        {"role": "assistant", "content": "Because of scattering."},
        {"role": "user", "content": "And red at dusk?"},
        {"role": "assistant", "content": "The light's way is longer."},
    ]
    answered = chat.answered(messages)
    for index, (start, _) in zip((1, 3), answered.loss_spans, strict=True):
        assert answered.token_ids[:start] == server.prompt_ids(messages[:index])


def test_too_long_for_the_endpoint_is_too_long_here(server: Server, chat: ChatTokenizer) -> None:
    """The limit is the same to the token: an answer of one token must still fit."""
    base = len(chat.prompt_ids([{"role": "user", "content": "word"}]))
    longest = [{"role": "user", "content": "word" + " word" * (MAX_MODEL_LEN - 1 - base)}]
    assert len(chat.prompt_ids(longest, max_tokens=MAX_MODEL_LEN - 1)) == MAX_MODEL_LEN - 1
    assert len(server.prompt_ids(longest)) == MAX_MODEL_LEN - 1
    longer = [{"role": "user", "content": longest[0]["content"] + " word"}]
    with pytest.raises(ValueError, match=f"{MAX_MODEL_LEN} tokens, the limit is {MAX_MODEL_LEN - 1} tokens"):
        chat.prompt_ids(longer, max_tokens=MAX_MODEL_LEN - 1)
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.prompt_ids(longer)
    assert caught.value.code == 400
