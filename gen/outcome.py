"""What a unit becomes while it is done: its samples and rejects, and which of them are in the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gen.capture.messages import CaptureFault
from gen.prompts import Prompt
from storage import FileEntry, Reject, Sample, SampleKey

# The reject of a sample whose rows exceed the host memory that capture may use, even alone.
DOES_NOT_FIT = "does_not_fit"


@dataclass
class UnitOutcome:
    """What one unit became."""

    unit: int
    samples: list[Sample] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    shards: list[FileEntry] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    capture_faults: Counter[str] = field(default_factory=Counter)  # first attempts with bad states, by reason
    num_tightened: int = 0  # times that fewer requests were admitted for want of memory
    seconds: float = 0.0
    in_engine: set[SampleKey] = field(default_factory=set)  # given to the engine, not done; what failed stays
    alone: bool = False  # at the answers that have the engine to themselves

    def record(self, result: Sample | Reject) -> None:
        if isinstance(result, Sample):
            self.samples.append(result)
        else:
            self.rejects.append(result)

    def sort(self) -> None:
        self.samples.sort(key=lambda sample: sample.key)
        self.rejects.sort(key=lambda reject: reject.key)


def fault_reject(prompt: Prompt, unit: int, fault: CaptureFault) -> Reject:
    """The reject of a sample whose states could not be had."""
    if fault.reason == DOES_NOT_FIT:
        return Reject(fault.key, prompt.prompt_id, unit, DOES_NOT_FIT, fault.detail)
    return Reject(fault.key, prompt.prompt_id, unit, "capture_fault", f"{fault.reason}: {fault.detail}")
