"""Acceptance of drafts in vLLM: the same prompts without a draft, then with each draft at each draft length."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draft import notes
from draft.acceptance import RESAMPLES, Acceptance, AcceptanceCounts, Interval, length_difference, measure
from draft.engine_run import EngineAnswer, EngineRequest, run_engine
from draft.serve import speculative_config
from draft.verifier import VerifierShape, read_verifier

REPORT_VERSION = 1
SPEED_NOTE = (
    "Times are of this machine with these engine arguments. A speed-up only means something on the serving hardware: "
    "it depends on how much of a step is spent waiting for weights."
)
DIFFERENCE_NOTE = (
    "Greedy answers with and without a draft are equal but for rounding: the verifier then sums in batches of other "
    "shapes, and two near-equal tokens can swap."
)
INTERVAL_NOTE = (
    f"95 % intervals: bootstrap over prompts, {RESAMPLES} resamples, widened for few prompts; a single one has none."
)

# Tokens of the context beyond prompt and answer that a draft may reach for.
CONTEXT_MARGIN = 16

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class EvaluationPrompt:
    """One prompt as the verifier reads it."""

    token_ids: list[int]
    prompt_id: str
    category: str | None = None


@dataclass(frozen=True)
class Differences:
    """Greedy answers with a draft against those without: equal but for rounding, which batching changes."""

    num_prompts: int
    num_different: int
    first: tuple[tuple[str, int], ...]  # up to ten: prompt id, position of the first token that differs


@dataclass(frozen=True)
class Baseline:
    """The verifier alone."""

    generate_s: float
    output_tokens: int
    load_s: float


@dataclass(frozen=True)
class DraftResult:
    """One draft at one draft length."""

    draft: str
    num_draft_tokens: int  # K, per draft
    acceptance: Acceptance
    categories: dict[str, Acceptance]
    length_difference: Interval | None  # acceptance length minus that of the first draft at the same K; paired
    differences: Differences | None  # None without a baseline or above temperature 0
    generate_s: float
    output_tokens: int
    load_s: float
    speed_up: float | None  # output tokens per second over the baseline's; None without one


@dataclass(frozen=True)
class EvaluationReport:
    """Everything that one evaluation measured."""

    verifier: str
    num_prompts: int
    max_tokens: int
    temperature: float
    engine_args: dict[str, Any]
    vllm_version: str
    baseline: Baseline | None
    results: list[DraftResult]
    notes: tuple[str, ...] = (INTERVAL_NOTE, DIFFERENCE_NOTE, SPEED_NOTE)
    report_version: int = REPORT_VERSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def short_names(drafts: Iterable[str]) -> dict[str, str]:
    """What to call each draft: its directory's name, with as many parents as it takes to tell all of them apart."""
    parts = {draft: Path(draft).parts for draft in drafts}
    depth = 1
    while len({names[-depth:] for names in parts.values()}) < len(parts):
        depth += 1
    return {draft: "/".join(names[-depth:]) for draft, names in parts.items()}


def acceptance_notes(report: Mapping[str, Any]) -> list[notes.Acceptance]:
    """The measurements of a report's JSON, one for each draft length, for the notes of an exported draft.

    Raises ValueError for another version, for a report on several drafts and where nothing was drafted.
    """
    if report.get("report_version") != REPORT_VERSION:
        raise ValueError(
            f"report_version {report.get('report_version')!r} is not known here, expected {REPORT_VERSION}"
        )
    drafts = {result["draft"] for result in report["results"]}
    if len(drafts) != 1:
        raise ValueError(f"the report is on {len(drafts)} drafts: evaluate the one that is exported alone")
    prompts = f"{report['num_prompts']} prompts, {report['max_tokens']} tokens, temperature {report['temperature']:g}"
    found = []
    for result in report["results"]:
        measured = result["acceptance"]
        if measured["acceptance_length"]["value"] is None:
            raise ValueError(f"{result['draft']}: nothing was drafted, so there is no acceptance to note")
        note = notes.Acceptance(
            acceptance_length=measured["acceptance_length"]["value"],
            position_rates=[rate["value"] or 0.0 for rate in measured["position_rates"]],
            num_drafts=measured["num_drafts"],
            prompts=prompts,
            num_speculative_tokens=result["num_draft_tokens"],
        )
        found.append(note)
    return found


def evaluate(
    drafts: Sequence[Path],
    verifier_dir: Path,
    prompts: Sequence[EvaluationPrompt],
    *,
    log_dir: Path,
    num_draft_tokens: Sequence[int] = (3,),
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    baseline: bool = True,
    engine_args: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> EvaluationReport:
    """Measure every draft at every draft length on the same prompts, one engine after another.

    Args:
        log_dir: gets one log file per engine.
        num_draft_tokens: tokens that the draft proposes per verifier step; several make a sweep.
        baseline: also run the verifier alone, for times and for comparing greedy answers.
        engine_args: further arguments of vLLM's LLM, the same for all engines. `max_model_len` defaults to what prompts
            and answers need.
        environment: of the engines' processes; default: `engine_environment`.
        progress: called as (engines done, engines in all, what runs now) about twice a second.

    Raises:
        ValueError: for contradicting arguments, prompts that leave no room for an answer, a draft of another verifier.
        FileNotFoundError: a draft has no config.json.
        EngineFailedError: an engine ended early; the message has the end of its log.
    """
    _check_arguments(drafts, prompts, num_draft_tokens, max_tokens)
    verifier = read_verifier(verifier_dir)
    longest = max(len(prompt.token_ids) for prompt in prompts) + max_tokens
    room = longest + max(num_draft_tokens) + CONTEXT_MARGIN
    arguments = {"max_model_len": min(room, verifier.max_position_embeddings), **(engine_args or {})}
    _check_lengths(prompts, max_tokens, int(arguments["max_model_len"]))
    _check_fit(drafts, verifier)
    runs: list[tuple[str, Path | None, int]] = [("verifier alone", None, 0)] if baseline else []
    called = short_names(map(str, drafts))
    runs += [(f"{called[str(path)]}, {k} draft tokens", path, k) for path in drafts for k in num_draft_tokens]

    answers: dict[tuple[Path | None, int], EngineAnswer] = {}
    for number, (name, path, k) in enumerate(runs):
        request = EngineRequest(
            model=str(verifier_dir),
            prompts=[list(prompt.token_ids) for prompt in prompts],
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            engine_args=arguments,
            speculative_config=None if path is None else speculative_config(path.resolve(), k),
        )
        answers[path, k] = run_engine(
            request,
            log_dir / f"engine-{number}.log",
            environment=environment,
            tick=_ticker(progress, number, len(runs), name),
        )
    if progress is not None:
        progress(len(runs), len(runs), "")

    alone = answers.get((None, 0))
    results = [
        _result(path, k, answers[path, k], prompts, answers[drafts[0], k], alone, greedy=temperature == 0)
        for path in drafts
        for k in num_draft_tokens
    ]
    return EvaluationReport(
        verifier=str(verifier_dir),
        num_prompts=len(prompts),
        max_tokens=max_tokens,
        temperature=temperature,
        engine_args=arguments,
        vllm_version=next(iter(answers.values())).vllm_version,
        baseline=None if alone is None else Baseline(alone.generate_s, _num_tokens(alone), alone.load_s),
        results=results,
    )


def _check_arguments(
    drafts: Sequence[Path], prompts: Sequence[EvaluationPrompt], num_draft_tokens: Sequence[int], max_tokens: int
) -> None:
    if not drafts or len(set(drafts)) != len(drafts):
        raise ValueError(f"drafts must be one or more different directories, got {[str(path) for path in drafts]}")
    for path in drafts:
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"draft {path} has no config.json: export a checkpoint with `headrace draft export`"
            )
    if not prompts:
        raise ValueError("no prompts to evaluate on")
    empty = [prompt.prompt_id for prompt in prompts if not prompt.token_ids]
    if empty:
        raise ValueError(f"prompts without a token: {', '.join(empty[:5])}")
    if not num_draft_tokens or min(num_draft_tokens) < 1 or len(set(num_draft_tokens)) != len(num_draft_tokens):
        raise ValueError(f"num_draft_tokens {list(num_draft_tokens)} must be different positive numbers")
    if max_tokens < 2:
        raise ValueError(f"max_tokens {max_tokens} must be at least 2: the first token of an answer is never drafted")


def _check_lengths(prompts: Sequence[EvaluationPrompt], max_tokens: int, max_model_len: int) -> None:
    too_long = [prompt for prompt in prompts if len(prompt.token_ids) + max_tokens > max_model_len]
    if too_long:
        named = ", ".join(f"{prompt.prompt_id} ({len(prompt.token_ids)} tokens)" for prompt in too_long[:5])
        raise ValueError(
            f"{len(too_long)} prompt(s), with an answer of {max_tokens} tokens, exceed max_model_len {max_model_len}: "
            f"{named}"
        )


def _check_fit(drafts: Sequence[Path], verifier: VerifierShape) -> None:
    """Find out before the verifier is loaded that a draft belongs to another one."""
    from draft.validate import Subject, run_checks

    for path in drafts:
        results = run_checks(Subject(path, verifier, None), ["config", "verifier_fit", "layer_ids"])
        failed = [f"{result.name}: {result.detail}" for result in results if result.status == "fail"]
        if failed:
            raise ValueError(f"draft {path} does not fit the verifier: {'; '.join(failed)}; see `headrace validate`")


def _ticker(progress: Progress | None, done: int, total: int, name: str) -> Callable[[], None] | None:
    if progress is None:
        return None
    began = time.monotonic()
    return lambda: progress(done, total, f"{name} ({time.monotonic() - began:.0f} s)")


def _result(
    path: Path,
    k: int,
    answer: EngineAnswer,
    prompts: Sequence[EvaluationPrompt],
    first: EngineAnswer,
    alone: EngineAnswer | None,
    *,
    greedy: bool,
) -> DraftResult:
    counts = _counts(answer)
    by_category: dict[str, list[AcceptanceCounts]] = {}
    for prompt, count in zip(prompts, counts, strict=True):
        if prompt.category is not None:
            by_category.setdefault(prompt.category, []).append(count)
    speed_up = None
    if alone is not None:
        speed_up = (_num_tokens(answer) / answer.generate_s) / (_num_tokens(alone) / alone.generate_s)
    return DraftResult(
        draft=str(path),
        num_draft_tokens=k,
        acceptance=measure(counts),
        categories={category: measure(by_category[category]) for category in sorted(by_category)},
        length_difference=None if answer is first else length_difference(_counts(first), counts),
        differences=_differences(prompts, alone, answer) if alone is not None and greedy else None,
        generate_s=answer.generate_s,
        output_tokens=_num_tokens(answer),
        load_s=answer.load_s,
        speed_up=speed_up,
    )


def _counts(answer: EngineAnswer) -> list[AcceptanceCounts]:
    assert answer.histograms is not None
    assert answer.draft_tokens is not None
    return [
        AcceptanceCounts(tuple(histogram), num_draft_tokens)
        for histogram, num_draft_tokens in zip(answer.histograms, answer.draft_tokens, strict=True)
    ]


def _num_tokens(answer: EngineAnswer) -> int:
    return sum(map(len, answer.outputs))


def _differences(prompts: Sequence[EvaluationPrompt], alone: EngineAnswer, answer: EngineAnswer) -> Differences:
    found = []
    for prompt, left, right in zip(prompts, alone.outputs, answer.outputs, strict=True):
        if left != right:
            unequal = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
            found.append((prompt.prompt_id, next(unequal, min(len(left), len(right)))))
    return Differences(len(prompts), len(found), tuple(found[:10]))
