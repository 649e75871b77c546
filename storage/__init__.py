"""The data set on disk or in an object store: shards of hidden states, the commit log, readers, verify and gc.

Needs no engine, no cluster and no GPU; torch is imported only where a tensor is asked for.
"""

from storage.dataset import Dataset
from storage.errors import (
    CompleteError,
    ContentionError,
    DamagedError,
    FencedError,
    IdentityError,
    SchemaError,
    StoreError,
)
from storage.identity import Identity
from storage.manifest import ManifestFile, UnitFiles
from storage.snapshot import Accounting, Snapshot
from storage.store import Store, check_path, open_store
from storage.types import (
    REJECTS_SCHEMA,
    SAMPLES_SCHEMA,
    FileEntry,
    Receipt,
    Reject,
    Sample,
    SampleKey,
    ShardTarget,
    StateSpec,
    UnitPlan,
)
from storage.writer import CommitResult, Writer

__all__ = [
    "REJECTS_SCHEMA",
    "SAMPLES_SCHEMA",
    "Accounting",
    "CommitResult",
    "CompleteError",
    "ContentionError",
    "DamagedError",
    "Dataset",
    "FencedError",
    "FileEntry",
    "Identity",
    "IdentityError",
    "ManifestFile",
    "Receipt",
    "Reject",
    "Sample",
    "SampleKey",
    "SchemaError",
    "ShardTarget",
    "Snapshot",
    "StateSpec",
    "Store",
    "StoreError",
    "UnitFiles",
    "UnitPlan",
    "Writer",
    "check_path",
    "open_store",
]
