"""The whole path on the embedded verifier. Each stage leaves its result, and is not done again."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draft.evaluate import EvaluationReport, acceptance_notes, evaluate
from draft.export import export
from draft.notes import Acceptance
from draft.validate import validate
from ray_jobs.cluster import connected
from ray_jobs.config import dump_config, load_config
from ray_jobs.generate.config import GenerateConfig
from ray_jobs.logs import library_logs
from ray_jobs.progress import stage, ticking
from ray_jobs.train.config import TrainConfig
from storage.query import query

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RECORD = "demo.json"
NUM_DRAFT_TOKENS = 3
HELDOUT_PROMPTS = 64
ANSWER_TOKENS = 96
SQL = """\
select finish_reason, count(*) as samples, sum(num_prompt_tokens) as prompt_tokens,
       sum(num_output_tokens) as output_tokens, count(distinct shard) as shards, count(distinct replica) as replicas
from samples group by finish_reason order by samples desc"""


class _Record:
    """Results of finished stages, kept in one JSON file: stage -> {inputs, result, seconds}."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stages: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}

    def result(self, name: str, inputs: Any, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The stage's recorded result if it was made from the same inputs, otherwise that of `work`, recorded."""
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()
        known = self._stages.get(name)
        if known is not None and known["inputs"] == digest:
            print(f"{name}: done before", file=sys.stderr)
            return dict(known["result"])
        began = time.monotonic()
        result = work()
        self._stages[name] = {"inputs": digest, "result": result, "seconds": time.monotonic() - began}
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._stages, indent=2) + "\n")
        temporary.replace(self._path)
        return result

    def seconds(self, name: str) -> float:
        return float(self._stages[name]["seconds"])


def run_demo(run_dir: Path) -> None:
    """Generate, query, train, export, validate, evaluate; print what each cost and the acceptance as measured.

    Raises what the stages raise; what was finished before stays, and running again goes on from there.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    console = Console()
    began = time.monotonic()
    record = _Record(run_dir / RECORD)
    generate_config = load_config(CONFIGS / "embedded.yaml", [f"dataset.uri={run_dir / 'dataset'}"], GenerateConfig)
    train_config = load_config(
        CONFIGS / "embedded_train.yaml",
        [f"dataset.uri={run_dir / 'dataset'}", f"checkpoint.directory={run_dir / 'train'}"],
        TrainConfig,
    )
    dump_config(generate_config, run_dir / "generate.yaml")
    logs = run_dir / "logs"

    generated = record.result(
        "generate", generate_config.model_dump(mode="json"), lambda: _generate(generate_config, run_dir)
    )
    console.print(f'\n[bold]headrace query {run_dir / "dataset"}[/] "{SQL}"')
    _print_rows(console, query(str(run_dir / "dataset"), SQL).to_pylist())

    inputs = {"config": train_config.model_dump(mode="json"), "data": generated["version"]}
    trained = record.result("train", inputs, lambda: _train(train_config, logs))

    checkpoint = Path(trained["checkpoint"])
    unmeasured = run_dir / "draft-unmeasured"
    verifier_dir = generate_config.verifier.directory()
    exported = record.result("export", {"checkpoint": str(checkpoint)}, lambda: _export(checkpoint, unmeasured))
    validated = record.result(
        "validate", exported, lambda: _validate(unmeasured, verifier_dir, str(run_dir / "dataset"))
    )
    evaluated = record.result(
        "evaluate",
        {**exported, "prompts": HELDOUT_PROMPTS, "tokens": ANSWER_TOKENS, "k": NUM_DRAFT_TOKENS},
        lambda: _evaluate(unmeasured, generate_config, logs),
    )
    # Once more, now with what was measured on its model card.
    draft_dir = run_dir / "draft"
    record.result("card", evaluated, lambda: _export(checkpoint, draft_dir, acceptance_notes(evaluated)))
    _print_checks(console, validated)
    _print_costs(console, record, generated, trained, exported, evaluated)
    _print_acceptance(console, evaluated)
    console.print(f"draft: {draft_dir}; data set: {run_dir / 'dataset'}; logs: {logs}", markup=False)
    console.print(f"{time.monotonic() - began:.0f} s", style="dim")


def _generate(config: GenerateConfig, run_dir: Path) -> dict[str, Any]:
    with library_logs(run_dir / "logs" / "driver.log"), connected(run_dir / "logs"):
        from ray_jobs.generate.job import run_generate

        return run_generate(config, run_dir).as_json()


def _train(config: TrainConfig, logs: Path) -> dict[str, Any]:
    with library_logs(logs / "driver.log"), connected(logs), stage("training") as bar, ticking(bar):
        from ray_jobs.commands.train import describe
        from ray_jobs.train.job import run_training

        result = run_training(
            config, progress=lambda line: bar.update(line["packs"], total=line["total_packs"], note=describe(line))
        )
    return {
        "checkpoint": str(result.checkpoint_dir),
        "train_s": result.seconds,
        "total_rows": result.rows,
        "coverage": result.coverage,
        **result.metrics,
    }


def _export(checkpoint: Path, draft_dir: Path, acceptance: list[Acceptance] | None = None) -> dict[str, Any]:
    if draft_dir.exists():  # of another checkpoint, or of a run that was stopped before it was recorded
        shutil.rmtree(draft_dir)
    export(checkpoint, draft_dir, "flat", acceptance=acceptance)
    weights = draft_dir / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    return {"draft": str(draft_dir), "sha256": digest, "bytes": weights.stat().st_size}


def _validate(draft_dir: Path, verifier_dir: Path, dataset: str) -> dict[str, Any]:
    with stage("validating the draft") as bar, ticking(bar):
        checks = [result.to_json() for result in validate(draft_dir, verifier_dir, dataset)]
    failed = [check for check in checks if check["status"] == "fail"]
    if failed:
        raise RuntimeError(
            f"{draft_dir} is not sound: " + "; ".join(f"{check['name']}: {check['detail']}" for check in failed)
        )
    return {"checks": checks}


def _evaluate(draft_dir: Path, config: GenerateConfig, logs: Path) -> dict[str, Any]:
    from ray_jobs.commands.evaluate import read_evaluation_prompts

    with library_logs(logs / "driver.log"):
        prompts = read_evaluation_prompts(config.verifier, "builtin:heldout", limit=HELDOUT_PROMPTS)
    with stage("measuring acceptance") as bar:
        report: EvaluationReport = evaluate(
            [draft_dir],
            config.verifier.directory(),
            prompts,
            log_dir=logs,
            num_draft_tokens=[NUM_DRAFT_TOKENS],
            max_tokens=ANSWER_TOKENS,
            engine_args={"enforce_eager": True, "max_num_batched_tokens": 512},
            progress=lambda done, total, note: bar.update(done, total=total, note=note),
        )
    return report.to_json()


def _print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)


def _print_checks(console: Console, validated: dict[str, Any]) -> None:
    passed = [check["name"] for check in validated["checks"] if check["status"] == "pass"]
    skipped = [f"{check['name']} ({check['detail']})" for check in validated["checks"] if check["status"] == "skipped"]
    console.print(f"\ndraft is sound: {len(passed)} checks passed" + (f", skipped {skipped}" if skipped else ""))


def _print_costs(
    console: Console,
    record: _Record,
    generated: dict[str, Any],
    trained: dict[str, Any],
    exported: dict[str, Any],
    evaluated: dict[str, Any],
) -> None:
    table = Table("stage", "seconds", "tokens", "tokens/s", "bytes", "bytes/token", title="what each stage cost")
    rows = generated["state_rows"]
    tokens = generated["num_output_tokens"]
    speed = f"{generated['tokens_per_s']:.0f}"
    stored = generated["stored_bytes"]
    table.add_row("load the verifier", f"{generated['start_s']:.0f}", "", "", "", "")
    table.add_row(
        "generate and capture",
        f"{generated['generate_s']:.0f}",
        str(tokens),
        speed,
        str(stored),
        f"{stored / rows:.0f}",
    )
    table.add_row(
        "  the same states raw", "", str(rows), "", str(generated["raw_bytes"]), f"{generated['raw_bytes'] / rows:.0f}"
    )
    passes = trained["total_rows"]
    table.add_row("train", f"{record.seconds('train'):.0f}", str(passes), f"{passes / trained['train_s']:.0f}", "", "")
    table.add_row("export", f"{record.seconds('export'):.0f}", "", "", str(exported["bytes"]), "")
    table.add_row("validate", f"{record.seconds('validate'):.0f}", "", "", "", "")
    [result] = evaluated["results"]
    table.add_row(
        "evaluate",
        f"{record.seconds('evaluate'):.0f}",
        str(result["output_tokens"]),
        f"{result['output_tokens'] / result['generate_s']:.0f}",
        "",
        "",
    )
    console.print(table)
    first = generated["first_commit_s"]
    console.print(f"first commit after {first:.0f} s" if first is not None else "nothing was left to commit")


def _print_acceptance(console: Console, evaluated: dict[str, Any]) -> None:
    [result] = evaluated["results"]
    measured = result["acceptance"]
    table = Table("position", "accepted", "95 % interval", title="acceptance on held-out prompts")
    for position, rate in enumerate(measured["position_rates"], start=1):
        table.add_row(str(position), f"{rate['value']:.3f}", f"{rate['low']:.3f} to {rate['high']:.3f}")
    console.print(table)
    length = measured["acceptance_length"]
    console.print(
        f"[bold]acceptance length {length['value']:.3f}[/] (95 %: {length['low']:.3f} to {length['high']:.3f}; "
        f"{evaluated['num_prompts']} prompts, {measured['num_drafts']} drafts of {result['num_draft_tokens']} tokens)"
    )
