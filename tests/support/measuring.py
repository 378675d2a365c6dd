from __future__ import annotations

import json
import os
from collections.abc import Callable

# Set by `make acceptance`.
_IS_JUDGED = os.environ.get("RANKSCOPE_ACCEPTANCE") == "1"


class Measured:
    """Records what a test measured. A target is judged in `make acceptance` only, which lists it beside the value:
    elsewhere the machine may do other things."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self._record = record

    def __call__(
        self, name: str, value: float, unit: str, *, at_most: float | None = None, at_least: float | None = None
    ) -> None:
        is_met = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        target = f"at most {at_most:g}" if at_most is not None else f"at least {at_least:g}"
        row = {"name": name, "value": float(value), "unit": unit, "target": target, "is_met": bool(is_met)}
        self._record("measured", json.dumps(row))
        assert is_met or not _IS_JUDGED, f"{name}: {value:g} {unit}, and should be {target}"
