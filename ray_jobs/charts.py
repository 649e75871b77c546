"""Charts of an evaluation, drawn without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draft.acceptance import Interval
    from draft.evaluate import EvaluationReport


def acceptance_chart(report: EvaluationReport, path: Path) -> None:
    """Acceptance length, and acceptance rate of each position, one bar per draft and draft length, 95 % intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from draft.evaluate import short_names

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    lengths, rates = figure.subplots(1, 2)
    called = short_names(result.draft for result in report.results)
    several = len({result.num_draft_tokens for result in report.results}) > 1
    names = [
        f"{called[result.draft]}, K {result.num_draft_tokens}" if several else called[result.draft]
        for result in report.results
    ]
    values, errors = _bars([result.acceptance.acceptance_length for result in report.results])
    lengths.bar(names, values, yerr=errors, capsize=3, color=[f"C{number}" for number in range(len(names))])
    lengths.set_ylim(bottom=1)
    lengths.set_ylabel("acceptance length (tokens per verifier step)")
    lengths.tick_params(axis="x", rotation=20)
    width = 0.8 / len(names)
    for number, (name, result) in enumerate(zip(names, report.results, strict=True)):
        values, errors = _bars(result.acceptance.position_rates)
        places = [position + 1 + (number - (len(names) - 1) / 2) * width for position in range(len(values))]
        rates.bar(places, values, width, yerr=errors, capsize=2, label=name, color=f"C{number}")
    rates.set_xticks(range(1, 1 + max(result.num_draft_tokens for result in report.results)))
    rates.set_xlabel("position in the draft")
    rates.set_ylabel("share of drafts accepted up to here")
    rates.legend()
    figure.suptitle(f"{report.num_prompts} prompts, temperature {report.temperature:g}; bars: 95 % intervals")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _bars(intervals: list[Interval] | tuple[Interval, ...]) -> tuple[list[float], list[list[float]]]:
    """Heights, and what error bars reach below and above them."""
    values = [interval.value or 0.0 for interval in intervals]
    lows = [value if interval.low is None else interval.low for value, interval in zip(values, intervals, strict=True)]
    highs = [
        value if interval.high is None else interval.high for value, interval in zip(values, intervals, strict=True)
    ]
    below = [max(value - low, 0.0) for value, low in zip(values, lows, strict=True)]
    above = [max(high - value, 0.0) for value, high in zip(values, highs, strict=True)]
    return values, [below, above]
