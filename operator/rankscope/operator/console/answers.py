"""The answers of the console's API, and of `rankscope top --json`: structs, and how they are made.

The OpenAPI document is generated from the structs. Text of containers and daemons is made printable here. None is what
was not measured."""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf.message import Message

from rankscope.analysis.step_graph.step_breakdown import StepBreakdown, rows
from rankscope.analysis.verdicts.verdict import Verdict, accused, headline
from rankscope.common.run_names import run_labels
from rankscope.common.text import printable
from rankscope.operator.console.signals import PACE, Signal
from rankscope.operator.correlation.columns import range_seconds
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1.window_pb2 import GpuUsage, RankWindow

NAME_CHARACTERS = 600
TEXT_CHARACTERS = 400

Numbers = list[float | None]


class VerdictAnswer(msgspec.Struct):
    kind: str
    severity: str
    confidence: str
    headline: str  # one sentence
    reason: str
    evidence: str
    phase: str
    culprits: list[int]
    stage: int | None
    impact_ratio: float | None
    lost_gpu_seconds: float | None
    since_unix_seconds: float


class StepPartAnswer(msgspec.Struct):
    part: str  # "own", "excess", "bubble", "communication" or "unaccounted"
    text: str
    seconds: float
    ratio: float  # of the step
    stage: int | None  # of own work, where there are several
    group_kind: str  # of communication; else empty
    details: str


class TrafficAnswer(msgspec.Struct):
    """Transfers of a step in groups of one kind: the mean of their ranks."""

    group_kind: str
    groups: int
    min_ranks: int  # of a group
    max_ranks: int
    bytes: float
    transfer_seconds: float  # on the critical path or beside it
    bus_bytes_per_second: float | None


class BreakdownAnswer(msgspec.Struct):
    """Where a step goes: the seconds of all parts are those of the step."""

    step_seconds: float
    steps: int  # of which these are the means
    parts: list[StepPartAnswer]
    traffic: list[TrafficAnswer]


class RankAnswer(msgspec.Struct):
    rank: int
    node: str
    pid: int
    step_seconds: float | None
    self_seconds: float | None
    wait_seconds: float | None
    input_seconds: float | None
    mfu_ratio: float | None
    cpu_ratio: float | None
    gpu_utilization_ratio: float | None
    range_seconds: dict[str, float]  # host time per step by NVTX range, less that of ranges inside it
    problems: list[str]


class RunAnswer(msgspec.Struct):
    run: str
    namespace: str  # empty outside Kubernetes
    world_size: int
    ranks_seen: int
    step_seconds: float | None
    mfu_ratio: float | None
    exposed_communication_ratio: float | None
    verdict: VerdictAnswer


class TopRank(RankAnswer):
    stale_seconds: float | None  # since the latest window, where that is too long; the figures are as old


class TopRun(RunAnswer):
    """A run of `rankscope top --json`."""

    breakdown: BreakdownAnswer | None  # of a run that is judged by the critical path
    ranks: list[TopRank]


class TopAnswer(msgspec.Struct):
    runs: list[TopRun]


class RunSummary(RunAnswer):
    evaluated_unix_seconds: float
    ended_unix_seconds: float | None
    restarts: int
    lost_today_gpu_seconds: float
    recent_step_seconds: Numbers  # of the last 15 minutes, at most 60 points


class RunsAnswer(msgspec.Struct):
    """`version` grows with every change. An event that is not complete has the runs that changed."""

    version: int
    is_complete: bool
    runs: list[RunSummary]
    left_out: int  # runs for which the console has no room
    elsewhere: dict[str, str]  # runs of which another replica of the operator has the history, and which one


class Mark(msgspec.Struct):
    """A moment on a run's time axis."""

    unix_seconds: float
    kind: str  # "verdict", "restart" or "end"
    text: str
    verdict: str = ""  # the kind and severity, of a mark of a verdict
    severity: str = ""


class Layout(msgspec.Struct):
    """Ranks in the order of pipeline, data and tensor coordinates; -1 where one is not known. `node` is an index into
    `nodes`."""

    ranks: list[int]
    pipeline: list[int]
    data: list[int]
    tensor: list[int]
    node: list[int]
    nodes: list[str]
    axes: dict[str, int]  # the size of each axis that is known


class Histogram(msgspec.Struct):
    """Step times of all ranks in the latest ticks; `edges` has one more than `counts`. The last bin has all above."""

    edges: list[float]
    counts: list[int]


class Series(msgspec.Struct):
    signal: str
    values: Numbers
    cohort_median: Numbers = []  # of the ranks of the same stage, this one included; at most 256 of them are read


class TimeSeries(msgspec.Struct):
    """Point n is the mean from start n to end n. Nothing is known before `begins_unix_seconds`; it is null where
    Prometheus is asked for the time before. `note` says why something is missing."""

    starts: list[float]
    ends: list[float]
    series: list[Series]
    begins_unix_seconds: float | None
    note: str


class RunDetail(RunSummary):
    breakdown: BreakdownAnswer | None  # of a run that is judged by the critical path
    layout: Layout
    phase_seconds: dict[str, Numbers]  # per step and phase, by rank in the order of the layout
    step_histogram: Histogram | None
    pace: TimeSeries
    marks: list[Mark]
    signals: list[str]  # that a heat map can show


class RankDetail(RankAnswer):
    run: str
    pod: str
    gpu_model: str
    attempt: int
    coordinates: dict[str, int]
    window_end_unix_seconds: float
    steps: int | None
    wait_source: str
    seconds_since_step: float | None  # of a rank that stands still
    host_seconds: float | None
    run_ahead_seconds: float | None
    phase_seconds: dict[str, float]  # per step
    phase_shares: dict[str, float]  # of stack samples
    gpu: dict[str, float]  # fields of GpuUsage in window.proto
    throttled_seconds: dict[str, float]  # in the window, by reason
    memory: dict[str, float]  # fields of Memory
    process: dict[str, float]  # fields of ProcessUsage


class RankHistory(msgspec.Struct):
    run: str
    rank: int
    latest: RankDetail | None
    history: TimeSeries


class HeatmapHeader(msgspec.Struct):
    """Followed by a matrix of little-endian float32: a row per rank, a column per time, NaN where it is not known."""

    run: str
    signal: str
    unit: str
    ranks: list[int]
    starts: list[float]
    ends: list[float]
    medians: Numbers  # of all ranks, by time
    note: str  # why older history is missing


class PictureBars(msgspec.Struct):
    """Operations, as columns. `row` is an index into the ranks of the picture, `operation` into its operations. Before
    `start_us` the rank has worked for `own_us`; until `arrived_us` it waits for the rank `awaited`, -1 for nobody."""

    row: list[int]
    operation: list[int]
    own_us: list[int]
    start_us: list[int]
    arrived_us: list[int]
    stop_us: list[int]
    bytes: list[int]
    awaited: list[int]


class PicturePath(msgspec.Struct):
    """The critical path, as columns in the order of time: own work of a rank, or the transfer of an operation. `row` is
    -1 for a rank that is not drawn."""

    row: list[int]
    start_us: list[int]
    stop_us: list[int]
    is_own: list[bool]


class PictureFocus(msgspec.Struct):
    """The late operation: a rank works from `start_us` to `stop_us`, where the operation starts that ends at `end_us`.
    `late_…` is all work on the path that exceeds that of the peers."""

    rank: int
    operation: str
    start_us: int
    stop_us: int
    end_us: int
    excess_us: int
    waiting: list[int]
    late_start_us: list[int]
    late_stop_us: list[int]


class StepPictureAnswer(msgspec.Struct):
    """Times are from the beginning of the step."""

    step: int
    step_us: int
    sentence: str
    detail: str
    ranks: list[int]  # by stage, then by number
    stages: list[int]
    operations: list[str]
    bars: PictureBars
    path: PicturePath
    focus: PictureFocus | None  # none where nobody is late
    note: str  # what is left out


class StepAnswer(msgspec.Struct):
    """`picture` is null where the run is not judged by its critical path."""

    run: str
    picture: StepPictureAnswer | None


class SignalsAnswer(msgspec.Struct):
    signals: list[Signal]


# Of a window or a state.

# The statistic of a window that stands for it.
_STATISTICS = {"step_seconds": "p50", "self_seconds": "mean", "wait_seconds": "mean"}


def measured(window: RankWindow, name: str) -> float | None:
    """A figure of a window; None if it was not measured."""
    statistic = _STATISTICS.get(name)
    if statistic is None:
        return window.figures.get(name)
    message: Message = window
    return float(getattr(getattr(window, name), statistic)) if message.HasField(name) else None


def cpu_ratio(window: RankWindow) -> float | None:
    """CPU time by time: 2.0 is two cores."""
    seconds = (window.end_unix_nanos - window.start_unix_nanos) / 1e9
    return window.process.cpu_seconds / seconds if window.process.HasField("cpu_seconds") and seconds > 0 else None


def _utilization_ratio(gpu: GpuUsage) -> float | None:
    return gpu.utilization_ratio if gpu.gpus == 1 and gpu.HasField("utilization_ratio") else None


def top_rank(window: RankWindow, stale_seconds: float | None) -> TopRank:
    return TopRank(**rank_fields(window), stale_seconds=stale_seconds)


def rank_fields(window: RankWindow) -> dict[str, Any]:
    """Those of a RankAnswer."""
    names = ("step_seconds", "self_seconds", "wait_seconds", "input_seconds", "mfu_ratio")
    return {
        "rank": window.identity.rank,
        "node": printable(window.identity.node, TEXT_CHARACTERS),
        "pid": window.identity.pid,
        **{name: measured(window, name) for name in names},
        "cpu_ratio": cpu_ratio(window),
        "gpu_utilization_ratio": _utilization_ratio(window.gpu),
        "range_seconds": range_seconds(window),
        "problems": [printable(problem, TEXT_CHARACTERS) for problem in window.problems],
    }


def run_fields(state: JobState) -> dict[str, Any]:
    """Those of a RunAnswer."""
    name = printable(state.job, NAME_CHARACTERS)
    return {
        "run": name,
        "namespace": run_labels(name)["run_namespace"],
        "world_size": state.world_size,
        "ranks_seen": state.ranks_seen,
        **{name: getattr(state, name) for name in PACE},
        "verdict": verdict_answer(state.verdict, state.since_unix_seconds),
    }


def breakdown_answer(breakdown: StepBreakdown | None, verdict: Verdict) -> BreakdownAnswer | None:
    if breakdown is None:
        return None
    parts = [
        StepPartAnswer(row.part, row.name, row.seconds, row.ratio, part.stage, part.group_kind, row.details)
        for part, row in zip(breakdown.parts, rows(breakdown, accused(verdict)), strict=True)
    ]
    traffic = [TrafficAnswer(**vars(each)) for each in breakdown.traffic]
    return BreakdownAnswer(breakdown.step_seconds, breakdown.steps, parts, traffic)


def verdict_answer(verdict: Verdict, since_unix_seconds: float) -> VerdictAnswer:
    return VerdictAnswer(
        kind=verdict.kind.value,
        severity=verdict.severity.value,
        confidence=verdict.confidence.value,
        headline=printable(headline(verdict), TEXT_CHARACTERS),
        reason=printable(verdict.reason, TEXT_CHARACTERS),
        evidence=printable(verdict.cause.evidence, TEXT_CHARACTERS),
        phase=printable(verdict.cause.phase, TEXT_CHARACTERS),
        culprits=list(verdict.culprits),
        stage=verdict.stage,
        impact_ratio=verdict.impact_ratio,
        lost_gpu_seconds=verdict.lost_gpu_seconds,
        since_unix_seconds=since_unix_seconds,
    )
