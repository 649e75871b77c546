"""Configuration of the generating side: the sections `verifier`, `prompts`, `sampling`, `capture` and `replicas`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A configuration section: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class VerifierConfig(Section):
    """The served model."""

    model: str = Field(description="directory of the checkpoint, or `embedded` for the SmolLM2-135M that setup unpacks")
    revision: str | None = Field(None, description="recorded in the data set's identity")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = Field(None, gt=0, description="tokens of prompt and answer; default: the model's own")
    reasoning_parser: str | None = Field(None, description="vLLM's name of the parser that finds the reasoning tokens")
    chat_template: Path | None = Field(None, description="instead of the checkpoint's own")
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    trust_remote_code: bool = False

    def directory(self) -> Path:
        """The checkpoint's directory. Raises FileNotFoundError when it is not there."""
        from gen.embedded import DEFAULT_DIR, unpack

        if self.model == "embedded":
            return unpack(DEFAULT_DIR)
        path = Path(self.model)
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"verifier.model: {path} has no config.json; give the directory of a checkpoint or `embedded`"
            )
        return path


class PromptsConfig(Section):
    """Where prompts come from."""

    source: str = Field(description="JSON lines, Parquet, folder, hub name, `builtin:train` or `builtin:heldout`")
    split: str | None = None
    mode: Literal["generate", "extract"] = Field(
        "generate", description="generate answers, or extract the states of answers that the rows already have"
    )
    limit: int | None = Field(None, gt=0, description="rows to read")
    shuffle_seed: int | None = Field(None, description="order of the prompts; default: as in the source")
    max_reject_share: float = Field(
        0.05,
        ge=0,
        le=1,
        description="share of bad rows above which the job stops before it loads a model; and "
        "of samples that capture has no memory for, above which it stops later",
    )


class SamplingConfig(Section):
    """How answers are drawn. Defaults are the verifier's unmodified distribution, one answer a prompt."""

    n: int = Field(1, gt=0, description="answers per prompt")
    max_tokens: int = Field(gt=0, description="of an answer, reasoning included")
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: all tokens")
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    stop: tuple[str, ...] = ()
    thinking_token_budget: int | None = Field(
        None, ge=0, description="reasoning tokens before the verifier must answer"
    )
    seed: int = Field(0, ge=0, description="every sample's own seed is derived from it and the sample's key")


class CaptureConfig(Section):
    """Which hidden states are kept, and how they are taken out of vLLM."""

    mode: Literal["auto", "one_pass", "stock", "two_pass"] = Field(
        "auto", description="auto: the faster of one_pass and two_pass on this hardware, stock where neither works"
    )
    layers: Literal["eagle3"] | tuple[int, ...] = Field(
        "eagle3", description="layer ids; `eagle3` is (2, n // 2, n - 3); the final layer's output is always kept"
    )
    layer_convention: Literal["vllm", "sglang"] = "vllm"
    host_memory_gib: float | None = Field(
        None,
        gt=0,
        description="host memory for the rows of running requests; default: half of the node's, shared by its replicas",
    )
    prefix_arena_gib: float | None = Field(
        None,
        gt=0,
        description="host memory for the states of what is in vLLM's prefix cache; without it prompts that begin alike "
        "each compute their beginning again (one_pass, two_pass)",
    )
    max_fault_share: float = Field(
        0.001,
        ge=0,
        le=1,
        description="share of samples with bad states (rows that are missing, of other tokens, NaN, Inf or all zero) "
        "that stops the job",
    )

    @model_validator(mode="after")
    def _no_stock_arena(self) -> CaptureConfig:
        if self.mode == "stock" and self.prefix_arena_gib is not None:
            raise ValueError(
                "prefix_arena_gib with mode stock: the stock method keeps the states of cached prefixes by itself"
            )
        return self


class ReplicasConfig(Section):
    """The vLLM engines."""

    count: int = Field(1, gt=0)
    tensor_parallel_size: int = Field(1, gt=0)
    device: Literal["cpu", "gpu"] | None = Field(
        None,
        description="what a replica asks the cluster for (vLLM's build decides what it runs on); default: gpu where "
        "the cluster has some when the job starts, or the driver's PyTorch is built for them",
    )
    max_num_seqs: int = Field(64, gt=0, description="requests in one step")
    max_num_batched_tokens: int | None = Field(None, gt=0, description="tokens in one step; default: vLLM's")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    min_batched_tokens: int = Field(
        256,
        gt=0,
        description="floor (or max_num_seqs, if that is larger) of max_num_batched_tokens, which is halved when an "
        "engine runs out of memory",
    )
    kv_cache_gib: int = Field(2, gt=0, description="size of the KV cache of one engine on CPU")
    cores: int | None = Field(None, gt=0, description="CPU engines: cores per TP rank; default: an equal share")
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    units_in_flight: int = Field(
        2, gt=0, description="units a replica works on at once, so that the end of one overlaps the start of the next"
    )
    max_unit_attempts: int = Field(3, gt=0, description="tries of one unit before the job stops")
    max_restarts: int = Field(
        3,
        ge=0,
        description="times that one replica is started again after a death before the job stops; deaths after "
        "which the token budget is halved, or that are found to be a prompt's fault, do not count",
    )
    max_unit_deaths: int = Field(
        2, gt=0, description="engine deaths during one unit after which the prompts that were in the engine run alone"
    )
    max_prompt_deaths: int = Field(
        1, gt=0, description="engine deaths with one prompt alone in the engine after which the prompt is rejected"
    )
    max_fatal_prompts: int = Field(
        8, ge=0, description="prompts that one job may reject for their engines' deaths before it stops"
    )
    placement_timeout_s: float = Field(
        1800, gt=0, description="wait for room in the cluster, while no replica works, before the job stops"
    )
    engine_args: dict[str, Any] = Field(default_factory=dict, description="further arguments of vLLM's engine")

    @model_validator(mode="before")
    @classmethod
    def _no_pipeline(cls, values: Any) -> Any:
        given = values.get("engine_args") if isinstance(values, dict) else None
        if isinstance(values, dict) and any(
            isinstance(part, dict) and "pipeline_parallel_size" in part for part in (values, given)
        ):
            raise ValueError(
                "pipeline_parallel_size cannot be set: in vLLM the states of a layer do not cross pipeline stages; use "
                "tensor_parallel_size"
            )
        return values

    @model_validator(mode="after")
    def _no_override(self) -> ReplicasConfig:
        reserved = {"model", "worker_cls", "additional_config", "speculative_config", "kv_transfer_config"}
        taken = sorted((reserved | set(type(self).model_fields)) & set(self.engine_args))
        if taken:
            raise ValueError(f"engine_args: {', '.join(taken)} cannot be given here; use the section's own keys")
        return self
