"""Connecting to Ray: the cluster that the environment names, or a local one that ends with the process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path


@contextmanager
def connected(log_dir: Path) -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS (`auto`: this node's), or start a local Ray; shut down what was started.

    Ray's own processes write to its session folder, which `log_dir/ray` is made to point at; of theirs the user sees
    only what happened to the cluster. Meanwhile standard output is standard error.
    """
    # Ray's client prints to stderr while it connects; these switch off its banner, its usage report and its
    # forwarding of the workers' output.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    # `local` rather than nothing: Ray would otherwise join whatever cluster was last started on this node.
    address = os.environ.get("RAY_ADDRESS", "local")
    # Ray prints what happened to the cluster (a lost node) on standard output, where the command's answer goes.
    with redirect_stdout(sys.stderr):
        ray.init(
            address=address,
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="headrace",
        )
        node = ray._private.worker._global_node
        assert node is not None
        log_dir.mkdir(parents=True, exist_ok=True)
        link = log_dir / "ray"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(node.get_session_dir_path()) / "logs")
        try:
            yield
        finally:
            ray.shutdown()
