"""What the engine is asked for: sampling parameters of one answer, its seed, and how an answer ends."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from gen.config import SamplingConfig
from storage import SampleKey

if TYPE_CHECKING:
    from vllm import SamplingParams

# How vLLM says that an answer has ended. With `abort` and `error` it gives up, and hands out what it had until then.
FINISHED = ("stop", "length", "repetition")


def sample_seed(base_seed: int, key: SampleKey) -> int:
    """The seed of one sample: 63 bits of a digest of the run's seed and the sample's key, the same on every replica."""
    digest = hashlib.sha256(f"{base_seed}/{key.row}/{key.turn}/{key.n}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def sampling_params(sampling: SamplingConfig, seed: int, *, skip_special_tokens: bool) -> SamplingParams:
    """vLLM's parameters for one answer, which comes in one piece when it is whole."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop),
        thinking_token_budget=sampling.thinking_token_budget,
        seed=seed,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_special_tokens=skip_special_tokens,
    )
