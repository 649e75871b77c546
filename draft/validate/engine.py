"""Checks that vLLM's own code makes (see `draft.validate.probe`)."""

from __future__ import annotations

from draft.decoder import LLAMA_ARCHITECTURES
from draft.tolerance import same
from draft.validate.result import CheckFailure, CheckSkipped
from draft.validate.subject import Subject


def check_vllm_config(subject: Subject) -> str:
    """vLLM's ModelConfig and SpeculativeConfig accept the pair and see what config.json describes."""
    report = subject.engine_report()
    if report.config_error is not None:
        raise CheckFailure(f"vLLM {report.vllm_version} refuses it: {report.config_error}", "mend config.json")
    if report.architecture not in LLAMA_ARCHITECTURES:
        raise CheckFailure(
            f"vLLM takes it for {report.architecture}, not for an EAGLE-3 draft", "set architectures and model_type"
        )
    expected = subject.implied_config.model_dump()
    wrong = [
        f"{name} as {value}, config.json means {expected[name]}"
        for name, value in report.parsed.items()
        if name in expected and value is not None and name != "rope_parameters" and not same(value, expected[name])
    ]
    if wrong:
        raise CheckFailure(f"vLLM reads {'; '.join(wrong)}", "write the fields where vLLM looks for them")
    return f"vLLM {report.vllm_version} reads {report.architecture}"


def check_vllm_load(subject: Subject) -> str:
    """vLLM's loader fills every parameter of the draft with exactly what the file holds."""
    report = subject.engine_report()
    if report.config_error is not None:
        raise CheckSkipped("vLLM does not get as far as loading", "see the check `vllm_config`")
    if report.load_error is not None:
        raise CheckFailure(f"vLLM {report.vllm_version} fails to load: {report.load_error}", "see the checks above")
    problems = []
    if report.unfilled:
        problems.append(f"loads silently without {', '.join(report.unfilled)}")
    if report.ignored:
        problems.append(f"passes over {', '.join(report.ignored)}")
    if report.altered:
        problems.append(f"loads silently something else than the file: {'; '.join(report.altered)}")
    if problems:
        raise CheckFailure(f"vLLM {report.vllm_version} " + " and ".join(problems), "see the checks above")
    return f"vLLM {report.vllm_version} loads it and every parameter holds what the file holds"
