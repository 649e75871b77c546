"""Reading JSON files that other people wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def is_there(path: Path) -> bool:
    """Whether the name is taken, if only by a broken link: what cannot be read is a defect and not absence."""
    return path.exists() or path.is_symlink()


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises FileNotFoundError, or ValueError naming a file that holds no JSON object."""
    if not is_there(path):
        raise FileNotFoundError(f"{path} does not exist")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object")
    return data
