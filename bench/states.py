"""Hidden states to measure with: real ones of the embedded verifier, and synthetic ones of the reference shape.

The real ones are made once (Hugging Face on CPU, a few minutes) and kept as one safetensors file under `build/`, which
git ignores. The synthetic ones are drawn from them at every call, so nothing large is kept.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = REPOSITORY / "build" / "bench" / "smollm2-states.safetensors"
LAYER_IDS = (2, 15, 27, 30)  # EAGLE-3's choice for 30 layers, and the last layer's output before the final norm
MAX_NEW_TOKENS = 192
BATCH = 16

_NAMES = ("Ana", "Ben", "Chen", "Dina", "Emil", "Fatima", "Gus", "Hana")
_THINGS = ("apples", "notebooks", "stickers", "marbles", "candles", "stamps", "bricks", "tickets")
_QUESTIONS = (
    "{a} has {x} {t}. {b} gives {a} {y} more and then {a} sells half of them for ${z} each. How much money is made?",
    (
        "A box holds {x} {t} and {a} fills {y} boxes a day. After {z} days, how many {t} are packed? Then explain how "
        "{b}, who packs {x} fewer {t} a day, compares."
    ),
    "Write a short story in which {a} and {b} search a market for {x} lost {t}.",
    "{a} reads that {t} cost ${x} in {y} shops and ${z} elsewhere. What should {b} know about averages before buying?",
    "Explain to a child of {z} why {t} float or sink, with an experiment that {a} and {b} can do at home.",
    "Write a Python function that takes a list of {t} with prices between {x} and {y} and returns the {z} cheapest.",
)


def prompts(count: int) -> list[str]:
    """`count` different user messages, the same at every call."""
    random = np.random.default_rng(0)
    made = []
    for i in range(count):
        a, b = random.choice(_NAMES, 2, replace=False)
        x, y, z = (int(v) for v in random.integers(3, 60, 3))
        made.append(_QUESTIONS[i % len(_QUESTIONS)].format(a=a, b=b, t=random.choice(_THINGS), x=x, y=y, z=z))
    return made


def real_samples(count: int = 64) -> list[np.ndarray]:
    """bf16 states [rows, 4, 576] of `count` (at most 64) answered prompts, as uint16 bits; made on the first call."""
    from safetensors.numpy import load_file

    if not CACHE.exists():
        _make(CACHE)
    return list(load_file(CACHE).values())[:count]


def synthetic_samples(
    real: list[np.ndarray], count: int, hidden_size: int = 7168, rows: int = 512, seed: int = 0
) -> list[np.ndarray]:
    """bf16 states [rows, layers, hidden_size] whose channels have the statistics of real channels.

    Each channel repeats a real channel of its layer, rotated in time by a random amount and with the seven mantissa
    bits drawn anew: the distribution of sign and exponent in a channel is the real one, and no two channels repeat
    each other, so a codec finds as much (and no more) as in real states.
    """
    random = np.random.default_rng(seed)
    pool_TLH = np.concatenate(real)
    made = []
    for _ in range(count):
        start = int(random.integers(0, max(1, len(pool_TLH) - rows)))
        window_TLH = np.resize(pool_TLH[start : start + rows], (rows, *pool_TLH.shape[1:]))
        channel_H = random.integers(0, pool_TLH.shape[2], hidden_size)
        row_TH = (np.arange(rows)[:, None] + random.integers(0, rows, hidden_size)[None, :]) % rows
        states_TLH = np.empty((rows, pool_TLH.shape[1], hidden_size), np.uint16)
        for layer in range(pool_TLH.shape[1]):
            states_TLH[:, layer] = window_TLH[:, layer][row_TH, channel_H[None, :]]
        states_TLH &= 0xFF80
        states_TLH |= random.integers(0, 128, states_TLH.shape, dtype=np.uint16)
        made.append(states_TLH)
    return made


def machine() -> str:
    """One line on where a number was measured."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    return (
        f"{model}, {cpus} cores, load {load:.1f}, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def _make(path: Path, count: int = 64) -> None:
    """Answer the prompts greedily, then read each answer once more alone and keep its states."""
    import torch
    from safetensors.numpy import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gen.embedded import unpack

    directory = unpack(REPOSITORY / "models" / "smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    last_layer: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(
        lambda _module, _inputs, output: last_layer.append(output[0] if isinstance(output, tuple) else output)
    )
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts(count)
    ]
    states: dict[str, np.ndarray] = {}
    for start in range(0, count, BATCH):
        print(f"making real states: {start} of {count} answers", file=sys.stderr)
        batch = tokenizer(texts[start : start + BATCH], return_tensors="pt", padding=True)
        with torch.inference_mode():
            answers = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            for i, ids in enumerate(answers):
                first = int(batch["attention_mask"][i].argmax())
                new = ids[batch["input_ids"].shape[1] :]
                ended = (new == tokenizer.eos_token_id).nonzero()
                end = batch["input_ids"].shape[1] + (int(ended[0]) + 1 if len(ended) else len(new))
                last_layer.clear()
                hidden = model(ids[None, first : end - 1], output_hidden_states=True).hidden_states
                layers = [hidden[k] for k in LAYER_IDS[:-1]] + [last_layer[0]]
                states_TLH = torch.stack([layer[0] for layer in layers], dim=1).contiguous()
                states[f"sample{start + i:03}"] = states_TLH.view(torch.uint16).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".part")
    save_file(states, staging)
    staging.rename(path)


if __name__ == "__main__":
    samples = real_samples()
    print(f"{CACHE}: {len(samples)} samples, {sum(len(s) for s in samples)} rows, {samples[0].shape[1:]}")
