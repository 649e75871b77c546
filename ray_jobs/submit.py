"""`--submit ADDRESS`: run the same verb on a cluster through Ray Jobs."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ray_jobs.config import dump_config

CONFIG_NAME = "headrace.yaml"
TOKEN_FILE = Path.home() / ".ray" / "auth_token"


def submit_job(address: str, verb: str, settings: BaseModel, **client_options: Any) -> int:
    """Submit `headrace VERB` with the resolved configuration, follow its output, and return 0 or 1.

    Args:
        address: of the cluster's dashboard, as in `http://head:8265`.
        verb: `generate` or `train`.
        settings: the resolved configuration; it travels as the job's working directory.
        client_options: further arguments of Ray's JobSubmissionClient (headers, cookies).

    Returns 0 when the job succeeded, 1 when it failed or was stopped. Raises ConnectionError when nothing answers, and
    ValueError when the job would write into a relative path.
    The job does not depend on this process: after an interrupt it goes on, and `ray job logs` shows it.
    """
    _use_token()
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(address, **client_options)
    check_places(settings)
    with tempfile.TemporaryDirectory(prefix="headrace-submit-") as directory:
        dump_config(settings, Path(directory) / CONFIG_NAME)
        job_id = client.submit_job(
            entrypoint=shlex.join([sys.executable, "-m", "ray_jobs", verb, CONFIG_NAME]),
            runtime_env={"working_dir": directory},
            metadata={"headrace.verb": verb},
        )
    print(f"submitted {job_id} to {address}", file=sys.stderr, flush=True)

    async def follow() -> None:
        async for text in client.tail_job_logs(job_id):
            print(text, end="", flush=True)

    asyncio.run(follow())
    status = client.get_job_status(job_id)
    print(f"{job_id}: {status.value}", file=sys.stderr)
    return 0 if status == JobStatus.SUCCEEDED else 1


def check_places(settings: BaseModel) -> None:
    """Raises ValueError for a relative place that the job would write to.

    A job runs in a copy of its working directory, which Ray deletes some time later with all that the job wrote there.
    """
    values = settings.model_dump(mode="json")
    for section, key in (("dataset", "uri"), ("checkpoint", "directory")):
        place = values.get(section, {}).get(key)
        if place is not None and "://" not in place and not Path(place).expanduser().is_absolute():
            raise ValueError(
                f"{section}.{key} {place!r} is relative, and a submitted job runs in a folder that Ray deletes: "
                "give an absolute path that every node sees, or s3://"
            )


def _use_token() -> None:
    """Authenticate with the user's token where there is one, as `ray start` does; Ray's job client would not.

    Before Ray is imported: it reads the mode then. A cluster without authentication ignores the token.
    """
    has_token = TOKEN_FILE.is_file() or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if has_token:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
