"""Chat messages to token ids, exactly as vLLM's own chat endpoint renders them, and answers back to messages.

The rendering is vLLM's renderer itself, built without an engine: chat template resolution, the content format that
the template wants, the joining of text parts and the names of the reasoning field are its decisions, not copies.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen.prompts.rows import plain_text
from gen.prompts.types import Reason, RowError
from gen.spans import Region, decoded_offsets, prefix_region, token_span, whole_offsets

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers import BaseRenderer, ChatParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from gen.config import VerifierConfig

MAX_DETAIL_CHARACTERS = 300  # of an error message, which may quote the whole conversation

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class AnsweredTokens:
    """An answered conversation as the verifier would have read and emitted it."""

    token_ids: list[int]  # up to the last emitted token
    num_prompt_tokens: int  # tokens before the first emitted one
    loss_spans: list[tuple[int, int]]
    text: str  # of the last answer
    reasoning_text: str | None


@dataclass(frozen=True)
class _Rendered:
    token_ids: list[int]
    text: str | None  # None where the renderer goes from messages to ids without text
    conversation: list[Any]  # the messages as the chat template saw them


class ChatTokenizer:
    """The chat side of one verifier: rendering of prompts, splitting of answers, spans of given answers."""

    def __init__(
        self,
        config: VllmConfig,
        renderer: BaseRenderer[Any],
        *,
        chat_template: Path | str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """Use `from_directory` or `from_config`.

        Raises ValueError when the verifier has no chat template or the reasoning parser does not fit it.
        """
        from vllm.parser import ParserManager
        from vllm.renderers.chat_utils import load_chat_template

        self.config = config
        self.renderer = renderer
        self.model_config = config.model_config
        self._chat_template = load_chat_template(chat_template)
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._harmony = self.model_config.hf_config.model_type == "gpt_oss"
        self._require_chat_template()
        try:
            self._parser_cls = ParserManager.get_parser(
                reasoning_parser_name=reasoning_parser or config.structured_outputs_config.reasoning_parser,
                model_name=self.model_config.model,
                is_harmony=self._harmony,
                tokenizer=renderer.get_tokenizer(),
            )
        except TypeError as error:
            raise ValueError(f"verifier.reasoning_parser {reasoning_parser!r}: {error}") from error
        self._skip_special_tokens = self._wants_special_tokens_skipped()

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        *,
        chat_template: Path | str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        reasoning_parser: str | None = None,
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
    ) -> ChatTokenizer:
        """Built from a checkpoint's configuration and tokenizer files; no weights are read, no engine is started."""
        from vllm.config import VllmConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.renderers import renderer_from_config

        arguments: dict[str, Any] = {"model": str(directory), "trust_remote_code": trust_remote_code}
        if max_model_len is not None:
            arguments["max_model_len"] = max_model_len
        model_config = EngineArgs(**arguments).create_model_config()
        # As in vLLM's render server: quantised kernels are not used here, so this machine need not have them.
        model_config.quantization = None
        config = VllmConfig(model_config=model_config)
        return cls(
            config,
            renderer_from_config(config),
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            reasoning_parser=reasoning_parser,
        )

    @classmethod
    def from_config(cls, verifier: VerifierConfig, directory: Path, *, engine: AsyncLLM | None = None) -> ChatTokenizer:
        """Built from the configuration's section `verifier`, on a running engine's renderer where one is given."""
        options: dict[str, Any] = {
            "chat_template": verifier.chat_template,
            "chat_template_kwargs": verifier.chat_template_kwargs,
            "reasoning_parser": verifier.reasoning_parser,
        }
        if engine is not None:
            return cls(engine.vllm_config, engine.renderer, **options)
        return cls.from_directory(
            directory,
            max_model_len=verifier.max_model_len,
            trust_remote_code=verifier.trust_remote_code,
            **options,
        )

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together that the verifier takes."""
        return int(self.model_config.max_model_len)

    @property
    def skip_special_tokens(self) -> bool:
        """What SamplingParams must say so that `split_reasoning` finds its marks in the text."""
        return self._skip_special_tokens

    def prompt_ids(self, messages: Sequence[dict[str, Any]], *, max_tokens: int | None = None) -> list[int]:
        """Token ids of the prompt that asks for the next assistant turn after `messages`.

        Raises RowError with reason too_long when there are more than `max_tokens` (a text that cannot fit is not
        tokenised at all), and with reason template_error when the chat template refuses the messages.
        """
        return self._render(messages, invite=True, max_tokens=max_tokens).token_ids

    def split_reasoning(
        self, text: str, output_ids: Sequence[int] = (), prompt_ids: Sequence[int] = ()
    ) -> tuple[str | None, str]:
        """(reasoning, text) of an answer as vLLM's chat endpoint splits it; reasoning is None without a parser.

        `text` is the engine's output text, decoded with `skip_special_tokens` as this object says.
        """
        if self._parser_cls is None:
            return None, text
        parser = self._parser()
        parser.set_prompt_token_ids(prompt_ids)
        reasoning, content, _ = parser.parse(text, _request([]), model_output_token_ids=list(output_ids))
        return reasoning, content or ""

    def append_answer(
        self, messages: Sequence[dict[str, Any]], text: str, reasoning: str | None
    ) -> list[dict[str, Any]]:
        """The messages with an answer at their end. The template decides what of its reasoning later turns see."""
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning is not None:
            answer["reasoning"] = reasoning
        return [*messages, answer]

    def answered(self, messages: Sequence[dict[str, Any]], *, max_tokens: int | None = None) -> AnsweredTokens:
        """Tokens and loss spans of a conversation that ends with an answer.

        The spans come from the template's {% generation %} marks, or else from the difference between the renderings
        with and without each answer. An earlier answer that the template rewrites once later turns follow has no
        span. Tokens after the last span are dropped: the verifier emitted none of them.

        Raises RowError: no_loss_tokens, too_long or template_error.
        """
        if not messages or messages[-1]["role"] != "assistant":
            raise RowError(Reason.NO_ANSWER, "the conversation does not end with an assistant message")
        if max_tokens is not None:
            self._check_characters(messages, max_tokens)
        whole = self._render(messages, invite=False, max_tokens=None)
        if whole.text is None:
            raise ValueError(
                f"verifier {self.model_config.model}: extract mode needs a chat template that renders text, "
                "and this model's messages are encoded without one; use generate mode"
            )
        end_ids = self.end_token_ids()
        offsets = self._offsets(whole.text, whole.token_ids)
        found = (
            token_span(region, whole.text, whole.token_ids, offsets, end_ids)
            for region in self._regions(messages, whole)
        )
        spans = [span for span in found if span is not None]
        if not spans:
            raise RowError(Reason.NO_LOSS_TOKENS, "no token of the rendered conversation is the verifier's own")
        token_ids = whole.token_ids[: spans[-1][1]]
        if max_tokens is not None and len(token_ids) > max_tokens:
            raise _too_long(f"{len(token_ids)} tokens", max_tokens)
        return AnsweredTokens(
            token_ids=token_ids,
            num_prompt_tokens=spans[0][0],
            loss_spans=spans,
            text=plain_text(messages[-1]["content"]),
            reasoning_text=messages[-1].get("reasoning"),
        )

    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end the verifier's turn: of its generation configuration and its tokenizer."""
        ids: set[int] = set()
        generation = self.model_config.try_get_generation_config()
        for value in (generation.get("eos_token_id"), self.renderer.get_eos_token_id()):
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        return frozenset(ids)

    def _regions(self, messages: Sequence[dict[str, Any]], whole: _Rendered) -> list[Region]:
        assert whole.text is not None
        marked = self._marked_regions(messages, whole)
        if marked is not None:
            return marked
        regions = []
        for index, message in enumerate(messages):
            # What stands ahead of the first question (a greeting) answers nothing.
            if message["role"] != "assistant" or all(earlier["role"] != "user" for earlier in messages[:index]):
                continue
            before = self._render(messages[:index], invite=True, max_tokens=None).text
            last = index == len(messages) - 1
            after = whole.text if last else self._render(messages[: index + 1], invite=False, max_tokens=None).text
            assert before is not None
            assert after is not None
            region = prefix_region(whole.text, before, after, plain_text(message["content"]))
            if region is not None:
                regions.append(region)
        return regions

    def _marked_regions(self, messages: Sequence[dict[str, Any]], whole: _Rendered) -> list[Region] | None:
        """What the template's own marks enclose; None where there are no marks to go by."""
        from transformers.utils.chat_template_utils import render_jinja_template
        from vllm.renderers.hf import resolve_chat_template_kwargs

        template = self._resolved_template()
        if template is None or not GENERATION_MARK.search(template):
            return None
        tokenizer = self.renderer.get_tokenizer()
        kwargs = {**tokenizer.special_tokens_map, **self._chat_template_kwargs}
        known = resolve_chat_template_kwargs(tokenizer, template, kwargs)
        rendered: Any = render_jinja_template(
            [whole.conversation],
            chat_template=template,
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **known,
        )
        [text], [ranges] = rendered
        if text != whole.text:  # vLLM rewrote messages for this template (a developer's become the system's)
            return None
        answers = [plain_text(message["content"]) for message in messages if message["role"] == "assistant"]
        if len(answers) != len(ranges):  # a template may mark any number of ranges
            answers = [""] * len(ranges)
        return [Region(start, end, answer) for (start, end), answer in zip(ranges, answers, strict=True)]

    def _resolved_template(self) -> str | None:
        """The Jinja template that vLLM takes; None for a renderer that works without one."""
        from vllm.renderers.hf import HfRenderer, resolve_chat_template

        if self._harmony or not isinstance(self.renderer, HfRenderer):
            return None
        return resolve_chat_template(
            self.renderer.get_tokenizer(), self._chat_template, tools=None, model_config=self.model_config
        )

    def _require_chat_template(self) -> None:
        from vllm.renderers.hf import HfRenderer

        if isinstance(self.renderer, HfRenderer) and not self._harmony and self._resolved_template() is None:
            raise ValueError(
                f"verifier.chat_template: {self.model_config.model} has no chat template of its own; give a file"
            )

    def _render(self, messages: Sequence[dict[str, Any]], *, invite: bool, max_tokens: int | None) -> _Rendered:
        from pydantic import ValidationError
        from vllm.exceptions import VLLMValidationError
        from vllm.renderers import TokenizeParams

        if max_tokens is not None:
            self._check_characters(messages, max_tokens)
        try:
            request = _request(messages, add_generation_prompt=invite)
            if self._harmony:
                rendered = self._render_harmony(request, invite)
            else:
                # Without a limit here the true length of a prompt that is too long is known, and can be reported.
                tok_params = TokenizeParams(
                    max_total_tokens=None, max_output_tokens=0, add_special_tokens=request.add_special_tokens
                )
                (conversation,), (prompt,) = self.renderer.render_chat(
                    [request.messages], self._chat_params(request), tok_params
                )
                rendered = _Rendered(list(prompt["prompt_token_ids"]), prompt.get("prompt"), conversation)
        except (VLLMValidationError, ValidationError) as error:
            detail = str(error)[:MAX_DETAIL_CHARACTERS]
            raise RowError(Reason.TEMPLATE_ERROR, f"the chat template refuses the messages: {detail}") from error
        if max_tokens is not None and len(rendered.token_ids) > max_tokens:
            raise _too_long(f"{len(rendered.token_ids)} tokens", max_tokens)
        return rendered

    def _chat_params(self, request: ChatCompletionRequest) -> ChatParams:
        """The parameters that vLLM's OnlineRenderer.preprocess_chat gives its renderer for this request."""
        from vllm.renderers import merge_kwargs
        from vllm.utils.mistral import is_mistral_tokenizer

        tokenize = is_mistral_tokenizer(self.renderer.tokenizer) or self.model_config.enable_prompt_embeds
        defaults = merge_kwargs(self._chat_template_kwargs, {"tokenize": tokenize})
        return request.build_chat_params(self._chat_template, "auto").with_defaults(defaults)

    def _render_harmony(self, request: ChatCompletionRequest, invite: bool) -> _Rendered:
        """gpt-oss: messages are encoded by the harmony library, always with the header that invites an answer."""
        from vllm.renderers.online_renderer import OnlineRenderer

        if not invite:
            return _Rendered([], None, [])
        request.reasoning_effort = self._chat_template_kwargs.get("reasoning_effort")
        online = OnlineRenderer(
            self.model_config,
            self.renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )
        online.adjust_harmony_request(request)
        conversation, (prompt,) = online._make_request_with_harmony(request, should_include_tools=False)
        return _Rendered(list(prompt["prompt_token_ids"]), None, conversation)

    def _check_characters(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> None:
        num_characters = sum(len(plain_text(message["content"])) for message in messages)
        most = max_tokens * self.renderer.get_tokenizer().max_chars_per_token
        if num_characters > most:
            least = -(-num_characters // self.renderer.get_tokenizer().max_chars_per_token)
            raise _too_long(f"at least {least} tokens ({num_characters} characters)", max_tokens)

    def _offsets(self, text: str, token_ids: list[int]) -> list[tuple[int, int]]:
        """The characters of `text` that each token stands for."""
        tokenizer = self.renderer.get_tokenizer()
        if tokenizer.is_fast:
            encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            assert encoding["input_ids"] == token_ids, "the renderer tokenises otherwise than its tokenizer"
            return whole_offsets(encoding["offset_mapping"], encoding.tokens())
        offsets = decoded_offsets(token_ids, text, tokenizer.decode)
        if offsets is None:
            raise RowError(Reason.NO_LOSS_TOKENS, "the tokenizer's tokens do not decode to the rendered text")
        return offsets

    def _parser(self) -> Any:
        assert self._parser_cls is not None
        tokenizer = self.renderer.get_tokenizer()
        return self._parser_cls(
            tokenizer, None, chat_template_kwargs=self._chat_template_kwargs, model_config=self.model_config
        )

    def _wants_special_tokens_skipped(self) -> bool:
        if self._parser_cls is None:
            return True
        return bool(self._parser().adjust_request(_request([])).skip_special_tokens)


def _request(messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> ChatCompletionRequest:
    """The request that a client of the chat endpoint would send."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    # The request model renames and normalises message fields in place: it gets its own copy.
    fields = {"messages": copy.deepcopy(list(messages)), "add_generation_prompt": add_generation_prompt}
    return ChatCompletionRequest.model_validate(fields)


def _too_long(length: str, limit: int) -> RowError:
    return RowError(Reason.TOO_LONG, f"{length}, the limit is {limit} tokens")
