"""How far a data set is: counts from the manifest alone, no data file is opened."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow.compute as pc

from storage.manifest import COMMITTED, EXPIRED
from storage.snapshot import Accounting, Snapshot

RATE_COMMITS = 20


@dataclass(frozen=True)
class Rate:
    """Throughput over the newest commits, from the first of them (exclusive) to the last."""

    commits: int
    seconds: float
    samples_per_s: float
    tokens_per_s: float
    bytes_per_s: float  # raw hidden-state bytes


@dataclass(frozen=True)
class Status:
    """Progress of a data set at one version."""

    uri: str
    version: int
    is_complete: bool
    units: dict[str, int]  # by "committed", "pending", "expired", "planned"
    samples: Accounting
    num_tokens: int  # of committed units
    raw_bytes: int  # of hidden states in committed units, before encoding
    stored_bytes: int  # of all visible files
    num_files: int
    last_commit_age_s: float | None
    rate: Rate | None  # None until two commits were made
    eta_s: float | None  # for the pending samples at that rate

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def status(snapshot: Snapshot) -> Status:
    """The progress that `snapshot` shows."""
    units, files = snapshot.units_table(), snapshot.files_table()
    committed = units.filter(pc.equal(units["status"], COMMITTED))
    counts = {
        name: int(pc.sum(pc.equal(units["status"], name)).as_py() or 0) for name in (COMMITTED, EXPIRED, "pending")
    }
    accounting = snapshot.accounting()
    times = [moment.timestamp() for moment in units["time"].drop_null().to_pylist()]
    rate = _rate(snapshot)
    return Status(
        uri=snapshot.dataset.uri,
        version=snapshot.version,
        is_complete=snapshot.is_complete,
        units={**counts, "planned": units.num_rows},
        samples=accounting,
        num_tokens=int(pc.sum(committed["num_tokens"]).as_py() or 0),
        raw_bytes=int(pc.sum(committed["raw_bytes"]).as_py() or 0),
        stored_bytes=int(pc.sum(files["size"]).as_py() or 0),
        num_files=files.num_rows,
        last_commit_age_s=max(0.0, time.time() - max(times)) if times else None,
        rate=rate,
        eta_s=accounting.pending / rate.samples_per_s if rate and rate.samples_per_s > 0 else None,
    )


def _rate(snapshot: Snapshot) -> Rate | None:
    units = snapshot.units_table()
    done = units.filter(pc.is_valid(units["time"]))
    commits = done.group_by("time").aggregate([("num_samples", "sum"), ("num_tokens", "sum"), ("raw_bytes", "sum")])
    recent = commits.sort_by([("time", "descending")]).slice(0, RATE_COMMITS + 1).to_pylist()
    if len(recent) < 2:
        return None
    seconds = (recent[0]["time"] - recent[-1]["time"]).total_seconds()
    counted = recent[:-1]
    sums = [sum(row[f"{name}_sum"] for row in counted) / seconds for name in ("num_samples", "num_tokens", "raw_bytes")]
    return Rate(len(counted), seconds, *sums)
