"""Units: fixed runs of consecutive prompts, sized by the bytes of hidden states they are expected to give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gen.prompts.rows import plain_text
from gen.prompts.types import BadRow, Prompt
from storage.types import UnitPlan

# UTF-8 bytes that one token stands for, and tokens that a template adds around one message: rough, and the same for
# every verifier, so that unit boundaries depend on the prompts and the configuration alone.
BYTES_PER_TOKEN = 4
TEMPLATE_TOKENS_PER_MESSAGE = 8


@dataclass(frozen=True)
class PromptSize:
    """What one prompt is expected to give."""

    samples: int  # keys that must end as a sample or a reject
    rows: int  # of hidden states


def expected_size(item: Prompt | BadRow, *, n: int, output_tokens: int) -> PromptSize:
    """Samples and rows of hidden states that a prompt will give when each answer has `output_tokens` tokens.

    Each turn is a sample of its own that holds all turns before it. An answered conversation is one sample whose text
    is all there. A bad row is one reject and no bytes. All of that n times.
    """
    if isinstance(item, BadRow):
        return PromptSize(samples=n, rows=0)
    context = sum(_tokens(plain_text(message["content"])) for message in item.messages)
    if item.answered:
        return PromptSize(samples=n, rows=n * context)
    rows = context + output_tokens
    for turn in item.later_turns:
        context += output_tokens + _tokens(turn)
        rows += context + output_tokens
    return PromptSize(samples=n * item.num_turns, rows=n * rows)


def plan_units(
    sizes: Iterable[PromptSize],
    *,
    row_bytes: int,
    target_bytes: int,
    min_prompts: int = 1,
    max_prompts: int = 4096,
) -> list[UnitPlan]:
    """Cut the prompt order into units of about `target_bytes`, in order and without gaps.

    A unit takes prompts while it stays within the target, at least `min_prompts` (the last unit may have fewer) and
    at most `max_prompts` of them. The result depends on the arguments alone.

    Raises ValueError for limits that contradict each other.
    """
    if target_bytes < 1 or row_bytes < 1:
        raise ValueError(f"dataset.unit_bytes {target_bytes} and the bytes of a row {row_bytes} must be positive")
    if not 1 <= min_prompts <= max_prompts:
        raise ValueError(f"min_prompts {min_prompts} must be from 1 to max_prompts {max_prompts}")
    units: list[UnitPlan] = []
    first = num_prompts = samples = num_bytes = 0
    for size in sizes:
        size_bytes = size.rows * row_bytes
        full = num_prompts >= max_prompts
        over = num_prompts >= min_prompts and num_bytes + size_bytes > target_bytes
        if full or over:
            units.append(UnitPlan(len(units), first, num_prompts, samples, num_bytes))
            first += num_prompts
            num_prompts = samples = num_bytes = 0
        num_prompts += 1
        samples += size.samples
        num_bytes += size_bytes
    if num_prompts:
        units.append(UnitPlan(len(units), first, num_prompts, samples, num_bytes))
    return units


def _tokens(text: str) -> int:
    return TEMPLATE_TOKENS_PER_MESSAGE + -(-len(text.encode()) // BYTES_PER_TOKEN)
