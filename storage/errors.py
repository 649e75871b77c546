"""What can go wrong with a data set, as types a caller can tell apart."""

from __future__ import annotations


class StoreError(OSError):
    """The disk or the object store refused or failed an operation, after its bounded retries. Names the path."""


class DamagedError(ValueError):
    """Stored bytes are not what the manifest says they are. Names the file (before the first `: `) and, where known,
    the sample.
    """


class LostEntriesError(DamagedError):
    """The log lacks its newest entries: a file that was written after them names a version that is not there."""

    def __init__(self, version: int, evidence: str) -> None:
        super().__init__(
            f"log/{version:020d}.json: missing, although {evidence} was written after it: the log lost its newest "
            "entries. Restore them from a copy; until then nothing is read or removed"
        )


class RetiredError(DamagedError):
    """A file of an old snapshot is gone: it was replaced, expired or purged since, and removed."""


class SchemaError(ValueError):
    """A persisted structure carries a schema version (or a kind) that this code does not know."""


class IdentityError(ValueError):
    """A data set exists with another identity. Names each field that differs."""


class FencedError(RuntimeError):
    """The writer was fenced by gc, which may have removed its files: it must not commit; start a new writer."""


class CompleteError(RuntimeError):
    """The data set is complete: nothing can be added to it."""


class ContentionError(RuntimeError):
    """A log entry could not be appended within the bounded number of lost races."""
