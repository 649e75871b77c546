"""`headrace train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    config: Annotated[Path, typer.Argument(help="YAML file; see configs/")],
    overrides: Annotated[list[str] | None, typer.Argument(help="k=v, as in optim.lr=1e-3")] = None,
    submit: Annotated[str | None, typer.Option(help="address of a cluster: run this as a Ray job there")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Train a draft on a data set; the same command goes on with a run that stopped.

    The run's directory (checkpoint.directory) gets the resolved configuration, metrics.jsonl and checkpoints; export
    the newest with `headrace draft export`.
    """
    from ray_jobs.config import load_config
    from ray_jobs.train.config import TrainConfig

    settings = load_config(config, overrides or [], TrainConfig)
    if submit is not None:
        from ray_jobs.submit import submit_job

        raise typer.Exit(submit_job(submit, "train", settings))

    from ray_jobs.cluster import connected
    from ray_jobs.progress import stage, ticking
    from ray_jobs.train.job import finished_run, run_training

    result = finished_run(settings)
    if result is None:
        with stage("training") as bar, ticking(bar), connected(settings.checkpoint.directory / "logs"):

            def show(line: dict[str, Any]) -> None:
                bar.update(line["packs"], total=line["total_packs"], note=describe(line))

            result = run_training(settings, progress=show)
    answer = {
        "checkpoint": str(result.checkpoint_dir),
        "seconds": result.seconds,
        "coverage": result.coverage,
        **result.metrics,
    }
    if as_json:
        print(json.dumps(answer))
        return
    print(
        f"{result.checkpoint_dir}\n{describe(result.metrics)}, {result.metrics['step']} steps in {result.seconds:.0f} s"
    )


def describe(line: dict[str, Any]) -> str:
    """One line of metrics.jsonl for people."""
    accuracy = " / ".join(f"{share:.3f}" for share in line["position_accuracy"])
    return f"loss {line['loss']:.3f}, accuracy {accuracy}, {line['tokens_per_s']:.0f} tokens/s"
