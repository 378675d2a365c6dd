"""What the rules say about a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isnan

from rankscope.analysis.verdicts.windows import FrameSeen


class Kind(str, Enum):
    HEALTHY = "healthy"
    SLOW_RANK = "slow_rank"
    SLOW_STAGE = "slow_stage"
    DATA_IMBALANCE = "data_imbalance"
    SLOW_COMMUNICATION = "slow_communication"
    INPUT_BOUND = "input_bound"
    LOW_MFU = "low_mfu"
    HANG = "hang"
    INSUFFICIENT_DATA = "insufficient_data"

    @property
    def is_finding(self) -> bool:
        return self not in (Kind.HEALTHY, Kind.INSUFFICIENT_DATA)


class Severity(str, Enum):
    NONE = "none"
    WARNING = "warning"
    ALARM = "alarm"


class Confidence(str, Enum):
    LOW = "low"
    HIGH = "high"


# What a slow rank is held up by, where its steps are timed on a device.
HOST = "host"
DEVICE = "device"


@dataclass(frozen=True)
class Cause:
    phase: str = "unknown"
    frames: tuple[FrameSeen, ...] = ()
    evidence: str = ""
    bound: str = ""  # HOST, DEVICE, or empty where it is not known


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    reason: str
    severity: Severity = Severity.NONE
    confidence: Confidence = Confidence.HIGH
    culprits: tuple[int, ...] = ()
    stage: int | None = None
    group: str = ""
    impact_ratio: float | None = None
    lost_gpu_seconds: float | None = None
    cause: Cause = Cause()

    def __post_init__(self) -> None:
        """The impact is a share of the job's time, whatever was measured."""
        impact = self.impact_ratio
        if impact is not None and not 0.0 <= impact <= 1.0:
            object.__setattr__(self, "impact_ratio", None if isnan(impact) else min(max(impact, 0.0), 1.0))

    @property
    def is_alarm(self) -> bool:
        return self.kind.is_finding and self.severity is Severity.ALARM


# Verdicts in one sentence each, for people.


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
