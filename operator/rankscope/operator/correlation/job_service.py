"""JobService: jobs and their verdicts over gRPC, and verdicts as messages and back."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import msgspec

from rankscope.analysis.verdicts.verdict import Cause, Confidence, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.operator.correlation.correlator import Correlator, JobState
from rankscope.operator.correlation.fleet_reports import NO_PERIOD, PERIODS, FleetReports
from rankscope.operator.correlation.hang_store import HangStore
from rankscope.v1 import job_service_pb2, job_service_pb2_grpc, window_pb2

NO_REPORT = "there is no such report of a hang; `rankscope hangs` lists them"


def job_status(state: JobState) -> job_service_pb2.JobStatus:
    status = job_service_pb2.JobStatus(
        job=state.job,
        world_size=state.world_size,
        ranks_seen=state.ranks_seen,
        verdict=verdict_message(state.verdict, state.since_unix_seconds),
        ranks=state.windows,
    )
    for name in ("step_seconds", "mfu_ratio", "exposed_communication_ratio"):
        value = getattr(state, name)
        if value is not None:
            setattr(status, name, value)
    return status


def state_of(status: job_service_pb2.JobStatus) -> JobState:
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
        **known,
    )


def is_wanted(job: str, wanted: str) -> bool:
    """Whether a request for `wanted` includes the job: a name, `NAMESPACE/`, or nothing for all."""
    return not wanted or job == wanted or (wanted.endswith("/") and job.startswith(wanted))


def verdict_message(verdict: Verdict, since_unix_seconds: float) -> job_service_pb2.Verdict:
    message = job_service_pb2.Verdict(
        kind=job_service_pb2.VerdictKind.Value(f"VERDICT_KIND_{verdict.kind.name}"),
        severity=job_service_pb2.Severity.Value(f"SEVERITY_{verdict.severity.name}"),
        confidence=job_service_pb2.Confidence.Value(f"CONFIDENCE_{verdict.confidence.name}"),
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


def _cause(cause: Cause) -> job_service_pb2.Cause:
    frames = [
        window_pb2.FrameShare(
            function=f.function, file=f.file, line=f.line, share=f.share, own_share=f.own_share, phase=f.phase
        )
        for f in cause.frames
    ]
    texts = {name: getattr(cause, name) for name in ("phase", "evidence", "bound", "stalls")}
    return job_service_pb2.Cause(frames=frames, **texts)


def verdict_of(message: job_service_pb2.Verdict) -> Verdict:
    """The verdict of a message; a kind that only a newer peer knows becomes insufficient data."""
    kind = job_service_pb2.VerdictKind.Name(message.kind).removeprefix("VERDICT_KIND_")
    severity = job_service_pb2.Severity.Name(message.severity).removeprefix("SEVERITY_")
    confidence = job_service_pb2.Confidence.Name(message.confidence).removeprefix("CONFIDENCE_")
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


def _statuses(states: Iterable[JobState], wanted: str) -> Iterator[job_service_pb2.JobStatus]:
    return (job_status(state) for state in states if is_wanted(state.job, wanted))


class JobServicer(job_service_pb2_grpc.JobServiceServicer):
    def __init__(self, correlator: Correlator, hangs: HangStore, reports: FleetReports) -> None:
        self._correlator = correlator
        self._hangs = hangs
        self._reports = reports

    def ListJobs(
        self, request: job_service_pb2.ListJobsRequest, context: grpc.ServicerContext
    ) -> job_service_pb2.ListJobsResponse:
        return job_service_pb2.ListJobsResponse(jobs=_statuses(self._correlator.states, request.run))

    def ListHangs(
        self, request: job_service_pb2.ListHangsRequest, context: grpc.ServicerContext
    ) -> job_service_pb2.ListHangsResponse:
        return self._hangs.listed(lambda run: is_wanted(run, request.run))

    def GetHang(
        self, request: job_service_pb2.GetHangRequest, context: grpc.ServicerContext
    ) -> job_service_pb2.GetHangResponse:
        found = self._hangs.find(request.id)
        if found is None:
            context.abort(grpc.StatusCode.NOT_FOUND, NO_REPORT)
        return job_service_pb2.GetHangResponse(report=msgspec.json.encode(found))

    def GetFleetReport(
        self, request: job_service_pb2.GetFleetReportRequest, context: grpc.ServicerContext
    ) -> job_service_pb2.GetFleetReportResponse:
        if request.since not in PERIODS:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_PERIOD)
        return self._reports.get(request.since)

    def WatchJobs(
        self, request: job_service_pb2.WatchJobsRequest, context: grpc.ServicerContext
    ) -> Iterator[job_service_pb2.WatchJobsResponse]:
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
                yield job_service_pb2.WatchJobsResponse(jobs=_statuses(states, request.run))
                states = newest.get()
        finally:
            stop()
