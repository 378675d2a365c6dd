"""Makes a report of each hang, in the background: the stacks and flight recorders of all ranks at once, grouped and
matched. A listener to the correlator; it also counts the hangs of each job."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import grpc
import msgspec

from rankscope.analysis.collectives.hang_report import Evidence, HangReport, make_hang_report
from rankscope.analysis.verdicts.verdict import Kind
from rankscope.common.audit import LOGGER, AuditRecord, audit_line
from rankscope.common.run_names import run_labels, run_name
from rankscope.common.text import one_line
from rankscope.common.token_bucket import KeyedTokenBuckets, TokenBucket
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.hang_store import HangStore
from rankscope.v1.profile_service_pb2 import DumpStacksResponse

log = logging.getLogger(__name__)
audit_log = logging.getLogger(LOGGER)

# A job that hangs and recovers all the time, and a shared file system under many jobs, cost this much.
REPORTS_OF_A_JOB, JOB_REPORTS_PER_SECOND = 3.0, 1 / 600
REPORTS_AT_ONCE, REPORTS_PER_SECOND = 20.0, 1 / 30
UNDER_WAY = 2
# Clocks of nodes differ, and the last step is known to a window: within this it is the same hang as before a restart.
SAME_HANG_SECONDS = 10.0
REASON_CHARACTERS = 300
# A daemon that was just asked for other stacks refuses, and asks to try again within seconds. A hang lasts.
PAUSES_SECONDS = (4.0, 8.0)

Dump = Callable[[str], DumpStacksResponse]
"""The stacks of all ranks of a job with their flight recorders. May take a while, and raise grpc.RpcError."""


@dataclass
class _Hang:
    restarts: int  # of the job, before it
    seen_unix_seconds: float  # the last window in which it stood
    is_taken: bool = False  # a report is being made, or is not needed
    report: HangReport | None = None
    ended_unix_seconds: float | None = None


class HangReporter:
    """Called in the correlator's thread, from `start` to `stop`."""

    def __init__(
        self,
        store: HangStore,
        dump: Dump,
        on_report: Callable[[HangReport], None] = lambda report: None,
        unix_seconds: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        pauses_seconds: Sequence[float] = PAUSES_SECONDS,
    ) -> None:
        self.store = store
        self._dump = dump
        self._on_report = on_report
        self._unix_seconds = unix_seconds
        self._monotonic = monotonic
        self._pauses_seconds = pauses_seconds
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._keeping = threading.Lock()  # one at a time: a report with its end is not replaced by one without
        self._hangs: dict[str, _Hang] = {}  # that last, by job
        self._totals: dict[str, int] = {}  # by job
        self._under_way = 0
        self._per_job = KeyedTokenBuckets(REPORTS_OF_A_JOB, JOB_REPORTS_PER_SECOND, monotonic)
        self._all = TokenBucket(REPORTS_AT_ONCE, REPORTS_PER_SECOND)
        self._pool = ThreadPoolExecutor(UNDER_WAY, thread_name_prefix="rankscope-hangs")

    def stop(self) -> None:
        self._stopping.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            standing = list(self._hangs.values())
        for hang in standing:
            if hang.report is not None:
                self._keep(hang, hang.report)  # with how long it had lasted
        self.store.close()

    def hangs_of(self, job: str) -> int:
        """Since the job was first seen."""
        with self._lock:
            return self._totals.get(job, 0)

    def __call__(self, states: tuple[JobState, ...]) -> None:
        with self._lock:
            present = {state.job: state for state in states}
            for job, hang in list(self._hangs.items()):
                ended_unix_seconds = _end_unix_seconds(hang, present.get(job))
                if ended_unix_seconds is not None:
                    self._end(self._hangs.pop(job), ended_unix_seconds)
            for job in self._totals.keys() - present.keys():
                del self._totals[job]
            for state in states:
                if state.verdict.kind is Kind.HANG:
                    self._follow(state)

    def _follow(self, state: JobState) -> None:
        """A hang that has to wait for its report is tried again with the next windows."""
        hang = self._hangs.get(state.job)
        if hang is None:
            hang = self._hangs[state.job] = _Hang(state.restarts, state.window_end_unix_seconds)
            self._totals[state.job] = self._totals.get(state.job, 0) + 1
            log.warning("%s hangs: %s", state.job, state.verdict.reason)
        hang.seen_unix_seconds = state.window_end_unix_seconds
        if hang.report is not None:
            self.store.see(hang.report.id, hang.seen_unix_seconds)
        if hang.is_taken or self._under_way >= UNDER_WAY or not self._all.available(self._monotonic()) >= 1:
            return
        hang.is_taken = True
        if not self._per_job.take(state.job):
            log.warning("%s hangs too often: there is no report of this one", state.job)
            return
        self._all.spend(self._monotonic())
        self._under_way += 1
        self._pool.submit(self._report, state, hang)

    def _end(self, hang: _Hang, unix_seconds: float) -> None:
        """Reports that are still being made get their end when they are kept."""
        hang.ended_unix_seconds = unix_seconds
        if hang.report is not None:
            self._pool.submit(self._keep, hang, hang.report)

    def _report(self, state: JobState, hang: _Hang) -> None:
        try:
            began = _began_unix_seconds(state)
            for known in self.store.summaries(lambda run: run == state.job):
                if abs(known.began_unix_seconds - began) < SAME_HANG_SECONDS:
                    # Made before a restart, or before there was another verdict for a moment.
                    if (found := self.store.find(known.id)) is not None:
                        self._keep(hang, found)
                    return
            report = self._made(state, began)
            self._keep(hang, report)
            log.warning("%s hangs: %s; next: rankscope hangs %s", report.run, report.headline, report.id)
            self._on_report(report)
        except Exception:
            log.exception("the report of the hang of %s cannot be made", state.job)
        finally:
            with self._lock:
                self._under_way -= 1

    def _made(self, state: JobState, began: float) -> HangReport:
        now = self._unix_seconds()
        labels = run_labels(state.job)
        name = f"h-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(3)}"
        report_id = run_name(labels["run_namespace"], name)
        record = AuditRecord(
            "asked",
            "hang",
            namespace=labels["run_namespace"],
            run=labels["run"],
            job=state.job,
            id=report_id,
            ranks="all",
            what="stacks",
        )
        audit_log.info("%s", audit_line(record, now))
        evidence = self._evidence(state.job)
        read = f"{len(evidence.stacks)}/{len(evidence.stacks) + len(evidence.without_stack)} ranks delivered"
        result = "Succeeded" if evidence.stacks and not evidence.without_stack else "Failed"
        ended = replace(record, event="ended", result=result, message=read)
        audit_log.info("%s", audit_line(ended, self._unix_seconds()))
        return make_hang_report(
            report_id, state.job, state.verdict, state.world_size, began, self._unix_seconds(), evidence
        )

    def _evidence(self, job: str) -> Evidence:
        """Without stacks, the report has the verdict."""
        pauses = iter(self._pauses_seconds)
        while True:
            try:
                answer = self._dump(job)
                break
            except grpc.RpcError as error:
                is_busy = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                pause = next(pauses, None) if is_busy else None
                if pause is None or self._stopping.wait(pause):
                    reason = one_line(error.details() or error.code().name, REASON_CHARACTERS)
                    return Evidence({}, problems=[f"the stacks could not be read: {reason}"])
        recorders = {one.rank: one.flight_recorder for one in answer.ranks if one.HasField("flight_recorder")}
        return Evidence(
            {one.rank: one.frames for one in answer.ranks if one.frames},
            {one.rank: one.problem for one in answer.ranks if not one.frames},
            {rank: tail.records for rank, tail in recorders.items() if tail.records},
            {rank: tail.problem for rank, tail in recorders.items() if not tail.records},
            answer.problems,
        )

    def _keep(self, hang: _Hang, report: HangReport) -> None:
        with self._keeping:
            with self._lock:
                seen = max(hang.seen_unix_seconds, report.made_unix_seconds)
                hang.report = report = msgspec.structs.replace(
                    report, seen_unix_seconds=seen, ended_unix_seconds=hang.ended_unix_seconds
                )
            try:
                self.store.keep(report)
            except OSError as error:
                log.warning("the report of the hang of %s is not kept: %s; make room on the disk", report.run, error)


def _end_unix_seconds(hang: _Hang, state: JobState | None) -> float | None:
    """None while it stands. The step that ends it has taken as long as the hang."""
    if state is None or state.restarts != hang.restarts:
        return hang.seen_unix_seconds
    if state.verdict.kind is Kind.HANG:
        return None
    end, began = state.window_end_unix_seconds, hang.report.began_unix_seconds if hang.report else float("nan")
    ends = (began + window.step_seconds.max for window in state.windows)
    return min((moment for moment in ends if hang.seen_unix_seconds <= moment <= end), default=end)


def _began_unix_seconds(state: JobState) -> float:
    """The last step of any rank."""
    stalled = [window for window in state.windows if window.HasField("stall")]
    steps = (window.end_unix_nanos / 1e9 - window.stall.seconds_since_step for window in stalled)
    return max(steps, default=state.since_unix_seconds)
