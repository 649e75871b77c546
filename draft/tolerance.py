"""Equality of configuration values that went through JSON, float32 and other people's way of printing numbers."""

from __future__ import annotations

import math
from typing import Any

# float32 keeps 1e-05 as 9.9999997e-06, and some writers print six digits. Values that really differ (1e-5 and 1e-6,
# two YaRN factors, two thetas) are far apart.
RELATIVE = 1e-5


def same(left: Any, right: Any) -> bool:
    """Whether two values of a configuration mean the same; 64 and 64.0 do, true and 1 do not."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if isinstance(left, int | float) and isinstance(right, int | float):
        return math.isclose(left, right, rel_tol=RELATIVE)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)
