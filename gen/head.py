"""The verifier head: embedding, final norm and lm_head in one small file, so that training never needs the verifier."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen.verifier import read_config, text_config
from gen.weights import tensor_files

if TYPE_CHECKING:
    import torch

EMBEDDING = "embed_tokens.weight"
NORM = "norm.weight"
LM_HEAD = "lm_head.weight"
FORMAT_VERSION = 1

# Decoder layers, next-token-prediction layers among them, may hold copies of embedding and lm_head.
IN_LAYERS = re.compile(r"(^|\.)(layers|mtp)\.")

# RMSNorm with a weight that is an offset from one: these families compute (1 + weight) * x. The stored norm is the
# plain factor, so that whoever reads it needs not know the family.
OFFSET_NORM_MODEL_TYPES = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "recurrent_gemma",
        "vaultgemma",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    }
)
# Verifiers that do more than lm_head(norm(x)): targets made from the head alone would be another distribution.
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "dim_model_base",
)


def extract_head(verifier_dir: Path, destination: Path) -> Path:
    """Write the verifier head to `destination`, a safetensors file, and return it.

    Tensors: `embed_tokens.weight` [vocab, hidden], `norm.weight` [hidden], `lm_head.weight` [vocab, hidden], in the
    checkpoint's dtypes; with tied embeddings lm_head is a copy of the embedding. Metadata: `config`, a JSON object with
    format_version, model_type, num_layers, hidden_size, vocab_size, rms_norm_eps, tied and the tensors' names in the
    checkpoint. Only these tensors are read. The file appears whole or not at all, and is the same every time.

    Raises ValueError when a tensor is missing or quantised, has the wrong shape, or when the verifier's logits are
    not lm_head(RMSNorm(x)).
    """
    from safetensors.torch import save_file

    config = text_config(verifier_dir, read_config(verifier_dir))
    _check_logits(verifier_dir, config)
    files = tensor_files(verifier_dir)
    names = _tensor_names(verifier_dir, files, tied=_is_tied(verifier_dir, config))
    hidden_size, vocab_size = config["hidden_size"], config["vocab_size"]
    shapes = {EMBEDDING: (vocab_size, hidden_size), NORM: (hidden_size,), LM_HEAD: (vocab_size, hidden_size)}
    tensors = {}
    for name, source in names.items():
        tensor = _read(files[source], source)
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"verifier {verifier_dir}: {source} has the shape {list(tensor.shape)}, "
                f"config.json makes it {list(shapes[name])}"
            )
        tensors[name] = tensor.clone() if name == LM_HEAD else tensor
    offset_norm = config.get("model_type") in OFFSET_NORM_MODEL_TYPES
    if offset_norm:
        tensors[NORM] = tensors[NORM].float() + 1.0
    description = {
        "format_version": FORMAT_VERSION,
        "model_type": config.get("model_type"),
        "num_layers": config.get("num_hidden_layers"),
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "rms_norm_eps": config["rms_norm_eps"],
        "tied": names[LM_HEAD] == names[EMBEDDING],
        "norm_offset_folded": offset_norm,
        "tensors": names,
    }
    # One key only: safetensors writes several in random order, and the file's digest must not depend on that.
    metadata = {"config": json.dumps(description, sort_keys=True)}
    destination.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{destination.name}.", dir=destination.parent)
    os.close(handle)
    staging = Path(name)
    try:
        save_file(tensors, staging, metadata=metadata)
        with staging.open("rb+") as file:
            os.fsync(file.fileno())
        staging.replace(destination)
    finally:
        staging.unlink(missing_ok=True)
    return destination


def _tensor_names(directory: Path, files: dict[str, Path], *, tied: bool) -> dict[str, str]:
    """The checkpoint's names of the three tensors, whatever wrapper prefixes them."""
    embedding = _only(directory, files, EMBEDDING)
    norm = embedding.removesuffix(EMBEDDING) + NORM
    if norm not in files:
        raise ValueError(
            f"verifier {directory}: there is no final norm {norm} beside {embedding}. Without it every training target "
            "would be wrong; the checkpoint is incomplete or of an architecture that is not supported"
        )
    if norm.removesuffix("weight") + "bias" in files:
        raise ValueError(f"verifier {directory}: {norm} has a bias, so it is no RMSNorm: not supported")
    if tied:
        return {EMBEDDING: embedding, NORM: norm, LM_HEAD: embedding}
    return {EMBEDDING: embedding, NORM: norm, LM_HEAD: _only(directory, files, LM_HEAD)}


def _only(directory: Path, files: dict[str, Path], suffix: str) -> str:
    """The one tensor with this last name outside of the decoder layers."""
    outside = [name for name in files if not IN_LAYERS.search(name)]
    found = [name for name in outside if name == suffix or name.endswith("." + suffix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"verifier {directory} has several tensors {suffix}: {', '.join(sorted(found))}")
    stem = suffix.removesuffix("weight")
    packed = sorted(name for name in outside if stem in name)
    if packed:
        raise ValueError(f"verifier {directory}: {packed[0]} looks like a quantised {suffix}, which is not supported")
    raise ValueError(f"verifier {directory} has no tensor {suffix}, and its config.json does not say that it is tied")


def _is_tied(directory: Path, config: dict[str, Any]) -> bool:
    value = config.get("tie_word_embeddings")
    if value is None:
        value = read_config(directory).get("tie_word_embeddings", False)
    return bool(value)


def _check_logits(directory: Path, config: dict[str, Any]) -> None:
    if config.get("rms_norm_eps") is None:
        raise ValueError(f"verifier {directory}: config.json has no rms_norm_eps, so its final norm is no RMSNorm")
    for name in LOGIT_TRANSFORMS:
        if config.get(name) not in (None, 1, 1.0):
            raise ValueError(
                f"verifier {directory}: {name} = {config[name]} changes the logits after lm_head, which training "
                "targets do not reproduce; this verifier is not supported"
            )


def _read(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)
