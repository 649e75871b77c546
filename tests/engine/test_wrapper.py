"""A multimodal wrapper (Kimi-K2.5) as verifier: its language model is found, its head taken, its prompts rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import RANDOM_MODELS
from safetensors.torch import load_file

from gen.chat import ChatTokenizer
from gen.head import extract_head
from gen.verifier import describe_verifier

TEMPLATE = (
    "{% for m in messages %}{{ 'w2 ' if m.role == 'user' else 'w3 ' }}{{ m.content + ' w1 ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w3 ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small random checkpoint in the layout of Moonshot's own, and the Hugging Face model."""
    directory = tmp_path_factory.mktemp("kimi_k25")
    return directory, RANDOM_MODELS["kimi_k25"].make(directory)


def test_description_is_of_the_language_model(kimi: tuple[Path, Any]) -> None:
    directory, model = kimi
    info = describe_verifier(directory)
    assert (info.num_layers, info.architecture) == (61, "KimiK25ForConditionalGeneration")
    assert info.hidden_size == model.get_input_embeddings().weight.shape[1]
    assert info.vocab_size == model.get_input_embeddings().weight.shape[0]


def test_head_is_the_language_models(kimi: tuple[Path, Any], tmp_path: Path) -> None:
    directory, model = kimi
    head = load_file(extract_head(directory, tmp_path / "head.safetensors"))
    assert torch.equal(head["embed_tokens.weight"], model.get_input_embeddings().weight)
    assert torch.equal(head["lm_head.weight"], model.get_output_embeddings().weight)
    [norm] = [value for name, value in model.named_parameters() if name.endswith("language_model.norm.weight")]
    assert torch.equal(head["norm.weight"], norm)


def test_text_prompts_are_rendered_as_for_any_model(kimi: tuple[Path, Any]) -> None:
    directory, _ = kimi
    chat = ChatTokenizer.from_directory(directory, chat_template=TEMPLATE)
    question, answer = {"role": "user", "content": "w40 w50"}, {"role": "assistant", "content": "w60"}
    assert chat.prompt_ids([question]) == [2, 40, 50, 1, 3]
    answered = chat.answered([question, answer])
    assert answered.token_ids == [2, 40, 50, 1, 3, 60, 1]
    assert answered.loss_spans == [(5, 7)]
