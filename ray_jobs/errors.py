"""Errors that end a job after its bounds were reached: what is committed stays, and the command exits with 1."""

from __future__ import annotations


class JobError(RuntimeError):
    """A job stopped before its end. Running the same command again goes on from what it left."""
