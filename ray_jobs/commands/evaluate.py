"""`headrace evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from draft.evaluate import EvaluationPrompt, EvaluationReport
    from gen.config import VerifierConfig


CHART_SUFFIXES = (".png", ".svg", ".pdf")


def command(
    drafts: Annotated[list[Path], typer.Argument(help="directories of exported drafts; several are compared")],
    verifier: Annotated[str, typer.Option(help="directory of the verifier, or `embedded`")],
    prompts: Annotated[str, typer.Option(help="JSON lines, or what else the data sets library opens")] = (
        "builtin:heldout"
    ),
    num_draft_tokens: Annotated[str, typer.Option(help="tokens per draft; several (1,2,3) make a sweep")] = "3",
    max_tokens: Annotated[int, typer.Option(help="of an answer")] = 128,
    limit: Annotated[int | None, typer.Option(help="rows of the prompts to read")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy; greedy answers are compared with no draft's")] = 0.0,
    baseline: Annotated[bool, typer.Option(help="also run the verifier alone: times, and greedy answers")] = True,
    engine_args: Annotated[str, typer.Option(help="further arguments of vLLM, as JSON")] = "{}",
    log_dir: Annotated[Path, typer.Option(help="logs of the engines")] = Path("runs/evaluate"),
    chart: Annotated[Path | None, typer.Option(help="write a bar chart to this .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the report as one JSON object")] = False,
) -> None:
    """Measure acceptance of drafts in vLLM: per position, acceptance length, by category, with 95 % intervals."""
    lengths = _numbers(num_draft_tokens)
    arguments = _json_object(engine_args)
    if chart is not None and chart.suffix not in CHART_SUFFIXES:
        raise ValueError(f"--chart {chart} must end in {', '.join(CHART_SUFFIXES)}")

    from draft.engine_run import EngineFailedError
    from draft.evaluate import evaluate
    from gen.config import VerifierConfig
    from ray_jobs.errors import JobError
    from ray_jobs.progress import stage

    config = VerifierConfig(model=verifier)
    rows = read_evaluation_prompts(config, prompts, limit=limit)
    try:
        with stage("evaluate") as bar:
            report = evaluate(
                drafts,
                config.directory(),
                rows,
                log_dir=log_dir,
                num_draft_tokens=lengths,
                max_tokens=max_tokens,
                temperature=temperature,
                baseline=baseline,
                engine_args=arguments,
                progress=lambda done, total, note: bar.update(done, total=total, note=note),
            )
    except EngineFailedError as error:
        raise JobError(str(error)) from error
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        print_report(report)
    if chart is not None:
        from ray_jobs.charts import acceptance_chart

        acceptance_chart(report, chart)


def read_evaluation_prompts(
    verifier: VerifierConfig, source: str, *, limit: int | None = None
) -> list[EvaluationPrompt]:
    """The first turn of each usable row, tokenised as vLLM's chat endpoint would. Bad rows are named on stderr."""
    import sys

    from draft.evaluate import EvaluationPrompt
    from gen.chat import ChatTokenizer
    from gen.prompts import BadRow, RowError, read_prompts

    chat = ChatTokenizer.from_config(verifier, verifier.directory())
    rows = []
    for row in read_prompts(source, limit=limit):
        bad: BadRow | RowError
        if isinstance(row, BadRow):
            bad = row
        else:
            try:
                rows.append(EvaluationPrompt(chat.prompt_ids(row.messages), row.prompt_id, row.category))
                continue
            except RowError as error:
                bad = error
        print(f"row {row.row} left out: {bad.reason}, {bad.detail}", file=sys.stderr)
    if not rows:
        raise ValueError(f"prompts {source} has no usable row")
    return rows


def print_report(report: EvaluationReport) -> None:
    """Tables and bars on stdout, one column per draft and draft length."""
    from rich.bar import Bar
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from draft.evaluate import short_names

    console = Console()
    results = report.results
    called = short_names(result.draft for result in results)
    names = [escape(f"{called[result.draft]}, K {result.num_draft_tokens}") for result in results]
    measured = [result.acceptance for result in results]
    longest = max(result.num_draft_tokens for result in results)

    title = f"{report.num_prompts} prompts, at most {report.max_tokens} tokens, temperature {report.temperature:g}"
    table = Table("", *names, title=title)
    table.add_row("acceptance length", *(str(one.acceptance_length) for one in measured), style="bold")
    table.add_row("", *(Bar(longest, 0, (one.acceptance_length.value or 1) - 1, width=24) for one in measured))
    for position in range(longest):
        rates = (one.position_rates[position : position + 1] for one in measured)
        table.add_row(f"position {position + 1}", *("".join(map(str, rate)) for rate in rates))
    table.add_row("per draft token", *(str(one.accepted_per_draft_token) for one in measured))
    table.add_row("drafts", *(str(one.num_drafts) for one in measured))
    for category in sorted({category for result in results for category in result.categories}):
        groups = [result.categories[category] for result in results]
        label = f"{escape(category)} ({groups[0].num_prompts} prompts)"
        table.add_row(label, *(str(group.acceptance_length) for group in groups))
    differences = [result.length_difference for result in results]
    if any(difference is not None for difference in differences):
        label = f"length minus {escape(called[results[0].draft])}'s"
        table.add_row(label, *("" if difference is None else str(difference) for difference in differences))
    if report.baseline is not None:
        times = [(result.output_tokens, result.generate_s, result.speed_up) for result in results]
        alone = report.baseline.output_tokens / report.baseline.generate_s
        table.add_section()
        table.add_row("tokens/s", *(f"{tokens / seconds:.1f}" for tokens, seconds, _ in times))
        table.add_row(f"over {alone:.1f} without", *(f"{speed_up or 0:.2f}" for *_, speed_up in times))
    found = [result.differences for result in results]
    if any(one is not None for one in found):
        cells = ("" if one is None else f"{one.num_different} of {one.num_prompts}" for one in found)
        table.add_row("greedy answers that differ", *cells)
    console.print(table)

    for name, one in zip(names, found, strict=True):
        if one is not None and one.first:
            where = ", ".join(f"{prompt} at token {position}" for prompt, position in one.first)
            console.print(f"{name}: first differences from no draft: {where}", markup=False)
    for note in report.notes:
        console.print(note, style="dim", markup=False)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--num-draft-tokens {text!r} must be numbers like 3 or 1,2,3") from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--engine-args {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"--engine-args {text!r} must be a JSON object")
    return value
