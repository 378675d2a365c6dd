"""A long trace made of a short real one: the same steps again and again, later."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

# What ties events together must not tie those of different repetitions.
_TIES = ("correlation", "External id", "Ev Idx")


def repeated(content: dict[str, Any], times: int) -> dict[str, Any]:
    """With only what has a time repeated; the rest stands once, as in a trace that was long from the start."""
    events = content["traceEvents"]
    timed = [event for event in events if event.get("ph") in ("X", "s", "f")]
    first = min(event["ts"] for event in timed)
    period = max(event["ts"] + event.get("dur", 0.0) for event in timed) - first + 1000
    stride = 1 + max(
        int(value)
        for event in timed
        for value in (event.get("id"), *(event.get("args", {}).get(tie) for tie in _TIES))
        if isinstance(value, int)
    )
    made = [event for event in events if event.get("ph") not in ("X", "s", "f")]
    for number in range(times):
        for event in timed:
            later = {**event, "ts": round(event["ts"] + number * period, 3)}
            if isinstance(event.get("id"), int):
                later["id"] = event["id"] + number * stride
            arguments = event.get("args")
            if arguments:
                ties = {tie: arguments[tie] + number * stride for tie in _TIES if isinstance(arguments.get(tie), int)}
                later["args"] = {**arguments, **ties}
            made.append(later)
    return {**content, "traceEvents": made}


def write_repeated(source: Path, target: Path, at_least_bytes: int) -> int:
    """As many repetitions as it takes; returns the size."""
    content = json.loads(gzip.decompress(source.read_bytes()), strict=False)
    once = len(json.dumps(content))
    target.write_text(json.dumps(repeated(content, -(-at_least_bytes // once))))
    return target.stat().st_size
