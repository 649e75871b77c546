"""A verifier of 64 tokens and data sets of its states, on which a draft learns within seconds.

Tokens follow a fixed permutation: the next token is a function of the current one. The final state of a position is the
lm_head row of the token that follows, so that lm_head(norm(state)) names it, as a real verifier's would.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from storage import Dataset, Identity, Sample, SampleKey, StateSpec, UnitPlan
from storage.reader import LoadedSample
from storage.shards import open_shard_writer

VOCAB = 64
HIDDEN = 32
NUM_LAYERS = 6
EOS = 2
SPEC = StateSpec((1, 2, 4, NUM_LAYERS), HIDDEN)
UNIT_PROMPTS = 4


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


PERMUTATION = torch.randperm(VOCAB, generator=_generator(1))
LM_HEAD_VH = torch.randn(VOCAB, HIDDEN, generator=_generator(2))
EMBEDDING_VH = torch.randn(VOCAB, HIDDEN, generator=_generator(3))
NORM_H = 1 + 0.1 * torch.randn(HIDDEN, generator=_generator(4))


def write_verifier(directory: Path) -> Path:
    """A verifier's directory as far as training reads it: config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_head(path: Path, leave_out: str | None = None) -> Path:
    """The verifier head as a data set carries it; `leave_out` names a tensor that is missing."""
    tensors = {"embed_tokens.weight": EMBEDDING_VH, "norm.weight": NORM_H, "lm_head.weight": LM_HEAD_VH}
    tensors.pop(leave_out or "", None)
    description = {"rms_norm_eps": 1e-5, "num_layers": NUM_LAYERS, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    save_file(tensors, path, metadata={"format_version": "1", "config": json.dumps(description)})
    return path


def make_sample(row: int, num_tokens: int, num_prompt_tokens: int, seed: int = 0) -> LoadedSample:
    """One sample with its states in bf16 bits."""
    generator = _generator(1000 * seed + row)
    tokens = [int(torch.randint(VOCAB, (), generator=generator))]
    while len(tokens) <= num_tokens:
        tokens.append(int(PERMUTATION[tokens[-1]]))
    states_TLH = torch.randn(num_tokens - 1, len(SPEC.layer_ids), HIDDEN, generator=generator)
    states_TLH[:, -1] = LM_HEAD_VH[torch.tensor(tokens[1:num_tokens])] / NORM_H
    mask = np.zeros(num_tokens, np.bool_)
    mask[num_prompt_tokens:] = True
    return LoadedSample(
        key=SampleKey(row, 0, 0),
        token_ids=np.array(tokens[:num_tokens], np.int32),
        loss_mask=mask,
        states_TLH=states_TLH.to(torch.bfloat16).view(torch.uint16).numpy(),
        dtype="bfloat16",
    )


def write_dataset(uri: Path, lengths: Sequence[int], verifier: Path, *, seed: int = 0, head: bool = True) -> Dataset:
    """A complete data set of one sample per length; a third of each is prompt."""
    units = [
        UnitPlan(unit, first, len(lengths[first : first + UNIT_PROMPTS]), len(lengths[first : first + UNIT_PROMPTS]))
        for unit, first in enumerate(range(0, len(lengths), UNIT_PROMPTS))
    ]
    identity = Identity(
        mode="generate",
        verifier={"name": str(verifier), "num_layers": NUM_LAYERS, "vocab_size": VOCAB},
        tokenizer={"digest": "permutation"},
        states=SPEC,
        codec="none",
        sampling={"temperature": 0},
        prompts={"seed": seed},
    )
    dataset = Dataset.create(str(uri), identity, units)
    if head:
        dataset.put_head(write_head(verifier / "head.safetensors"))
    writer = dataset.writer()
    for plan in units:
        samples = []
        with open_shard_writer(writer.shard_target(plan.unit, 0, codec="none")) as shards:
            for row in range(plan.first, plan.first + plan.num_prompts):
                loaded = make_sample(row, lengths[row], max(1, lengths[row] // 3), seed)
                num_prompt_tokens = int(loaded.loss_mask.argmax())
                samples.append(
                    Sample(
                        key=loaded.key,
                        prompt_id=f"p{row}",
                        unit=plan.unit,
                        token_ids=loaded.token_ids.tolist(),
                        num_prompt_tokens=num_prompt_tokens,
                        loss_spans=[(num_prompt_tokens, loaded.num_tokens)],
                        text="",
                        reasoning_text=None,
                        finish_reason="stop",
                        receipt=shards.add(loaded.key, loaded.states_TLH),
                    )
                )
            files = shards.close()
        writer.commit([writer.write_unit(plan.unit, 0, samples, [], files)], {})
    dataset.complete()
    return dataset
