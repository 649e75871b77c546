"""Configuration of `headrace generate`: gen's sections, and where the data set goes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gen.config import CaptureConfig, PromptsConfig, ReplicasConfig, SamplingConfig, Section, VerifierConfig


class DatasetConfig(Section):
    """The data set that the job adds to, and how its files are cut."""

    uri: str = Field(description="local path, file:// or s3://")
    codec: Literal["none", "planes-zstd"] = "planes-zstd"
    shard_format: Literal["safetensors", "parquet"] = "safetensors"
    shard_bytes: int = Field(1 << 30, gt=0, description="size at which a shard is closed")
    unit_bytes: int = Field(1 << 30, gt=0, description="expected raw bytes of hidden states in one unit")
    unit_max_prompts: int = Field(4096, gt=0)


class GenerateConfig(Section):
    """The whole of a generate job."""

    verifier: VerifierConfig
    prompts: PromptsConfig
    sampling: SamplingConfig
    capture: CaptureConfig = Field(default_factory=CaptureConfig)
    dataset: DatasetConfig
    replicas: ReplicasConfig = Field(default_factory=ReplicasConfig)

    @model_validator(mode="after")
    def _one_given_answer(self) -> GenerateConfig:
        if self.prompts.mode == "extract" and self.sampling.n != 1:
            raise ValueError(
                f"sampling.n {self.sampling.n} with prompts.mode extract would store the given answer n times"
            )
        return self

    @model_validator(mode="after")
    def _arena_of_something(self) -> GenerateConfig:
        if self.capture.prefix_arena_gib is not None and not self.replicas.enable_prefix_caching:
            raise ValueError(
                "capture.prefix_arena_gib without replicas.enable_prefix_caching: there is no cached prefix"
            )
        return self
