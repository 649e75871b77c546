"""The generate job: what is missing is generated, and the data set closed."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

from gen.head import extract_head
from ray_jobs.generate.config import GenerateConfig
from ray_jobs.generate.driver import Driver
from ray_jobs.generate.plan import plan_job
from ray_jobs.generate.summary import GenerateSummary
from storage import Dataset

SUMMARY_NAME = "generate.json"


def run_generate(config: GenerateConfig, run_dir: Path) -> GenerateSummary:
    """Generate what is missing from the data set, and close it when everything is accounted for.

    Restartable at any instant: only what has no commit is done. Ray must be initialised.

    Raises:
        ValueError: the configuration is wrong, or the data set has another identity.
        JobError: a bound was reached (units, replicas, prompts that kill engines, bad states, the wait for room); what
            is committed stays.
    """
    began = time.monotonic()
    plan = plan_job(config, run_dir)
    dataset = Dataset.create(config.dataset.uri, plan.identity, plan.units)
    snapshot = dataset.snapshot()
    if snapshot.head is None:
        head = extract_head(plan.verifier_dir, run_dir / "verifier_head.safetensors")
        dataset.put_head(head)
        head.unlink()
    pending = snapshot.pending_units()
    driver = Driver(config, run_dir, plan, dataset, pending, began)
    try:
        if pending:
            driver.run()
        if not dataset.snapshot().is_complete:
            dataset.complete()
    except BaseException:
        # What a job that failed has committed, and what restarts have cost it. Its own error is the one that tells.
        with suppress(OSError):
            _write_summary(driver, run_dir)
        raise
    return _write_summary(driver, run_dir)


def _write_summary(driver: Driver, run_dir: Path) -> GenerateSummary:
    summary = driver.summarise()
    (run_dir / SUMMARY_NAME).write_text(json.dumps(summary.as_json(), indent=2) + "\n")
    return summary
