"""The command that serves a verifier with its draft."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Literal

from draft.config import FILE_NAME as CONFIG_NAME
from draft.config import DraftConfig

METHOD: Literal["eagle3"] = "eagle3"


def speculative_config(draft: Path | str, num_speculative_tokens: int) -> dict[str, object]:
    """vLLM's `speculative_config` for a draft of either form. The method is named: vLLM guesses it from path names."""
    return {"method": METHOD, "model": str(draft), "num_speculative_tokens": num_speculative_tokens}


def serve_command(
    draft: Path | str,
    verifier: str,
    *,
    num_speculative_tokens: int | None = None,
    tensor_parallel_size: int | None = None,
) -> str:
    """One shell line, quoted. The number of draft tokens defaults to what the draft's configuration says, else 3."""
    if num_speculative_tokens is None:
        config_file = Path(draft) / CONFIG_NAME
        num_speculative_tokens = DraftConfig.load(config_file).num_speculative_tokens if config_file.is_file() else 3
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens {num_speculative_tokens} must be positive")
    words = ["vllm", "serve", verifier]
    if tensor_parallel_size is not None:
        words += ["--tensor-parallel-size", str(tensor_parallel_size)]
    words += ["--speculative-config", json.dumps(speculative_config(draft, num_speculative_tokens))]
    return shlex.join(words)
