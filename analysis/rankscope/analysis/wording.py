"""Verdicts in one sentence each, for people."""

from __future__ import annotations

from collections.abc import Sequence


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 7`, `64 ranks (0, 1, 2 …)`"""
    listed = [str(number) for number in numbers]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if len(listed) > 8:
        return f"{len(listed)} ranks ({', '.join(listed[:3])} …)"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def percent(ratio: float) -> str:
    return f"{ratio * 100:.0f} %"
