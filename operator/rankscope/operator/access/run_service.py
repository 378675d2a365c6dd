"""JobService for users: the runs that this replica correlates, with their ranks; of the runs of other replicas, what
their TrainingRun objects say. Stack frames are left out: seeing a run does not include its code. Reports of hangs are
for callers that may read profiles, the fleet report for those that may list the runs of all namespaces."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import grpc
import msgspec
from msgspec import UNSET

from rankscope.analysis.verdicts.verdict import Cause, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.common.run_names import run_labels, run_name
from rankscope.operator.access.guard import Call, Guard, RefusedError
from rankscope.operator.access.requests import place_of_hang, places_to_list
from rankscope.operator.access.token_review import Access
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.fleet_reports import NO_PERIOD, PERIODS, FleetReports
from rankscope.operator.correlation.hang_store import HangStore
from rankscope.operator.correlation.job_service import NO_REPORT, is_wanted, job_status, verdict_message
from rankscope.operator.kube.objects import RunObject, unix_seconds
from rankscope.operator.kube.resources import RankCount, RunVerdict
from rankscope.v1 import job_service_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["JobService"].full_name
# Between two answers of a watch; a caller that left is noticed within.
WATCH_SECONDS = 2.0
RECHECK_SECONDS = 30.0
_SOURCE = re.compile(r"(.+):(\d{1,9}) \((.*)\)")


class UserJobs:
    def __init__(
        self,
        states: Callable[[], Sequence[JobState]],
        hangs: HangStore,
        reports: FleetReports,
        audit: CaptureAudit,
        objects: Callable[[], Iterable[RunObject]] = lambda: (),
        has_namespaces: bool = True,
    ) -> None:
        """`has_namespaces` is False without Kubernetes: runs have plain names there."""
        self._states = states
        self._hangs = hangs
        self._reports = reports
        self._audit = audit
        self._objects = objects
        self._has_namespaces = has_namespaces

    def handler(self, guard: Guard) -> grpc.GenericRpcHandler:
        methods = {
            "ListJobs": guard.single("ListJobs", pb.ListJobsRequest, self.list),
            "WatchJobs": guard.streaming("WatchJobs", pb.WatchJobsRequest, self.watch),
            "ListHangs": guard.single("ListHangs", pb.ListHangsRequest, self.list_hangs),
            "GetHang": guard.single("GetHang", pb.GetHangRequest, self.get_hang),
            "GetFleetReport": guard.single("GetFleetReport", pb.GetFleetReportRequest, self.get_fleet_report),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def list(self, request: pb.ListJobsRequest, call: Call) -> pb.ListJobsResponse:
        call.require(self._access(request.run))
        return pb.ListJobsResponse(jobs=self._statuses(request.run))

    def watch(self, request: pb.WatchJobsRequest, call: Call) -> Iterator[pb.WatchJobsResponse]:
        access = self._access(request.run)
        call.require(access)
        checked = time.monotonic()
        while call.context.is_active():
            yield pb.WatchJobsResponse(jobs=self._statuses(request.run))
            time.sleep(WATCH_SECONDS)
            if time.monotonic() - checked > RECHECK_SECONDS:
                call.recheck(access)
                checked = time.monotonic()

    def list_hangs(self, request: pb.ListHangsRequest, call: Call) -> pb.ListHangsResponse:
        """A report names code: it needs what profiles need."""
        place = places_to_list(request.run, self._has_namespaces)
        call.require(Access("get", place.namespace, subresource="artifacts"))
        self._record(call, namespace=place.namespace, run=place.name)
        return self._hangs.listed(lambda run: is_wanted(run, request.run))

    def get_hang(self, request: pb.GetHangRequest, call: Call) -> pb.GetHangResponse:
        place = place_of_hang(request.id, self._has_namespaces)
        call.require(Access("get", place.namespace, subresource="artifacts"))
        found = self._hangs.find(run_name(place.namespace, place.name))
        if found is None:
            raise RefusedError(grpc.StatusCode.NOT_FOUND, NO_REPORT)
        self._record(call, namespace=place.namespace, run=run_labels(found.run)["run"], job=found.run, id=found.id)
        return pb.GetHangResponse(report=msgspec.json.encode(found))

    def get_fleet_report(self, request: pb.GetFleetReportRequest, call: Call) -> pb.GetFleetReportResponse:
        """It names runs, users and nodes of all namespaces."""
        call.require(Access("list", "", "trainingruns"))
        if request.since not in PERIODS:
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, NO_PERIOD)
        return self._reports.get(request.since)

    def _record(self, call: Call, **what: str) -> None:
        self._audit.write_once_a_minute(call.record("downloaded", what="hang", **what))

    def _access(self, wanted: str) -> Access:
        return Access("list", places_to_list(wanted).namespace if self._has_namespaces else "", "trainingruns")

    def _statuses(self, wanted: str) -> Iterator[pb.JobStatus]:
        held = {state.job: state for state in self._states()}
        for state in held.values():
            if is_wanted(state.job, wanted):
                status = job_status(state)
                for window in status.ranks:
                    if window.HasField("stacks"):
                        window.stacks.ClearField("frames")
                    if window.HasField("stall"):
                        window.stall.ClearField("stack")
                yield status
        for thing in self._objects():
            if thing.place not in held and thing.status.phase == "Running" and is_wanted(thing.place, wanted):
                yield _from_object(thing)


def _from_object(thing: RunObject) -> pb.JobStatus:
    status = thing.status
    made = pb.JobStatus(job=thing.place)
    if isinstance(status.ranks, RankCount):
        made.ranks_seen = min(status.ranks.seen, 2**31 - 1)
        made.world_size = made.ranks_seen if status.ranks.expected is UNSET else min(status.ranks.expected, 2**31 - 1)
    for name in ("step_seconds", "mfu_ratio", "exposed_communication_ratio"):
        value = getattr(status, name)
        if value is not UNSET:
            setattr(made, name, value)
    if isinstance(status.verdict, RunVerdict):
        made.verdict.CopyFrom(verdict_message(_verdict(status.verdict), unix_seconds(status.verdict.since)))
    return made


def _verdict(said: RunVerdict) -> Verdict:
    place = None if said.source is UNSET else _SOURCE.fullmatch(said.source)
    frames = () if place is None else (FrameSeen(place[3], place[1], int(place[2]), 0.0, 0.0, ""),)
    return Verdict(
        kind=said.kind,
        reason=said.reason,
        severity=said.severity,
        confidence=said.confidence,
        culprits=tuple(culprit.rank for culprit in said.culprits if culprit.rank < 2**31),
        stage=None if said.stage is UNSET or said.stage >= 2**31 else said.stage,
        group="" if said.group is UNSET else said.group,
        impact_ratio=None if said.impact_ratio is UNSET else said.impact_ratio,
        lost_gpu_seconds=None if said.lost_gpu_hours is UNSET else said.lost_gpu_hours * 3600,
        cause=Cause(
            "unknown" if said.phase is UNSET else said.phase,
            frames,
            "" if said.evidence is UNSET else said.evidence,
            "" if said.bound is UNSET else said.bound,
            "" if said.stalls is UNSET else said.stalls,
        ),
    )
