"""JobService: jobs and their verdicts over gRPC, verdicts as messages and back, and what a recording says about one."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

import grpc
import msgspec

from rankscope.analysis.step_graph.step_breakdown import StepBreakdown, StepPart, Traffic
from rankscope.analysis.traces.joins.comparison import RankExcess, judgement
from rankscope.analysis.verdicts.verdict import Cause, Confidence, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.operator.correlation.correlator import Correlator, JobState
from rankscope.operator.correlation.daemon_windows import HeldWindows
from rankscope.operator.correlation.fleet_reports import NO_PERIOD, PERIODS, FleetReports
from rankscope.operator.correlation.hang_store import HangStore
from rankscope.v1 import job_service_pb2 as pb
from rankscope.v1 import job_service_pb2_grpc
from rankscope.v1.capture_service_pb2 import Capture, JoinSummary
from rankscope.v1.window_pb2 import FrameShare

REFRESH_SECONDS = 5.0  # at most between two messages of a watch
MAX_EXCESSES = 64
NO_REPORT = "there is no such report of a hang; `rankscope hangs` lists them"


def job_status(state: JobState, now: float | None = None) -> pb.JobStatus:
    """`now`: on the monotonic clock; None reads it."""
    status = pb.JobStatus(
        job=state.job,
        world_size=state.world_size,
        ranks_seen=state.ranks_seen,
        verdict=verdict_message(state.verdict, state.since_unix_seconds),
        ranks=state.windows,
    )
    if isinstance(state.windows, HeldWindows):
        status.stale_seconds.update(state.windows.stale_seconds(time.monotonic() if now is None else now))
    for name in ("step_seconds", "mfu_ratio", "exposed_communication_ratio"):
        value = getattr(state, name)
        if value is not None:
            setattr(status, name, value)
    if state.breakdown is not None:
        status.breakdown.CopyFrom(_breakdown_message(state.breakdown))
    return status


def _breakdown_message(breakdown: StepBreakdown) -> pb.StepBreakdown:
    parts = [pb.StepPart(**vars(part)) for part in breakdown.parts]
    traffic = [pb.GroupTraffic(**vars(each)) for each in breakdown.traffic]
    return pb.StepBreakdown(parts=parts, traffic=traffic, steps=breakdown.steps)


def breakdown_of(status: pb.JobStatus) -> StepBreakdown | None:
    if not status.HasField("breakdown"):
        return None
    message = status.breakdown
    parts = tuple(
        StepPart(part.part, part.seconds, part.stage if part.HasField("stage") else None, part.group_kind)
        for part in message.parts
    )
    traffic = tuple(
        Traffic(
            *(each.group_kind, each.groups, each.min_ranks, each.max_ranks, each.bytes, each.transfer_seconds),
            each.bus_bytes_per_second if each.HasField("bus_bytes_per_second") else None,
        )
        for each in message.traffic
    )
    return StepBreakdown(parts, traffic, message.steps)


def state_of(status: pb.JobStatus) -> JobState:
    """The state of a message, for those who ask over gRPC. When it was evaluated is not known."""
    known: dict[str, Any] = {
        name: getattr(status, name) if status.HasField(name) else None
        for name in ("step_seconds", "mfu_ratio", "exposed_communication_ratio")
    }
    return JobState(
        job=status.job,
        world_size=status.world_size,
        verdict=verdict_of(status.verdict),
        since_unix_seconds=status.verdict.since_unix_nanos / 1e9,
        evaluated_unix_seconds=0.0,
        ranks_seen=status.ranks_seen,
        windows=status.ranks,
        breakdown=breakdown_of(status),
        **known,
    )


def is_wanted(job: str, wanted: str) -> bool:
    """Whether a request for `wanted` includes the job: a name, `NAMESPACE/`, or nothing for all."""
    return not wanted or job == wanted or (wanted.endswith("/") and job.startswith(wanted))


def verdict_message(verdict: Verdict, since_unix_seconds: float) -> pb.Verdict:
    message = pb.Verdict(
        kind=pb.VerdictKind.Value(f"VERDICT_KIND_{verdict.kind.name}"),
        severity=pb.Severity.Value(f"SEVERITY_{verdict.severity.name}"),
        confidence=pb.Confidence.Value(f"CONFIDENCE_{verdict.confidence.name}"),
        culprits=verdict.culprits,
        group=verdict.group,
        cause=_cause(verdict.cause),
        reason=verdict.reason,
        asynchronous=verdict.asynchronous,
        since_unix_nanos=int(since_unix_seconds * 1e9),
    )
    for name in ("stage", "impact_ratio", "lost_gpu_seconds"):
        value = getattr(verdict, name)
        if value is not None:
            setattr(message, name, value)
    return message


def _cause(cause: Cause) -> pb.Cause:
    frames = [
        FrameShare(function=f.function, file=f.file, line=f.line, share=f.share, own_share=f.own_share, phase=f.phase)
        for f in cause.frames
    ]
    texts = {name: getattr(cause, name) for name in ("phase", "evidence", "bound", "stalls")}
    return pb.Cause(frames=frames, **texts)


def verdict_of(message: pb.Verdict) -> Verdict:
    """The verdict of a message; a kind that only a newer peer knows becomes insufficient data."""
    kind = pb.VerdictKind.Name(message.kind).removeprefix("VERDICT_KIND_")
    severity = pb.Severity.Name(message.severity).removeprefix("SEVERITY_")
    confidence = pb.Confidence.Name(message.confidence).removeprefix("CONFIDENCE_")
    frames = tuple(FrameSeen(f.function, f.file, f.line, f.share, f.own_share, f.phase) for f in message.cause.frames)
    return Verdict(
        kind=Kind.__members__.get(kind, Kind.INSUFFICIENT_DATA),
        reason=message.reason,
        severity=Severity.__members__.get(severity, Severity.NONE),
        confidence=Confidence.__members__.get(confidence, Confidence.LOW),
        culprits=tuple(message.culprits),
        stage=message.stage if message.HasField("stage") else None,
        group=message.group,
        impact_ratio=message.impact_ratio if message.HasField("impact_ratio") else None,
        lost_gpu_seconds=message.lost_gpu_seconds if message.HasField("lost_gpu_seconds") else None,
        cause=Cause(message.cause.phase, frames, message.cause.evidence, message.cause.bound, message.cause.stalls),
        asynchronous=message.asynchronous,
    )


def excesses_of(join: JoinSummary) -> list[RankExcess]:
    """The comparison of the recorded ranks, bounded: a daemon's report is hostile input."""
    return [
        RankExcess(each.rank, each.steps, each.excess_seconds, each.low_seconds, each.high_seconds)
        for each in join.excesses[:MAX_EXCESSES]
        if all(map(isfinite, (each.excess_seconds, each.low_seconds, each.high_seconds)))
    ]


def judgement_of(capture: Capture) -> str:
    """`the recording confirms it: …`; empty where there is no verdict, or it is not about the recorded ranks."""
    if not capture.HasField("verdict"):
        return ""
    times = [each.step_times for each in capture.ranks]
    known = [each.before_seconds for each in times if each.HasField("before_seconds")]
    known = known or [each.summary.step_seconds for each in capture.ranks if each.summary.HasField("step_seconds")]
    return judgement(verdict_of(capture.verdict), excesses_of(capture.join), max(known, default=None))


def _statuses(states: Iterable[JobState], wanted: str) -> Iterator[pb.JobStatus]:
    return (job_status(state) for state in states if is_wanted(state.job, wanted))


class JobServicer(job_service_pb2_grpc.JobServiceServicer):
    def __init__(self, correlator: Correlator, hangs: HangStore, reports: FleetReports) -> None:
        self._correlator = correlator
        self._hangs = hangs
        self._reports = reports

    def ListJobs(self, request: pb.ListJobsRequest, context: grpc.ServicerContext) -> pb.ListJobsResponse:
        return pb.ListJobsResponse(jobs=_statuses(self._correlator.states, request.run))

    def ListHangs(self, request: pb.ListHangsRequest, context: grpc.ServicerContext) -> pb.ListHangsResponse:
        return self._hangs.listed(lambda run: is_wanted(run, request.run))

    def GetHang(self, request: pb.GetHangRequest, context: grpc.ServicerContext) -> pb.GetHangResponse:
        found = self._hangs.find(request.id)
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, NO_REPORT)
        return pb.GetHangResponse(report=msgspec.json.encode(found))

    def GetFleetReport(
        self, request: pb.GetFleetReportRequest, context: grpc.ServicerContext
    ) -> pb.GetFleetReportResponse:
        if request.since not in PERIODS:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_PERIOD)
        return self._reports.get(request.since)

    def WatchJobs(self, request: pb.WatchJobsRequest, context: grpc.ServicerContext) -> Iterator[pb.WatchJobsResponse]:
        # A slow reader gets the newest state, not every state.
        newest: queue.Queue[tuple[JobState, ...] | None] = queue.Queue(maxsize=1)

        def offer(states: tuple[JobState, ...] | None) -> None:
            while True:
                try:
                    newest.put_nowait(states)
                    return
                except queue.Full:
                    with contextlib.suppress(queue.Empty):
                        newest.get_nowait()

        stop = self._correlator.listen(offer)
        context.add_callback(lambda: offer(None))
        try:
            states: tuple[JobState, ...] | None = self._correlator.states
            while states is not None and context.is_active():
                yield pb.WatchJobsResponse(jobs=_statuses(states, request.run))
                try:
                    states = newest.get(timeout=REFRESH_SECONDS)
                except queue.Empty:  # if all daemons are gone, the ages of their windows grow
                    states = self._correlator.states
        finally:
            stop()
