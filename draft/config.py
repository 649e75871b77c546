"""`draft_config.json`: the one place where a draft's shape is written.

The training model, the flat (vLLM, SGLang) and nested (speculators) configurations and the shapes of all weights are
derived from a `DraftConfig`; nothing else states them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from draft.jsonfile import is_there, read_json_object
from draft.verifier import VerifierShape, read_verifier

SCHEMA_VERSION = 1
FILE_NAME = "draft_config.json"
# What each type of rotary embedding has to be given besides rope_theta.
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("long_factor", "short_factor", "original_max_position_embeddings"),
}


class VerifierReference(BaseModel):
    """The verifier that a draft belongs to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name_or_path: str = Field(description="Hugging Face id or path under which the verifier is served.")
    architectures: list[str] = Field(description="`architectures` of the verifier's config.json.")
    num_hidden_layers: int = Field(
        gt=0, description="Decoder layers of the verifier's language model; bounds layer ids."
    )


class DraftConfig(BaseModel):
    """An EAGLE-3 draft with Llama-type decoder layers.

    Layer ids follow the vLLM convention: id k is the residual stream entering decoder layer k of the verifier.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    schema_version: Literal[1] = Field(default=1, description="Version of this file's schema.")
    algorithm: Literal["eagle3"] = Field(default="eagle3", description="Speculation algorithm.")
    verifier: VerifierReference = Field(description="The verifier that the draft belongs to.")

    hidden_size: int = Field(gt=0, description="Width of the draft, equal to the verifier's: it reads its states.")
    intermediate_size: int = Field(gt=0, description="Width of the draft's gated MLP.")
    num_hidden_layers: int = Field(default=1, gt=0, description="Decoder layers of the draft. SGLang serves only 1.")
    num_attention_heads: int = Field(gt=0, description="Query heads.")
    num_key_value_heads: int = Field(gt=0, description="Key/value heads; fewer make the draft's KV cache smaller.")
    head_dim: int = Field(gt=0, description="Width of one head. Always written out: hidden_size / heads can be wrong.")
    hidden_act: Literal["silu"] = Field(
        "silu", description="Activation of the gated MLP; vLLM's Llama knows only silu."
    )
    rms_norm_eps: float = Field(gt=0, description="Epsilon of every RMSNorm.")
    attention_bias: bool = Field(default=False, description="Biases on q, k, v and o projections.")
    mlp_bias: bool = Field(default=False, description="Biases on the MLP projections.")

    vocab_size: int = Field(gt=0, description="The verifier's vocabulary: what the draft's embedding reads.")
    draft_vocab_size: int = Field(gt=0, description="Tokens that the draft can propose: rows of its lm_head.")
    bos_token_id: int | None = Field(default=None, description="As in the verifier.")
    eos_token_id: int | list[int] | None = Field(default=None, description="As in the verifier.")
    pad_token_id: int | None = Field(default=None, description="As in the verifier.")

    max_position_embeddings: int = Field(gt=0, description="Longest context that the draft has positions for.")
    rope_parameters: dict[str, Any] = Field(
        description="Rotary embedding in transformers 5 terms: rope_type, rope_theta and the type's own parameters."
    )

    aux_layer_ids: list[int] = Field(
        min_length=1,
        description="Verifier layers whose states feed `fc`, ascending; column block j of fc belongs to entry j.",
    )
    layer_convention: Literal["vllm"] = Field(
        "vllm", description="id k = residual stream entering decoder layer k (SGLang counts 'after layer k', one less)."
    )
    norm_before_residual: bool = Field(
        False,
        description="First layer: the residual starts from the normed fc output (true) or from the raw one (false).",
    )
    norm_before_fc: bool = Field(default=False, description="One RMSNorm over the concatenated states before fc.")
    fc_norm: bool = Field(default=False, description="One RMSNorm per layer's states before fc (EAGLE 3.1).")
    norm_output: bool = Field(
        default=False, description="Feed the normed hidden state to the next draft step (EAGLE 3.1)."
    )

    num_speculative_tokens: int = Field(default=3, gt=0, description="Draft tokens per step that the exports propose.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(default="bfloat16", description="Of exported weights.")

    @field_validator("rope_parameters")
    @classmethod
    def _check_rope(cls, rope: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(rope.get("rope_theta"), int | float):
            raise ValueError("rope_parameters needs rope_theta (number)")
        rope_type = rope.get("rope_type")
        if rope_type not in ROPE_NEEDS:
            raise ValueError(f"rope_type {rope_type!r} is none of {', '.join(ROPE_NEEDS)}")
        missing = [key for key in ROPE_NEEDS[rope_type] if rope.get(key) is None]
        if missing:
            raise ValueError(f"rope_type {rope_type!r} also needs {', '.join(missing)}")
        return rope

    @model_validator(mode="after")
    def _check_fields_together(self) -> Self:
        ids, num_layers = self.aux_layer_ids, self.verifier.num_hidden_layers
        if list(ids) != sorted(set(ids)):
            raise ValueError(
                f"aux_layer_ids {ids} must ascend without duplicates: most verifiers sort what they are given"
            )
        if num_layers in ids:
            raise ValueError(
                f"aux_layer_ids {ids} lists {num_layers}, the final state of a verifier with {num_layers} layers: "
                f"it is the training target, not an input; give ids below {num_layers}"
            )
        if not 0 <= ids[0] <= ids[-1] < num_layers:
            raise ValueError(f"aux_layer_ids {ids} must lie within [0, {num_layers - 1}] for this verifier")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: rotary positions turn pairs of channels")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: set one of them to false")
        return self

    @property
    def uses_draft_vocab(self) -> bool:
        """Whether the draft proposes from a subset of the vocabulary and so carries d2t and t2d."""
        return self.draft_vocab_size != self.vocab_size

    @classmethod
    def from_verifier(
        cls,
        verifier: Path | str | VerifierShape,
        *,
        draft_vocab_size: int = 32000,
        aux_layer_ids: list[int] | None = None,
        verifier_name: str | None = None,
        **overrides: Any,
    ) -> Self:
        """Derive a draft from the verifier's configuration.

        `aux_layer_ids` default to EAGLE-3's (2, n // 2, n - 3) for n layers. `verifier_name` is the name that goes into
        the file in place of the local path. `overrides` replace any other field. A draft vocabulary larger than the
        verifier's is cut to it.
        """
        shape = verifier if isinstance(verifier, VerifierShape) else read_verifier(verifier)
        num_layers = shape.num_hidden_layers
        fields: dict[str, Any] = {
            "verifier": {
                "name_or_path": verifier_name or shape.name_or_path,
                "architectures": list(shape.architectures),
                "num_hidden_layers": num_layers,
            },
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "head_dim": shape.head_dim,
            "rms_norm_eps": shape.rms_norm_eps,
            "vocab_size": shape.vocab_size,
            "draft_vocab_size": min(draft_vocab_size, shape.vocab_size),
            "bos_token_id": shape.bos_token_id,
            "eos_token_id": shape.eos_token_id,
            "pad_token_id": shape.pad_token_id,
            "max_position_embeddings": shape.max_position_embeddings,
            "rope_parameters": shape.rope_parameters,
            "aux_layer_ids": aux_layer_ids or [2, num_layers // 2, num_layers - 3],
        }
        return cls.build({**fields, **overrides})

    @classmethod
    def build(cls, fields: dict[str, Any]) -> Self:
        """From field values. Raises ValueError naming each bad field."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            problems = (
                ": ".join([*filter(None, [".".join(map(str, e["loc"]))]), e["msg"].removeprefix("Value error, ")])
                for e in error.errors()
            )
            raise ValueError("; ".join(problems)) from error

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a draft_config.json, or the one in a directory. Raises ValueError naming the file and each bad field."""
        path = Path(path)
        if path.is_dir() and path.name != FILE_NAME:
            path = path / FILE_NAME
        if not is_there(path):
            raise FileNotFoundError(f"{path} does not exist: write one with `headrace draft init`")
        data = read_json_object(path)
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(f"{path}: schema_version {version!r} is not known here, expected {SCHEMA_VERSION}")
        try:
            return cls.build(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def save(self, path: Path | str) -> Path:
        """Write the file (into a directory under its usual name), atomically. Returns its path."""
        path = Path(path)
        if path.is_dir():
            path = path / FILE_NAME
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(self.to_json())
        temporary.replace(path)
        return path

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again as a whole."""
        return self.build({**self.model_dump(), **changes})

    def to_flat(self) -> dict[str, Any]:
        """config.json for vLLM and SGLang (`LlamaForCausalLMEagle3`)."""
        from draft.formats import to_flat

        return to_flat(self)

    def to_nested(self) -> dict[str, Any]:
        """config.json as the speculators library saves it."""
        from draft.formats import to_nested

        return to_nested(self)

    def tensor_shapes(self, *, embedding: bool = False) -> dict[str, tuple[int, ...]]:
        """Names (the speculators library's) and shapes of the draft's tensors; its own embedding only on demand."""
        from draft.weights import tensor_shapes

        return tensor_shapes(self, embedding=embedding)
