"""What people write on their pods for us. A value that cannot be read is told on the pod and otherwise ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "rankscope.dev/"
MFU_TARGET = f"{PREFIX}mfu-target"
WATCH = f"{PREFIX}watch"
KNOWN = (MFU_TARGET, WATCH)


@dataclass(frozen=True)
class Wishes:
    mfu_target: float | None = None
    watch: bool = True
    mistakes: tuple[str, ...] = ()  # in words, with what it may be


def read_wishes(annotations: Mapping[str, str]) -> Wishes:
    mistakes: list[str] = []
    target: float | None = None
    if MFU_TARGET in annotations:
        text = annotations[MFU_TARGET]
        try:
            target = float(text)
        except ValueError:
            target = math.nan
        if not 0 < target <= 1:
            mistakes.append(f"{MFU_TARGET}: {text[:40]!r} is no ratio; write a number over 0 and up to 1, as in 0.4")
            target = None
    watch = annotations.get(WATCH, "true")
    if watch not in ("true", "false"):
        mistakes.append(f"{WATCH}: {watch[:40]!r} is neither true nor false")
    return Wishes(target, watch != "false", tuple(mistakes))
