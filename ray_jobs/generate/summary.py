"""What a generate job did, for people and for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class GenerateSummary:
    """Counts and costs of one run; written to `generate.json` in the run directory."""

    dataset: str
    version: int = -1
    num_units: int = 0  # committed by this run
    num_samples: int = 0
    num_rejects: int = 0
    rejects: dict[str, int] = field(default_factory=dict)  # of the whole data set, by reason
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    capture_faults: Counter[str] = field(default_factory=Counter)  # attempts with bad states, by reason
    raw_bytes: int = 0  # of hidden states, whole data set
    stored_bytes: int = 0
    state_rows: int = 0
    num_retries: int = 0
    num_restarts: int = 0
    num_out_of_memory: int = 0  # of the lost replicas
    num_tightened: int = 0  # times that fewer requests were admitted for want of memory
    num_fatal_prompts: int = 0  # rejected because their engine died with each of them alone in it
    lost_s: float = 0.0  # of replicas that died: their start, and what they did since their last unit
    lost_device_s: float = 0.0  # the same times the GPUs of a replica, or its cores on CPU
    start_s: float = 0.0  # until the first replica could answer
    first_commit_s: float | None = None  # from the start of the job; None when this run committed nothing
    generate_s: float = 0.0  # from then to the last commit
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.generate_s if self.generate_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """All fields, and the ratios that follow from them."""
        return {
            **asdict(self),
            "capture_faults": dict(self.capture_faults),
            "num_capture_faults": self.capture_faults.total(),
            "tokens_per_s": self.tokens_per_s,
        }

    def listed_faults(self) -> str:
        return ", ".join(f"{reason} {count}" for reason, count in sorted(self.capture_faults.items()))

    def as_text(self) -> str:
        """A few lines for a person."""
        lines = [f"data set {self.dataset} at version {self.version}"]
        if self.num_units:
            lines.append(
                f"this run: {self.num_units} units, {self.num_samples} samples, {self.num_output_tokens} tokens "
                f"generated in {self.generate_s:.0f} s ({self.tokens_per_s:.0f} tokens/s) "
                f"after {self.start_s:.0f} s of loading"
            )
        else:
            lines.append("this run: nothing was missing")
        if self.state_rows:
            lines.append(
                f"hidden states: {self.state_rows} rows, {self.raw_bytes} bytes, stored in {self.stored_bytes} (ratio "
                f"{self.raw_bytes / self.stored_bytes:.2f}, {self.stored_bytes / self.state_rows:.0f} bytes/token)"
            )
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.rejects.items()))
        lines.append(f"rejects: {sum(self.rejects.values())}" + (f" ({reasons})" if reasons else ""))
        if self.num_retries or self.num_restarts or self.capture_faults:
            faults = f" ({self.listed_faults()})" if self.capture_faults else ""
            lines.append(
                f"retried units: {self.num_retries}, restarted replicas: {self.num_restarts}, "
                f"{self.num_out_of_memory} of them out of memory "
                f"({self.lost_s:.0f} s and {self.lost_device_s:.0f} GPU-seconds, on CPU core-seconds, lost), "
                f"prompts that killed their engine: {self.num_fatal_prompts}, "
                f"samples with bad states: {self.capture_faults.total()}{faults}"
            )
        return "\n".join(lines)
