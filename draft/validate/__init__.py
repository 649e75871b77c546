"""Validation of a draft without its verifier's weights: one function per check, run by `validate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from draft.validate.probe import EngineReport, Probe, ProbeFailedError
from draft.validate.result import CheckFailure, CheckResult, CheckSkipped, Status
from draft.validate.subject import Subject
from draft.verifier import read_verifier

__all__ = ["CheckResult", "EngineReport", "Status", "Subject", "checks", "run_checks", "validate"]

Check = Callable[[Subject], str]


def checks() -> dict[str, Check]:
    """Every check by name, in the order of the report. Imports torch."""
    from draft.validate import dataset, engine, files, numbers, settings, tensors

    return {
        "files": files.check_files,
        "schema": files.check_schema,
        "config": files.check_config,
        "transformers": files.check_transformers,
        "vllm_config": engine.check_vllm_config,
        "explicit": settings.check_explicit,
        "verifier_fit": settings.check_verifier_fit,
        "layer_ids": settings.check_layer_ids,
        "layer_id_places": settings.check_layer_id_places,
        "rope": settings.check_rope,
        "embedding": settings.check_embedding,
        "agreement": settings.check_agreement,
        "names": tensors.check_names,
        "shapes": tensors.check_shapes,
        "dtypes": tensors.check_dtypes,
        "vocab_map": tensors.check_vocab_map,
        "coverage": tensors.check_coverage,
        "finite": numbers.check_finite,
        "norms": numbers.check_norms,
        "matrices": numbers.check_matrices,
        "vllm_load": engine.check_vllm_load,
        "dataset_accuracy": dataset.check_dataset_accuracy,
    }


def validate(draft_dir: Path | str, verifier_dir: Path | str, dataset_uri: str | None = None) -> list[CheckResult]:
    """Check one draft; the verifier's directory needs its configuration only.

    With `dataset_uri` a few stored samples are run through the draft as well.

    Raises FileNotFoundError where the draft's directory or the verifier's config.json is missing.
    """
    draft_dir, verifier_dir = Path(draft_dir), Path(verifier_dir)
    if not draft_dir.is_dir():
        raise FileNotFoundError(f"{draft_dir} is no directory: give a draft's directory")
    probe = Probe([(verifier_dir, draft_dir)])
    try:
        # What needs no engine is done while the probe imports vLLM.
        verifier = read_verifier(verifier_dir)
        early = Subject(draft_dir, verifier, None, dataset_uri)
        results = {r.name: r for r in run_checks(early, [name for name in checks() if name not in NEEDS_ENGINE])}
        try:
            [report] = probe.reports()
        except ProbeFailedError as error:  # a draft that takes vLLM's process down is a finding
            report = EngineReport(config_error=str(error))
        late = Subject(draft_dir, verifier, report, dataset_uri)
    finally:
        probe.close()
    results |= {r.name: r for r in run_checks(late, NEEDS_ENGINE)}
    return [results[name] for name in checks()]


# layer_id_places also compares what both model runners read, rope the table that vLLM computes; transformers is
# imported by the probe anyway.
NEEDS_ENGINE = ("transformers", "vllm_config", "layer_id_places", "rope", "vllm_load")


def run_checks(subject: Subject, names: Sequence[str] | None = None) -> list[CheckResult]:
    """Run some checks (all by default) on a subject, in the order of the report."""
    functions = checks()
    wanted = set(functions if names is None else names)
    return [run_check(name, check, subject) for name, check in functions.items() if name in wanted]


def run_check(name: str, check: Check, subject: Subject) -> CheckResult:
    try:
        return CheckResult(name, "pass", check(subject))
    except CheckFailure as failure:
        return CheckResult(name, "fail", failure.detail, failure.remedy)
    except CheckSkipped as skipped:
        return CheckResult(name, "skipped", skipped.reason, skipped.remedy)
