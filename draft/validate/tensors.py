"""Checks of the weights' names, shapes and dtypes, and of the vocabulary mapping."""

from __future__ import annotations

import numpy as np

from draft.validate.result import CheckFailure, CheckSkipped
from draft.validate.subject import Subject
from draft.vocab import find_mapping_faults
from draft.weights import EMBEDDING, VERIFIER_ONLY, expected_vllm_names, tensor_shapes, vllm_name

FLOAT_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Below this share of the trained tokens the draft's vocabulary, not its skill, bounds what it can accept.
LOWEST_COVERAGE = 0.8


def check_names(subject: Subject) -> str:
    """After vLLM's renaming every parameter of the draft is there exactly once and nothing is left over."""
    expected = expected_vllm_names(subject.implied_config)
    if subject.form == "nested" and subject.implied_config.uses_draft_vocab and "t2d" not in subject.headers:
        raise CheckFailure("t2d is missing: the speculators library needs it", "import and export the draft again")
    found: dict[str, str] = {}
    problems: list[str] = []
    for name in subject.headers:
        renamed = vllm_name(name)
        if renamed is None:
            continue
        if renamed in found:
            problems.append(f"{found[renamed]} and {name} are both {renamed}")
        found[renamed] = name
    allowed = {vllm_name(EMBEDDING)}
    missing = sorted(expected - set(found))
    extra = sorted(found[name] for name in set(found) - expected - allowed)
    if missing:
        problems.append(f"missing (vLLM loads without them silently): {', '.join(missing)}")
        if "lm_head.weight" in missing and not subject.implied_config.uses_draft_vocab:
            problems.append("for lm_head vLLM takes the verifier's, SGLang random numbers")
    if extra:
        why = " (held for training only)" if set(extra) & set(VERIFIER_ONLY) else ""
        problems.append(f"no parameter of this draft{why}: {', '.join(extra)}")
    if problems:
        raise CheckFailure("; ".join(problems), "export the draft again from its training checkpoint")
    own = ", its own embedding" if vllm_name(EMBEDDING) in found else ""
    return f"all {len(expected)} parameters are there{own}"


def check_shapes(subject: Subject) -> str:
    """Every tensor has the shape that config.json implies, as vLLM reads it."""
    expected = tensor_shapes(subject.implied_config, embedding=True)
    wrong: list[str] = []
    for name, header in subject.canonical_headers.items():
        if name in expected and header.shape != expected[name]:
            turned = " (transposed)" if header.shape == expected[name][::-1] else ""
            wrong.append(f"{name} is {list(header.shape)}{turned}, config.json implies {list(expected[name])}")
    if wrong:
        raise CheckFailure("; ".join(wrong), "find which one is right: `headrace draft check` shows both sides")
    return "all shapes follow from config.json"


def check_dtypes(subject: Subject) -> str:
    """Weights have the dtype that config.json states, d2t is int64, t2d is bool."""
    stated = subject.view.get("dtype")
    float_name = FLOAT_NAMES.get(str(stated))
    expected = {"d2t": "I64", "t2d": "BOOL"}
    wrong = []
    for name, header in subject.canonical_headers.items():
        wanted = expected.get(name) or float_name
        if wanted is None and header.dtype in FLOAT_NAMES.values():
            continue
        if header.dtype != wanted:
            wrong.append(f"{name} is {header.dtype}, expected {wanted or 'a floating-point type'}")
    if wrong:
        raise CheckFailure("; ".join(wrong), "export the draft again: it casts to the configuration's dtype")
    return f"weights {float_name or 'of floating-point types'}, mapping I64 and BOOL"


def check_vocab_map(subject: Subject) -> str:
    """d2t and t2d describe one sound mapping into this verifier's vocabulary."""
    names = subject.canonical_headers
    if "d2t" not in names:
        if subject.implied_config.uses_draft_vocab:
            raise CheckSkipped("there is no d2t", "see the check `names`")
        return "the draft proposes from the whole vocabulary"
    d2t = subject.integers("d2t")
    t2d = (subject.tensor("t2d") != 0).numpy() if "t2d" in names else None
    faults = find_mapping_faults(d2t, t2d, subject.verifier.vocab_size)
    if faults:
        raise CheckFailure(
            "; ".join(faults), "take d2t and t2d from the training checkpoint; a mapping belongs to one data set"
        )
    missing = _special_tokens_outside(subject, d2t)
    if missing:
        raise CheckFailure(
            f"the draft can never propose the end of a sequence: tokens {missing} are outside its vocabulary",
            "build the mapping with the special tokens forced in, and train again",
        )
    return f"{len(d2t)} draft tokens, strictly ascending within {subject.verifier.vocab_size}"


def _special_tokens_outside(subject: Subject, d2t: np.ndarray) -> list[int]:
    """End-of-sequence ids of our own drafts that the mapping misses (published drafts are not held to it)."""
    if subject.own_config is None or subject.own_config.eos_token_id is None:
        return []
    eos = subject.own_config.eos_token_id
    targets = set((np.arange(len(d2t)) + d2t).tolist())
    return [token for token in (eos if isinstance(eos, list) else [eos]) if token not in targets]


def check_coverage(subject: Subject) -> str:
    """The draft's vocabulary covers the tokens that it was trained on."""
    coverage = subject.record.notes.coverage if subject.record is not None else None
    if coverage is None:
        raise CheckSkipped("no coverage was recorded", "drafts trained by `headrace train` record it")
    if coverage < LOWEST_COVERAGE:
        raise CheckFailure(
            f"only {coverage:.3f} of the trained tokens are in the draft's vocabulary", "raise draft_vocab_size"
        )
    return f"{coverage:.4f} of the trained tokens are in the draft's vocabulary"
