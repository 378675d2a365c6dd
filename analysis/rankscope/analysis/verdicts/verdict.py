"""The verdict on a job, its kinds, and how it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import isnan
from pathlib import PurePath

from rankscope.analysis.verdicts.windows import FrameSeen


class Kind(str, Enum):
    # The value is the name in metrics, CRDs and JSON. The protobuf enum has the same members.
    meaning: str  # for docs/concepts.md
    headline: str  # of a verdict, for people; `{who}` are its culprits, `{where}` the line of a stall

    _value_: str

    def __new__(cls, value: str, meaning: str = "", headline: str = "") -> Kind:
        kind = str.__new__(cls, value)
        kind._value_, kind.meaning, kind.headline = value, meaning, headline
        return kind

    HEALTHY = "healthy", "no rank, stage or link stands out", "healthy"
    SLOW_RANK = (
        "slow_rank",
        "these ranks work longer than their cohort, or a rank alone longer than earlier; if they are all ranks of one "
        "node, the node is reported",
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
    JITTER = (
        "jitter",
        "ranks stall in turn, each in few steps: garbage collection, a page cache, neighbours of a machine",
        "ranks stall in turn{where}; no rank is to blame",
    )
    SLOW_SERVER = (
        "slow_server",
        "the workers of an asynchronous run wait for their parameter server, which is at work all the time",
        "the server{server} is the bottleneck",
    )
    SLOW_COMMUNICATION = (
        "slow_communication",
        "no rank is late, but communication takes longer than earlier in the same job; where the critical path is "
        "known, the groups or the links in which it does are reported",
        "communication is slow{in_groups}; no rank is to blame",
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


FINDINGS = tuple(kind for kind in Kind if kind.is_finding)


class Severity(str, Enum):
    NONE = "none"
    WARNING = "warning"
    ALARM = "alarm"


class Confidence(str, Enum):
    LOW = "low"
    HIGH = "high"


# In place of the phase of a rank that others wait for.
STOPPED = "stopped"
ENDED = "ended"
MISMATCH = "mismatch"

# In place of the phase of slow communication that the network explains.
NETWORK = "network"

# What a slow rank is held up by, where its steps are timed on a device.
HOST = "host"
DEVICE = "device"


@dataclass(frozen=True)
class Cause:
    phase: str = "unknown"
    frames: tuple[FrameSeen, ...] = ()
    evidence: str = ""
    bound: str = ""  # HOST, DEVICE, or empty where it is not known
    stalls: str = ""  # "in every 10th step for 600 ms"; empty where all steps are alike


@dataclass(frozen=True)
class Verdict:
    kind: Kind
    reason: str
    severity: Severity = Severity.NONE
    confidence: Confidence = Confidence.HIGH
    culprits: tuple[int, ...] = ()
    stage: int | None = None
    group: str = ""  # the node of the culprits, or the process groups in which communication is slow
    links: tuple[tuple[int, ...], ...] = ()  # the ranks of each of these groups; two for messages
    impact_ratio: float | None = None
    lost_gpu_seconds: float | None = None
    cause: Cause = Cause()
    # Workers of an asynchronous run with their throughput and staleness, in words; empty of a synchronous one.
    asynchronous: str = ""

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


_NAMES_LINES = (Kind.SLOW_RANK, Kind.SLOW_SERVER, Kind.HANG)
_LATE = {False: "its host is late", True: "its input is late"}


def accused(verdict: Verdict) -> str:
    """`ranks 0 and 1`, `node gpu-17`; empty if no rank is to blame"""
    return verdict.group or (ranks(verdict.culprits) if verdict.culprits else "")


def headline(verdict: Verdict) -> str:
    """`rank 2 is slow because of model.py:88 (normalize_features, forward)`"""
    who = accused(verdict)
    plural = "are" if len(verdict.culprits) > 1 and not verdict.group else "is"
    in_groups = f" in {verdict.group}" if verdict.group else ""
    what = verdict.kind.headline.format(
        who=who,
        are=plural,
        stage=verdict.stage,
        reason=verdict.reason,
        where=_where(verdict.cause),
        server=f" ({who})" if who else "",
        in_groups=in_groups,
    )
    if verdict.kind is Kind.HEALTHY and verdict.cause.evidence:
        what += f"; {verdict.cause.evidence}"
    if verdict.kind is Kind.SLOW_RANK and verdict.cause.stalls:
        stall = "stall" if plural == "are" else "stalls"
        return f"{who} {stall} {verdict.cause.stalls}{_where(verdict.cause)}"
    if verdict.kind is Kind.SLOW_COMMUNICATION and verdict.cause.phase == NETWORK:
        shown = f" ({verdict.cause.evidence})" if verdict.cause.evidence else ""
        what = f"communication is slow{in_groups} because of the network{shown}"
    if verdict.kind is Kind.HANG and who:
        what += f": {who} {_HUNG.get(verdict.cause.phase, 'never entered the collective').format(is_=plural)}"
    if verdict.kind in _NAMES_LINES and verdict.culprits:
        what += because(verdict)
    if verdict.kind.is_finding and verdict.confidence is Confidence.LOW:
        what += " (low confidence)"
    return what


_HUNG = {
    STOPPED: "{is_} stopped by a signal",
    ENDED: "{is_} no longer running",
    MISMATCH: "entered another collective",
}


def because(verdict: Verdict) -> str:
    cause = verdict.cause
    place = source_line(cause.frames[0]) if cause.frames else ""
    if cause.phase == "starved":
        return " because it is starved of CPU"
    if cause.phase in _HUNG:
        return f" at {place} ({cause.frames[0].function})" if place else ""
    if cause.phase == "throttled":
        return f" because its GPU is throttled ({cause.evidence})"
    if cause.bound == DEVICE:
        return f" because its GPU is slow ({cause.evidence})"
    if place:
        phase = f", {cause.phase}" if cause.phase not in ("unknown", "other") else ""
        who = _LATE[cause.phase == "input"] + ", at " if cause.bound == HOST else "of "
        return f" because {who}{place} ({cause.frames[0].function}{phase})"
    if cause.bound == HOST:
        return f" because {_LATE[cause.phase == 'input']}{'' if cause.phase == 'input' else _in_phase(cause.phase)}"
    return _in_phase(cause.phase)


def _in_phase(phase: str) -> str:
    return {"unknown": "", "other": " in other code of its loop"}.get(phase, f" in its {phase} phase")


def _where(cause: Cause) -> str:
    """Of a stall: `, in load (dataset.py:88)`"""
    if cause.phase == "starved":
        return ", starved of CPU"
    if cause.bound == DEVICE or cause.phase == "throttled":
        return ", on its GPU"
    if cause.frames:
        return f", in {cause.frames[0].function} ({source_line(cause.frames[0])})"
    return f", in its {cause.phase} phase" if cause.phase not in ("unknown", "other") else ""


def named_line(verdict: Verdict) -> str:
    """The line that the headline names, as `model.py:88 (normalize_features)`; empty where it names none."""
    cause = verdict.cause
    names_one = verdict.kind is Kind.JITTER or (verdict.kind in _NAMES_LINES and verdict.culprits)
    is_elsewhere = cause.phase in ("starved", "throttled") or cause.bound == DEVICE
    if not names_one or is_elsewhere or not cause.frames:
        return ""
    return f"{source_line(cause.frames[0])} ({cause.frames[0].function})"


def source_line(frame: FrameSeen) -> str:
    return f"{PurePath(frame.file).name}:{frame.line}"


def evidence(verdict: Verdict) -> str:
    """Of the cause of a rank that is slow or hangs, where the headline does not have it."""
    is_in_headline = verdict.cause.phase == "throttled" or verdict.cause.bound == DEVICE
    is_in_headline = is_in_headline and not verdict.cause.stalls
    return "" if is_in_headline or verdict.kind not in _NAMES_LINES else verdict.cause.evidence


def explanation(verdict: Verdict) -> str:
    """What a finding rests on beyond its headline: the evidence, or else the reason."""
    text = evidence(verdict) or (verdict.reason if verdict.kind.is_finding else "")
    return "" if text in headline(verdict) else text


def gist(verdict: Verdict) -> str:
    """The headline without figures: equal while the kind, the ranks and the cause are the same."""
    cause = replace(verdict.cause, evidence="", stalls="sometimes" if verdict.cause.stalls else "")
    return headline(replace(verdict, reason="", confidence=Confidence.HIGH, cause=cause))


def loss(verdict: Verdict) -> str:
    """`costs 41% of the job, 0.02 GPU-hours so far`; empty if nothing is lost. Of an asynchronous run, updates are
    lost, and no rank's time but that of the culprits and of who waits for a server."""
    if verdict.impact_ratio is None or not verdict.kind.is_finding:
        return ""
    lost = f", {verdict.lost_gpu_seconds / 3600:.3f} GPU-hours so far" if verdict.lost_gpu_seconds else ""
    of = "the run's updates" if verdict.asynchronous else "the job"
    return f"costs {verdict.impact_ratio:.0%} of {of}{lost}"
