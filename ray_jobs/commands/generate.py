"""`headrace generate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    config: Annotated[Path, typer.Argument(help="YAML file; see configs/")],
    overrides: Annotated[list[str] | None, typer.Argument(help="k=v, as in sampling.max_tokens=512")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="logs, resolved configuration, summary; default runs/NAME")
    ] = None,
    submit: Annotated[str | None, typer.Option(help="address of a cluster: run this as a Ray job there")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the summary as JSON")] = False,
) -> None:
    """Answer prompts and store the hidden states: prompts -> samples + shards + manifest."""
    from ray_jobs.config import dump_config, load_config
    from ray_jobs.generate.config import GenerateConfig

    settings = load_config(config, overrides or [], GenerateConfig)
    if submit is not None:
        from ray_jobs.submit import submit_job

        raise typer.Exit(submit_job(submit, "generate", settings))
    directory = run_dir or Path("runs") / config.stem
    dump_config(settings, directory / "generate.yaml")
    from ray_jobs.cluster import connected
    from ray_jobs.logs import library_logs

    with library_logs(directory / "logs" / "driver.log"), connected(directory / "logs"):
        from ray_jobs.generate.job import run_generate

        summary = run_generate(settings, directory)
    print(json.dumps(summary.as_json()) if as_json else summary.as_text())
