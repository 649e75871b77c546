"""`headrace plan`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer


def command(
    config: Annotated[Path, typer.Argument(help="YAML file of a generate job; see configs/")],
    overrides: Annotated[list[str] | None, typer.Argument(help="k=v, as in sampling.max_tokens=512")] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="generated tokens a second of one replica, as measured: adds the time")
    ] = None,
    replica_hour_cost: Annotated[
        float | None, typer.Option(help="cost of one replica for an hour, in any currency: adds the cost")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Say how large a generate job is, and how long it takes, without loading a model.

    Sizes are upper bounds: every answer is taken to be as long as sampling.max_tokens allows.
    """
    if replica_hour_cost is not None and tokens_per_s is None:
        raise ValueError("--replica-hour-cost needs --tokens-per-s: a cost follows from a time")
    if tokens_per_s is not None and tokens_per_s <= 0:
        raise ValueError(f"--tokens-per-s {tokens_per_s} must be positive")
    from ray_jobs.config import load_config
    from ray_jobs.generate.config import GenerateConfig
    from ray_jobs.generate.plan import plan_job
    from ray_jobs.logs import library_logs

    settings = load_config(config, overrides or [], GenerateConfig)
    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as directory, library_logs(Path(directory) / "log"):
        plan = plan_job(settings, Path(directory))
    answers = plan.expected_samples - plan.rejects.total() * settings.sampling.n
    output_tokens = answers * settings.sampling.max_tokens if settings.prompts.mode == "generate" else 0
    facts: dict[str, object] = {
        "prompts": plan.num_prompts,
        "rejected_rows": dict(plan.rejects),
        "units": len(plan.units),
        "samples": answers,
        "layer_ids": list(plan.states.layer_ids),
        "bytes_per_token": plan.states.row_bytes,
        "max_output_tokens": output_tokens,
        "max_raw_bytes": plan.expected_bytes,
    }
    if tokens_per_s is not None:
        hours = output_tokens / tokens_per_s / settings.replicas.count / 3600
        facts["max_hours"] = hours
        facts["max_replica_hours"] = hours * settings.replicas.count
        if replica_hour_cost is not None:
            facts["max_cost"] = hours * settings.replicas.count * replica_hour_cost
    if as_json:
        print(json.dumps(facts))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int | float) else str(value))
    Console().print(table)
