"""What a capture costs its job, and how often that can be afforded.

Where no probe runs, nobody times the steps outside of captures, so the cost is reckoned: recording an event takes the
training thread some microseconds, and the last capture told how many events a second there are. The nodes of a job
reckon each for itself and must agree on when to record: a capture that is too dear for every period is taken in every
second, fourth, eighth …, counted since 1970, so that nodes whose figures differ still meet."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Final

# Measured: 0.9 to 3.3 µs on CPUs, 2.1 to 2.2 µs with CUPTI on an H200 (docs/captures.md). What libkineto's own thread
# does with an event afterwards takes twice that, beside the training.
EVENT_SECONDS: Final = 5e-6
# Starting and stopping the profiler, and writing the trace beside the training.
PAUSE_SECONDS: Final = 0.1
LONGEST_STRIDE: Final = 1 << 20


@dataclass(frozen=True)
class DutySettings:
    steps: int  # 0: off
    period_seconds: float
    budget_ratio: float  # of a job's time


def cost_seconds(events_per_second: float, record_seconds: float) -> float:
    return PAUSE_SECONDS + events_per_second * EVENT_SECONDS * record_seconds


def stride(cost: float, settings: DutySettings) -> int:
    """In every how manieth period a capture of that cost can be afforded: a power of two."""
    periods = cost / (settings.budget_ratio * settings.period_seconds)
    if periods <= 1:
        return 1
    return LONGEST_STRIDE if periods >= LONGEST_STRIDE else int(2 ** ceil(log2(periods)))
