"""Fixtures shared by every tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from gen.embedded import unpack

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def verifier_dir() -> Path:
    """The embedded verifier's checkpoint, unpacked once into `models/` of the checkout."""
    return unpack(REPOSITORY / "models" / "smollm2-135m-instruct")
