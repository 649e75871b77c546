"""What a check says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["pass", "fail", "skipped"]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check. `remedy` says what to do about a failure, or what would make a skipped check run."""

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class CheckFailure(Exception):
    """Raised by a check: the draft has the defect that the check is named after."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.detail = detail
        self.remedy = remedy


class CheckSkipped(Exception):
    """Raised by a check that has nothing to look at."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
