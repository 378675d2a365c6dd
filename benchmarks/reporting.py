"""One table of what was measured against what was promised."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

HEADINGS = ("benchmark", "measured", "spread", "target", "met")


@dataclass(frozen=True)
class Row:
    """One line. `target` is the largest value that is good; None where there is none and the line is for context."""

    name: str
    value: float
    unit: str
    spread: str = ""
    target: float | None = None
    digits: int = 2
    raw: Mapping[str, object] = field(default_factory=dict)
    noisy: bool = False  # the spread is too wide to tell whether the target is met

    @property
    def met(self) -> bool | None:
        return None if self.target is None or self.noisy else self.value <= self.target

    def cells(self) -> tuple[str, str, str, str, str]:
        target = "" if self.target is None else f"≤ {self.target:g} {self.unit}".rstrip()
        met = "too noisy" if self.noisy else {None: "", True: "yes", False: "NO"}[self.met]
        return (self.name, f"{self.value:.{self.digits}f} {self.unit}".rstrip(), self.spread, target, met)


def between(low: float, high: float, digits: int = 2) -> str:
    return f"{low:.{digits}f} – {high:.{digits}f}"


def table(rows: Sequence[Row]) -> str:
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([shown[0], "  ".join("-" * width for width in widths), *shown[1:]])


def machine() -> Mapping[str, object]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def write_json(path: Path, rows: Sequence[Row]) -> None:
    results = [
        {"name": row.name, "value": row.value, "unit": row.unit, "target": row.target, "met": row.met, **row.raw}
        for row in rows
    ]
    path.write_text(json.dumps({**machine(), "results": results}, indent=1, ensure_ascii=False) + "\n")
