"""The verdict on a job, its kinds, and how it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import isnan

from rankscope.analysis.verdicts.windows import FrameSeen


class Kind(str, Enum):
    # The value is the name in metrics, CRDs and JSON. The protobuf enum has the same members.
    meaning: str  # for docs/concepts.md
    headline: str  # of a verdict, for people; `{who}` are its culprits

    _value_: str

    def __new__(cls, value: str, meaning: str = "", headline: str = "") -> Kind:
        kind = str.__new__(cls, value)
        kind._value_, kind.meaning, kind.headline = value, meaning, headline
        return kind

    HEALTHY = "healthy", "no rank, stage or link stands out", "healthy"
    SLOW_RANK = (
        "slow_rank",
        "these ranks work longer than their cohort; if they are all ranks of one node, the node is reported",
        "{who} {are} slow",
    )
    SLOW_STAGE = (
        "slow_stage",
        "one pipeline stage works longer than the others, and no rank in it stands out",
        "pipeline stage {stage} is slow ({who})",
    )
    DATA_IMBALANCE = (
        "data_imbalance",
        "all ranks wait in turn: the work of a step is spread unevenly, differently in each step",
        "the data is uneven; no rank is to blame",
    )
    SLOW_COMMUNICATION = (
        "slow_communication",
        "no rank is late, but communication takes longer than earlier in the same job",
        "communication is slow; no rank is to blame",
    )
    INPUT_BOUND = "input_bound", "every rank waits for its data", "every rank waits for its input"
    LOW_MFU = "low_mfu", "MFU is below the target set with `--mfu-target`", "MFU is below its target"
    HANG = (
        "hang",
        "no rank advances; where possible, names the ranks that never entered the collective the others wait in",
        "the job hangs",
    )
    INSUFFICIENT_DATA = (
        "insufficient_data",
        "not enough data to judge, with the [reason](troubleshooting.md#not-enough-to-judge-insufficient_data)",
        "not enough to judge yet: {reason}",
    )

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
