"""What a verifier is: its shape and the digests by which a data set knows it again, read from its directory."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gen.weights import canonical_digest, weights_digest

# Fields of config.json and tokenizer_config.json that tools rewrite without changing the model.
VOLATILE_FIELDS = ("transformers_version", "_name_or_path", "is_local", "local_files_only", "auto_map")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
TOKENIZER_PATTERNS = ("*.tiktoken", "tekken*.json", "tokenization_*.py")


@dataclass(frozen=True)
class VerifierInfo:
    """One verifier, as far as a data set and a draft need to know it."""

    directory: str
    architecture: str
    model_type: str  # of the whole model, a multimodal wrapper's included
    text_model_type: str  # of the language model inside
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of the values; for multi-head latent attention v_head_dim
    max_position_embeddings: int
    rms_norm_eps: float | None
    tied_embeddings: bool
    dtype: str
    quantization: str | None
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    chat_template_digest: str | None
    text_config: dict[str, Any]

    def identity(self, *, name: str, revision: str | None, kv_cache_dtype: str) -> dict[str, Any]:
        """The part of a data set's identity that says which verifier produced it."""
        return {
            "name": name,
            "revision": revision,
            "architecture": self.architecture,
            "config_digest": self.config_digest,
            "weights_digest": self.weights_digest,
            "quantization": self.quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "dtype": self.dtype,
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }

    def tokenizer_identity(
        self, *, chat_template: Path | None = None, chat_template_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The part that says how text became tokens; `chat_template` replaces the checkpoint's own."""
        digest = self.chat_template_digest if chat_template is None else _text_digest(chat_template.read_text())
        return {
            "digest": self.tokenizer_digest,
            "chat_template_digest": digest,
            "chat_template_kwargs": dict(chat_template_kwargs or {}),
        }


def describe_verifier(directory: Path, *, digest: Literal["auto", "full", "sampled"] = "auto") -> VerifierInfo:
    """Describe the checkpoint in `directory`; weights are read for their digest only (see `gen.weights`).

    Raises FileNotFoundError when files are missing and ValueError when the configuration lacks what is needed.
    """
    config = read_config(directory)
    text = text_config(directory, config)
    hidden_size = _number(directory, text, "hidden_size", "n_embd", "d_model")
    num_heads = _number(directory, text, "num_attention_heads", "n_head", "num_heads")
    quantization = _first(
        config.get("quantization_config"), text.get("quantization_config"), config.get("compression_config")
    )
    return VerifierInfo(
        directory=str(directory),
        architecture=(config.get("architectures") or [""])[0],
        model_type=config.get("model_type", ""),
        text_model_type=text.get("model_type", config.get("model_type", "")),
        num_layers=_number(directory, text, "num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=hidden_size,
        vocab_size=_number(directory, text, "vocab_size"),
        num_heads=num_heads,
        num_kv_heads=text.get("num_key_value_heads") or num_heads,
        head_dim=_first(text.get("v_head_dim") if text.get("kv_lora_rank") else None, text.get("head_dim"))
        or hidden_size // num_heads,
        max_position_embeddings=_number(directory, text, "max_position_embeddings", "n_positions", "max_seq_len"),
        rms_norm_eps=_first(text.get("rms_norm_eps"), text.get("norm_eps"), text.get("layer_norm_epsilon")),
        tied_embeddings=bool(_first(text.get("tie_word_embeddings"), config.get("tie_word_embeddings"), False)),
        dtype=str(
            _first(text.get("dtype"), text.get("torch_dtype"), config.get("dtype"), config.get("torch_dtype"), "")
        ),
        quantization=None if quantization is None else str(quantization.get("quant_method", "unknown")),
        config_digest=canonical_digest(_stable(config)),
        weights_digest=weights_digest(directory, digest),
        tokenizer_digest=_tokenizer_digest(directory),
        chat_template_digest=_chat_template_digest(directory),
        text_config=text,
    )


def read_config(directory: Path) -> dict[str, Any]:
    """The checkpoint's config.json. Raises FileNotFoundError or ValueError."""
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"verifier.model: {directory} has no config.json; give the directory of a checkpoint")
    config = json.loads(path.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object")
    return config


def text_config(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration: a multimodal wrapper keeps it under `text_config`.

    Wrappers and models leave out fields that have their class's default value; these are filled in where
    transformers knows the model type.
    """
    nested = config.get("text_config") or config.get("llm_config") or config
    if all(nested.get(name) is not None for name in ("hidden_size", "num_hidden_layers", "vocab_size")):
        return dict(nested)
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        return dict(nested)
    known = AutoConfig.from_pretrained(directory).get_text_config(decoder=True).to_dict()
    return {**known, **nested}


def _number(directory: Path, text: dict[str, Any], *names: str) -> int:
    value = _first(*(text.get(name) for name in names))
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{directory / 'config.json'} has no {names[0]}: this model type is not supported")
    return value


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _stable(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in VOLATILE_FIELDS}


def _tokenizer_digest(directory: Path) -> str:
    paths = {directory / name for name in TOKENIZER_FILES if (directory / name).is_file()}
    paths.update(path for pattern in TOKENIZER_PATTERNS for path in directory.glob(pattern))
    lines = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in sorted(paths)]
    config = directory / "tokenizer_config.json"
    if config.is_file():
        content = _stable(json.loads(config.read_text()))
        content.pop("chat_template", None)  # it has a digest of its own
        lines.append(f"{config.name} {canonical_digest(content)}")
    if not lines:
        raise FileNotFoundError(f"verifier {directory} has no tokenizer files ({', '.join(TOKENIZER_FILES)})")
    return _text_digest("\n".join(lines))


def _chat_template_digest(directory: Path) -> str | None:
    """Digest of the checkpoint's chat template, wherever it keeps it; None when it has none."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return _text_digest(file.read_text())
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        path = directory / name
        template = json.loads(path.read_text()).get("chat_template") if path.is_file() else None
        if template is not None:
            return _text_digest(template) if isinstance(template, str) else canonical_digest(template)
    return None


def _text_digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
