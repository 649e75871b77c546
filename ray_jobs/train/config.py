"""Configuration of `headrace train`: the sections `dataset`, `draft`, `optim`, `workers` and `checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gen.config import Section


class SourceConfig(Section):
    """One data set of a weighted mix."""

    uri: str = Field(description="local path, file:// or s3://")
    version: int | None = Field(None, ge=0, description="snapshot to read; default: the newest when the run starts")
    weight: float = Field(1.0, gt=0, description="passes over this data set in one epoch")


class DatasetConfig(Section):
    """What training reads, and how it is packed."""

    uri: str | None = Field(None, description="the data set; for several use `sources`")
    version: int | None = Field(None, ge=0, description="snapshot of `uri`; default: the newest when the run starts")
    sources: tuple[SourceConfig, ...] = Field((), description="a weighted mix, instead of `uri`")
    epochs: int = Field(1, gt=0)
    seed: int = Field(0, description="of the order of samples")
    pack_tokens: int = Field(4096, gt=0, description="tokens in one pack: what one worker reads in one step")
    max_sample_tokens: int | None = Field(
        None, ge=3, description="cut longer samples; default: a sample that no pack can hold is an error"
    )
    prefetch_packs: int = Field(2, ge=0, description="packs that each worker reads ahead")

    @model_validator(mode="after")
    def _one_way_to_name_data(self) -> DatasetConfig:
        if (self.uri is None) == (not self.sources):
            raise ValueError("give either uri or sources")
        if self.sources and self.version is not None:
            raise ValueError("version belongs to uri; give each of the sources its own")
        return self

    @property
    def all_sources(self) -> tuple[SourceConfig, ...]:
        if self.uri is None:
            return self.sources
        return (SourceConfig(uri=self.uri, version=self.version),)


class DraftSection(Section):
    """The draft. Either an existing draft_config.json, or one derived from the verifier that the data set names."""

    config: Path | None = Field(None, description="a draft_config.json, see `headrace draft init`")
    verifier: str | None = Field(
        None,
        description="directory of the verifier, of which only the configuration is read, or `embedded`; default: the "
        "name that the data set records; not with `config`",
    )
    vocab_size: int = Field(32000, gt=0, description="tokens that the draft can propose; not with `config`")
    fields: dict[str, Any] = Field(
        default_factory=dict, description="other draft_config.json fields; not with `config`"
    )
    special_token_ids: tuple[int, ...] = Field(
        (), description="tokens forced into the draft vocabulary, beside the verifier's bos, eos and pad"
    )
    train_lm_head: bool = Field(False, description="train the draft's lm_head, which is else the verifier's")
    seed: int = Field(0, description="of the initial weights")

    @model_validator(mode="after")
    def _one_source_of_shape(self) -> DraftSection:
        shape = {"verifier", "vocab_size", "fields"} & {name for name in self.model_fields_set if getattr(self, name)}
        if self.config is not None and shape:
            raise ValueError(f"with config, the draft's shape is all in that file: drop {', '.join(sorted(shape))}")
        return self


class OptimConfig(Section):
    """The recipe. Master weights, norms and optimizer state are float32 whatever `precision` is."""

    lr: float = Field(1e-4, gt=0, description="peak of AdamW's learning rate; small verifiers take more (2e-3)")
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_share: float = Field(0.015, ge=0, lt=1, description="of all steps, linear")
    final_lr_share: float = Field(0.0, ge=0, le=1, description="of the peak, where the cosine ends")
    clip_norm: float = Field(1.0, gt=0)
    loss: str = Field("kl_div", description="a loss of the speculators library, or JSON with weights of several")
    ttt_steps: int = Field(3, gt=0, description="test-time-training steps; 7 for large verifiers")
    step_decay: float = Field(0.8, gt=0, le=1, description="step k counts step_decay ** k")
    packs_per_step: int | None = Field(
        None, gt=0, description="packs of all workers in one optimizer step; default: one for each worker"
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the matrix products; auto: bfloat16 on CUDA, float32 on CPU"
    )


WorkerCount = Annotated[int, Field(gt=0)]


class WorkersConfig(Section):
    """The Ray Train worker group."""

    count: WorkerCount | tuple[WorkerCount, WorkerCount] = Field(1, description="workers, or [least, most] for elastic")
    cpus: int = Field(1, gt=0, description="CPUs and torch threads of one worker")
    gpu: bool = Field(False, description="one GPU for each worker")
    max_failures: int = Field(3, ge=0, description="lost workers, each time resumed from the newest checkpoint")

    @model_validator(mode="after")
    def _ordered(self) -> WorkersConfig:
        if isinstance(self.count, tuple) and self.count[0] > self.count[1]:
            raise ValueError(f"count {list(self.count)} must be [least, most]")
        return self


class CheckpointConfig(Section):
    """What a run leaves behind."""

    directory: Path = Field(
        description="of the run: checkpoints, metrics, resolved configuration. All nodes must see it under this path"
    )
    every_steps: int = Field(
        500, gt=0, description="optimizer steps between checkpoints; one is written at the end too"
    )
    keep: int = Field(3, gt=0, description="newest checkpoints that stay")
    log_every_steps: int = Field(10, gt=0, description="optimizer steps between two lines of metrics.jsonl")


class TrainConfig(Section):
    """The whole of a train job."""

    dataset: DatasetConfig
    draft: DraftSection = Field(default_factory=DraftSection)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    workers: WorkersConfig = Field(default_factory=WorkersConfig)
    checkpoint: CheckpointConfig

    @model_validator(mode="after")
    def _packs_divide(self) -> TrainConfig:
        packs, count = self.optim.packs_per_step, self.workers.count
        counts = range(count[0], count[1] + 1) if isinstance(count, tuple) else [count]
        if packs is not None and any(packs % number for number in counts):
            raise ValueError(
                f"optim.packs_per_step {packs} must be a multiple of every number of workers.count "
                f"{list(counts)}: each worker takes an equal part of a step"
            )
        return self
