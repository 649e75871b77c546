"""What verify found, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from storage.errors import DamagedError, RetiredError


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Errors: "log", "missing", "size", "digest", "table", "states", "accounting", "checkpoint", "index". Notices:
    "orphan", "superseded", "scrap", "foreign", and "retired": gone since the check began, because it expired or was
    replaced meanwhile.
    """

    severity: str  # "error" or "notice"
    kind: str
    path: str
    detail: str
    unit: int | None = None
    sample: str | None = None


@dataclass
class Report:
    """What verify looked at and what it found."""

    uri: str
    version: int | None = None
    deep: bool = False
    num_files: int = 0
    num_bytes: int = 0
    num_samples: int = 0  # whose states were checked (deep)
    findings: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """No errors; notices do not count."""
        return not self.errors

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_sound": self.is_sound}

    def error(self, kind: str, path: str, detail: str, unit: int | None = None, sample: str | None = None) -> None:
        self.findings.append(Finding("error", kind, path, detail, unit, sample))

    def absent(self, reason: DamagedError, kind: str, path: str, detail: str, unit: int | None = None) -> None:
        """What is wrong with a file: nothing, if the snapshot got old while it was checked (`Snapshot.missing`)."""
        if isinstance(reason, RetiredError):
            self.notice("retired", path, str(reason), unit)
        else:
            self.error(kind, path, detail, unit)

    def notice(self, kind: str, path: str, detail: str, unit: int | None = None) -> None:
        self.findings.append(Finding("notice", kind, path, detail, unit))


Progress = Callable[[str, int, int], None]  # what is being checked, bytes done, bytes in all
