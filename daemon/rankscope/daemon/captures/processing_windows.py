"""What several windows of one rank say together: stretches of time that were recorded one by one add up, and what lies
between them is not known and counts for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from rankscope.daemon.captures.processing_records import Summary

_SUMS = (
    "span_seconds",
    "compute_seconds",
    "communication_seconds",
    "exposed_communication_seconds",
    "memory_copy_seconds",
    "idle_seconds",
    "events",
)
_EACH = ("each_step_seconds", "each_communication_seconds", "each_exposed_communication_seconds")


def together(summaries: Sequence[tuple[int, Summary]]) -> Summary:
    """Steps and summary of each window, the first one's first: kernels and findings are told of that one."""
    first = summaries[0][1]
    sums = {name: sum(getattr(summary, name) for _, summary in summaries) for name in _SUMS}
    each = {name: [value for _, summary in summaries for value in getattr(summary, name)] for name in _EACH}
    timed = [
        (steps, summary.step_seconds) for steps, summary in summaries if steps and summary.step_seconds is not None
    ]
    count = sum(steps for steps, _ in timed)
    step_seconds = sum(steps * seconds for steps, seconds in timed) / count if count else None
    communication, exposed = sums["communication_seconds"], sums["exposed_communication_seconds"]
    collectives: Counter[str] = Counter()
    for _, summary in summaries:
        collectives.update(summary.collectives)
    mfu_ratio = None
    if first.mfu_ratio is not None and first.step_seconds and step_seconds:
        mfu_ratio = first.mfu_ratio * first.step_seconds / step_seconds  # as many FLOPs in every step
    return msgspec.structs.replace(
        first,
        **sums,
        **each,
        step_seconds=step_seconds,
        overlap_ratio=1 - exposed / communication if communication > 0 else None,
        mfu_ratio=mfu_ratio,
        collectives=dict(collectives),
    )
