"""Where libraries log: into a file, never onto the user's screen."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def library_logs(path: Path) -> Iterator[None]:
    """Send what vLLM, Ray, transformers and Python's warnings log in this process to `path` (appended).

    Must be entered before vLLM is imported: it sets up its own logging to the screen when it is imported.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    # transformers and datasets draw bars on stderr while they load.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    level = root.level
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        root.setLevel(level)
        handler.close()
