"""Are states plausible? NaN, infinite and all-zero rows, found on the bits of any state dtype."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from storage.types import StateSpec

# All bits but the sign, and the smallest such magnitude that is infinite or NaN (exponent all ones).
_MAGNITUDE = {"bfloat16": 0x7FFF, "float16": 0x7FFF, "float32": 0x7FFF_FFFF}
_NOT_FINITE = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F80_0000}
_BLOCK_ELEMENTS = 128 * 1024


@dataclass(frozen=True)
class BadRows:
    """Rows of one layer that no forward pass gives."""

    layer_id: int
    kind: str  # "nan_or_inf" or "all_zero"
    rows: tuple[int, ...]

    def __str__(self) -> str:
        what = {"nan_or_inf": "with NaN or infinity", "all_zero": "all zero"}[self.kind]
        shown = ", ".join(map(str, self.rows[:5])) + (", ..." if len(self.rows) > 5 else "")
        return f"layer {self.layer_id}: {len(self.rows)} rows {what} (row {shown})"


def find_bad_rows(states_TLH: np.ndarray, spec: StateSpec) -> list[BadRows]:
    """Rows with a NaN or an infinity, and rows of zeros only, by layer; [] when all is well.

    `states_TLH` are bits [rows, layers, hidden] as uint16 or uint32. A negative zero is a zero.
    """
    rows, layers, hidden = states_TLH.shape
    largest_TL = np.empty((rows, layers), states_TLH.dtype)
    step = max(1, _BLOCK_ELEMENTS // (layers * hidden))
    for start in range(0, rows, step):
        magnitude_TLH = states_TLH[start : start + step] & states_TLH.dtype.type(_MAGNITUDE[spec.dtype])
        # Magnitudes of floats order like their bits, so one maximum per row answers both questions.
        magnitude_TLH.max(axis=2, out=largest_TL[start : start + step])
    found = []
    for kind, bad_TL in (("nan_or_inf", largest_TL >= _NOT_FINITE[spec.dtype]), ("all_zero", largest_TL == 0)):
        for layer in np.flatnonzero(bad_TL.any(axis=0)).tolist():
            bad_rows = tuple(np.flatnonzero(bad_TL[:, layer]).tolist())
            found.append(BadRows(spec.layer_ids[layer], kind, bad_rows))
    return found
