"""The token budget of one engine step, lowered when engines run out of memory and remembered for the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

FILE_NAME = "token_budget.json"


class TokenBudget:
    """vLLM's max_num_batched_tokens for the replicas of one run.

    The peak of a step's memory grows with its tokens. A replica that died for want of memory starts again with half
    the budget, down to a floor; what was found is written to the run directory, so that a job that is started again
    does not find it out again.
    """

    def __init__(self, run_dir: Path, configured: int | None, floor: int) -> None:
        self._path = run_dir / FILE_NAME
        self._floor = floor
        self.value = configured
        if self._path.is_file():
            found = int(json.loads(self._path.read_text())["max_num_batched_tokens"])
            found = max(found, floor)  # what was found with another configuration
            self.value = found if configured is None else min(found, configured)

    def halve(self, used: int, cause: str) -> bool:
        """An engine ran out of memory with `used` tokens a step. False when the floor is reached already.

        Several replicas that die of the same budget halve it once.
        """
        if self.value is not None and self.value < used:
            return True
        lowered = max(self._floor, used // 2)
        if lowered >= used:
            return False
        self.value = lowered
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"max_num_batched_tokens": lowered, "was": used, "cause": cause}) + "\n")
        temporary.replace(self._path)
        print(
            f"out of memory: replicas.max_num_batched_tokens {used} -> {lowered} for the rest of this run; "
            f"set it in the configuration to save the restart ({cause})",
            file=sys.stderr,
            flush=True,
        )
        return True
