"""Small real data sets for tests of what reads them: random states, written through the real writer and shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from storage.dataset import Dataset
from storage.identity import Identity
from storage.shards import open_shard_writer
from storage.types import Receipt, Reject, Sample, SampleKey, StateSpec, UnitPlan

SPEC = StateSpec(layer_ids=(1, 2, 4), hidden_size=8)
UNIT_PROMPTS = 4


@dataclass
class Content:
    """What a test put into a data set, to compare with what comes back."""

    dataset: Dataset
    token_ids: dict[SampleKey, list[int]] = field(default_factory=dict)
    loss_masks: dict[SampleKey, list[bool]] = field(default_factory=dict)
    states: dict[SampleKey, np.ndarray] = field(default_factory=dict)
    units: dict[SampleKey, int] = field(default_factory=dict)

    @property
    def keys(self) -> set[SampleKey]:
        return set(self.states)


def make_identity(spec: StateSpec = SPEC, **changes: object) -> Identity:
    values: dict = {
        "mode": "generate",
        "verifier": {"name": "tiny", "num_layers": spec.layer_ids[-1], "vocab_size": 1000},
        "tokenizer": {"digest": "t0", "chat_template_digest": "c0"},
        "states": spec,
        "layer_convention": "vllm",
        "codec": "none",
        "sampling": {"temperature": 0},
        "prompts": {"digest": "p0"},
    }
    return Identity(**(values | changes))


def create(uri: str | Path, lengths: Sequence[int], spec: StateSpec = SPEC, **changes: object) -> Content:
    """An empty data set for one sample per length: sample i of row i belongs to unit i // UNIT_PROMPTS."""
    units = []
    for unit, first in enumerate(range(0, len(lengths), UNIT_PROMPTS)):
        num_prompts = min(UNIT_PROMPTS, len(lengths) - first)
        units.append(UnitPlan(unit, first, num_prompts, num_prompts))
    return Content(Dataset.create(str(uri), make_identity(spec, **changes), units))


def commit_units(
    content: Content,
    lengths: Sequence[int],
    units: Sequence[int],
    *,
    codec: str = "none",
    shard_format: str = "safetensors",
    rejected: Mapping[int, str] | None = None,
    target_bytes: int = 1 << 30,
    seed: int = 0,
) -> None:
    """Writes and commits whole units; `rejected` maps rows to reasons."""
    writer = content.dataset.writer()
    finished = []
    for unit in units:
        plan = content.dataset.units[unit]
        samples: list[Sample] = []
        rejects: list[Reject] = []
        target = writer.shard_target(unit, 0, shard_format=shard_format, codec=codec, target_bytes=target_bytes)
        with open_shard_writer(target) as shards:
            for row in range(plan.first, plan.first + plan.num_prompts):
                key = SampleKey(row, 0, 0)
                if rejected and row in rejected:
                    rejects.append(Reject(key, f"p{row}", unit, rejected[row], "for a test"))
                else:
                    samples.append(_sample(content, shards, key, unit, lengths[row], seed))
            entries = shards.close()
        finished.append(writer.write_unit(unit, 0, samples, rejects, entries))
    result = writer.commit(finished, {"engine": "none"})
    assert result.accepted == list(units)


def _sample(content: Content, shards, key: SampleKey, unit: int, num_tokens: int, seed: int) -> Sample:
    spec = content.dataset.identity.states
    rng = np.random.default_rng([seed, *key])
    shape = (num_tokens - 1, len(spec.layer_ids), spec.hidden_size)
    values = rng.standard_normal(shape).astype(np.float32)
    bits = values.view(np.uint32)
    if spec.np_dtype == np.uint16:
        bits = (bits >> 16).astype(np.uint16) if spec.dtype == "bfloat16" else values.astype(np.float16).view(np.uint16)
    receipt: Receipt = shards.add(key, bits)
    token_ids = rng.integers(0, 1000, num_tokens).tolist()
    num_prompt = 1 + num_tokens // 3
    spans = [(num_prompt, num_tokens)] if num_prompt < num_tokens else []
    mask = np.zeros(num_tokens, bool)
    for start, end in spans:
        mask[start:end] = True
    content.token_ids[key] = token_ids
    content.loss_masks[key] = mask.tolist()
    content.states[key] = bits
    content.units[key] = unit
    return Sample(
        key=key,
        prompt_id=f"p{key.row}",
        unit=unit,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt,
        loss_spans=spans,
        text=f"answer {key.row}",
        reasoning_text=None if key.row % 2 else f"thought {key.row}",
        finish_reason="length" if key.row % 5 == 0 else "stop",
        receipt=receipt,
        category="even" if key.row % 2 == 0 else "odd",
        replica="r0",
        started_at=1.0,
        finished_at=2.0,
    )


def build(
    uri: str | Path,
    lengths: Sequence[int],
    *,
    spec: StateSpec = SPEC,
    order: Sequence[int] | None = None,
    complete: bool = True,
    rejected: Mapping[int, str] | None = None,
    identity: Mapping[str, object] | None = None,
    **options: object,
) -> Content:
    """A data set with all its units committed, one commit each, in `order`."""
    content = create(uri, lengths, spec, **(identity or {}))
    for unit in order if order is not None else range(len(content.dataset.units)):
        commit_units(content, lengths, [unit], rejected=rejected, **options)  # type: ignore[arg-type]
    if complete:
        content.dataset.complete()
    return content
