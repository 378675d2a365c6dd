"""The duty cycle: periodic captures of a few steps of all ranks of a job, for the breakdown of a step where no probe
runs or where the probe cannot measure what a step waits for.

The daemon's thread calls it after every tick; captures record in their own threads. All nodes start at the same
moments without communicating: multiples of the period since 1970, offset by a hash of the job's name so that the
jobs of a node do not record at the same time."""

from __future__ import annotations

import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from pathlib import Path
from typing import Final

import numpy as np

from rankscope.analysis.verdicts.figures import PARTS_OF_SELF
from rankscope.analysis.verdicts.window_columns import plausible_seconds
from rankscope.daemon.captures.kineto.backend import KinetoBackend, seconds_to_record
from rankscope.daemon.captures.kineto.endpoint import Endpoint
from rankscope.daemon.captures.orders import CaptureError, Options, Order
from rankscope.daemon.captures.probe_backend import ProbeBackend
from rankscope.daemon.captures.records import DUTY_CYCLE, FINAL
from rankscope.daemon.captures.request import slowdown_objection
from rankscope.daemon.captures.runner import CaptureRunner
from rankscope.daemon.captures.store import Store
from rankscope.daemon.samples import Column, RankKey, RankProcess, self_seconds
from rankscope.daemon.windows.window import STATISTICS, statistics_of
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.window_pb2 import SOURCE_CAPTURE, RankWindow

# Measured: 0.9 to 3.3 µs on CPUs, 2.1 to 2.2 µs with CUPTI on an H200 (docs/captures.md). libkineto's own thread spends
# twice that per event afterwards, beside the training.
EVENT_SECONDS: Final = 5e-6
# Starting and stopping the profiler, and writing the trace beside the training.
PAUSE_SECONDS: Final = 0.1
MAX_STRIDE: Final = 1 << 20
log = logging.getLogger(__name__)
DONE, FAILED, SKIPPED = "done", "failed", "skipped"
BUDGET, BUSY, STALLED, YOUNG = "budget", "busy", "stalled", "young"
PROFILER, SLOWDOWN, UNABLE = "profiler", "slowdown", "unable"
REASONS: Final = (BUDGET, BUSY, PROFILER, SLOWDOWN, STALLED, UNABLE, YOUNG)
# libkineto polls every 5 s and needs its configuration shortly before the start. The lead leaves room for two polls: on
# a busy machine one may be late.
LEAD_SECONDS: Final = 14.0
MIN_LEAD_SECONDS: Final = 3.0
# New ranks import, compile and warm up.
YOUNG_WINDOWS: Final = 15
# Waiting is sampled more often than this: a probe that reports steps but never waiting cannot measure it.
BLIND_WINDOWS: Final = 15
# Gauges show the last capture for this many periods.
SHOWN_PERIODS: Final = 3
# Records of automatic captures. They must not displace captures that users requested.
MAX_RECORDS: Final = 16


# What a capture costs its job, and how often the budget allows one.
#
# Where no probe runs, nothing times the steps outside of captures, so the cost is estimated: recording an event takes
# the training thread a few microseconds, and the last capture shows how many events there are per second. Each node
# estimates by itself, and all nodes must agree on when to record: a capture that is too expensive for every period is
# taken in every second, fourth, eighth … period, counted since 1970, so that nodes with different estimates still meet.


@dataclass(frozen=True)
class DutySettings:
    steps: int  # 0: off
    period_seconds: float
    budget_ratio: float  # of a job's time


def cost_seconds(events_per_second: float, record_seconds: float) -> float:
    return PAUSE_SECONDS + events_per_second * EVENT_SECONDS * record_seconds


def stride(cost: float, settings: DutySettings) -> int:
    """The number of periods per capture that the budget allows: a power of two."""
    periods = cost / (settings.budget_ratio * settings.period_seconds)
    if periods <= 1:
        return 1
    return MAX_STRIDE if periods >= MAX_STRIDE else int(2 ** ceil(log2(periods)))


# The result of a capture as part of the window that closes after it.
#
# One capture goes into one window. Repeated until the next capture, a single bad step would look like a lasting fault,
# because the rules count windows.


@dataclass(frozen=True)
class CaptureBreakdown:
    """One value for each step that was recorded."""

    step_seconds: Column
    wait_seconds: Column  # exposed communication, including waiting for others, as the probe defines it
    communication_seconds: Column

    @property
    def self_seconds(self) -> Column:
        return self_seconds(self.step_seconds, self.wait_seconds)


def breakdown_of(entry: pb.RankCapture) -> CaptureBreakdown | None:
    """None if the rank did not deliver whole steps. A container wrote the trace: the figures are checked."""
    if entry.state != pb.CAPTURE_STATE_ANALYSED:
        return None
    summary = entry.summary
    columns = [
        plausible_seconds(np.array(values, dtype=np.float64))
        for values in (
            summary.each_step_seconds,
            summary.each_exposed_communication_seconds,
            summary.each_communication_seconds,
        )
    ]
    step, wait, communication = columns
    if not len(step) or len({len(column) for column in columns}) != 1 or np.isnan(columns).any() or not step.all():
        return None
    return CaptureBreakdown(step, np.minimum(wait, step), communication)


def lacks_wait(window: RankWindow) -> bool:
    """Whether a probe counts the steps but cannot measure what they wait for: collectives of compiled code, of C++
    or of CUDA graphs. A single window may lack it by chance, because waiting is sampled."""
    return window.HasField("steps") and not (window.HasField("wait_seconds") or window.groups)


def fill(window: RankWindow, breakdown: CaptureBreakdown) -> None:
    """Fill only where no probe measures steps and waiting: the probe covers all steps, undisturbed."""
    if window.HasField("steps") and not lacks_wait(window):
        return
    for name in (*PARTS_OF_SELF, "other_seconds"):  # a probe that counts steps measured these in other steps
        window.figures.pop(name, None)
        window.sources.pop(name, None)
    window.steps = len(breakdown.step_seconds)
    _add_statistics(window, breakdown, *STATISTICS)
    window.figures["communication_seconds"] = float(breakdown.communication_seconds.mean())
    window.sources["steps"] = window.sources["communication_seconds"] = SOURCE_CAPTURE


def fill_gauges(window: RankWindow, breakdown: CaptureBreakdown) -> None:
    """The same for a window that is only displayed, where the probe's step counts are newer than the capture."""
    if lacks_wait(window):
        _add_statistics(window, breakdown, "self_seconds", "wait_seconds")
    else:
        fill(window, breakdown)


def _add_statistics(window: RankWindow, breakdown: CaptureBreakdown, *names: str) -> None:
    for name in names:
        statistics = statistics_of(getattr(breakdown, name))
        if statistics is not None:
            getattr(window, name).CopyFrom(statistics)
            window.sources[name] = SOURCE_CAPTURE
    window.wait_source = "capture"


class DutyCaptures:
    """What the duty cycle needs of captures: by libkineto, else by a probe that cannot measure what its steps wait for.
    Stacks have no breakdown. All methods return quickly."""

    def __init__(
        self,
        runner: CaptureRunner,
        store: Store,
        kineto: KinetoBackend,
        probe: ProbeBackend,
        endpoint: Endpoint,
        proc_root: Path,
    ) -> None:
        self._runner = runner
        self._store = store
        self._kineto = kineto
        self._probe = probe
        self._endpoint = endpoint
        self._proc_root = proc_root

    def start(self, request: pb.StartCaptureRequest, requested_by: str, step_seconds: float | None) -> str:
        return self._runner.start(request, requested_by, step_seconds)

    def find(self, capture_id: str) -> pb.Capture | None:
        return self._runner.records.get(capture_id)

    def is_busy(self, job: str) -> bool:
        return self._runner.is_busy(job)

    def is_able(self, rank: RankProcess) -> bool:
        """Whether libkineto or the probe in the rank's process can record at all."""
        return self._kineto.objection(rank) is None or self._probe.objection(rank) is None

    def objection(self, rank: RankProcess) -> str | None:
        """Why the rank cannot be recorded now without harm, one of REASONS; None if it can."""
        if self._kineto.objection(rank) is None:
            client = self._endpoint.client(rank.pid)
            if client is None:
                return UNABLE
            if not client.is_ready:
                return PROFILER
        elif self._probe.objection(rank) is not None:
            return UNABLE
        return None if slowdown_objection(rank, Options(), self._proc_root) is None else SLOWDOWN

    def kept(self) -> Sequence[tuple[str, str]]:
        """Id and job of finished captures of the duty cycle, oldest first."""
        return self._runner.records.finished(DUTY_CYCLE)

    def forget(self, capture_id: str) -> None:
        self._runner.records.forget(capture_id)
        self._store.remove(capture_id)


@dataclass
class _Job:
    settings: DutySettings
    slot: int | None = None  # the last period that was decided
    capture_id: str = ""
    keys: Mapping[int, RankKey] = field(default_factory=dict)  # of the ranks being captured
    step_seconds: float | None = None  # of the last capture
    events_per_second: float | None = None
    logged_reason: str = ""  # the last reason to skip, so that it is logged once


@dataclass(frozen=True)
class _Latest:
    breakdown: CaptureBreakdown
    until_unix_seconds: float


class DutyCycle:
    """For the daemon's thread only, except `results` and `skips`. `settings_of` gives the settings for the ranks of
    a job at every tick."""

    def __init__(
        self,
        settings: DutySettings,
        captures: DutyCaptures,
        window_seconds: float = 2.0,
        unix_seconds: Callable[[], float] = time.time,
        settings_of: Callable[[Sequence[RankProcess]], DutySettings] | None = None,
    ) -> None:
        self.was_ever_on = settings.steps > 0
        self._settings_of = settings_of or (lambda ranks: settings)
        self._captures = captures
        # A window may be longer than the lead: the decision is made at the last border before it.
        self._lead_seconds = LEAD_SECONDS + 1.5 * window_seconds
        self._unix_seconds = unix_seconds
        self._jobs: dict[str, _Job] = {}
        self._windows_seen: dict[RankKey, int] = {}
        self._windows_without_wait: dict[RankKey, int] = {}  # consecutive ones, of those with steps
        self._fresh: dict[RankKey, CaptureBreakdown] = {}
        self._latest: dict[RankKey, _Latest] = {}
        self._results: Counter[str] = Counter({DONE: 0, FAILED: 0, SKIPPED: 0})
        self._skips: Counter[str] = Counter(dict.fromkeys(REASONS, 0))

    @property
    def results(self) -> dict[str, int]:
        return dict(self._results)

    @property
    def skips(self) -> dict[str, int]:
        """Reason to count."""
        return dict(self._skips)

    def observe(self, ranks: Sequence[RankProcess], windows: Mapping[RankKey, RankWindow]) -> None:
        """Called after every tick."""
        present = {rank.key for rank in ranks}
        self._windows_seen = {key: self._windows_seen.get(key, 0) + 1 for key in present}
        for kept in (self._fresh, self._latest, self._windows_without_wait):
            for key in kept.keys() - present:
                del kept[key]
        for key, window in windows.items():
            if window.steps and window.sources.get("steps") != SOURCE_CAPTURE and key in present:
                self._windows_without_wait[key] = (
                    self._windows_without_wait.get(key, 0) + 1 if lacks_wait(window) else 0
                )
        members: dict[str, list[RankProcess]] = {}
        for rank in ranks:
            members.setdefault(rank.job, []).append(rank)
        for name in self._jobs.keys() - members.keys():
            del self._jobs[name]
        for name, of_job in members.items():
            settings = self._settings_of(of_job)
            job = self._jobs.setdefault(name, _Job(settings))
            if job.settings != settings:
                job.settings, job.slot = settings, None  # periods are counted from the start again
            if job.capture_id:
                self._look_after(job)
            if settings.steps:
                self.was_ever_on = True
                self._turn(name, job, of_job, windows)

    def fill(self, key: RankKey, window: RankWindow) -> None:
        """Add a rank's last capture to the window that closes next, and to no other."""
        breakdown = self._fresh.pop(key, None)
        if breakdown is not None:
            fill(window, breakdown)

    def shown(self, key: RankKey, window: RankWindow) -> RankWindow:
        """The window as gauges show it: with the last capture until the next one, or scrapes would miss it."""
        latest = self._latest.get(key)
        is_measured = window.HasField("steps") and not lacks_wait(window)
        if latest is None or is_measured or self._unix_seconds() > latest.until_unix_seconds:
            return window
        copy = RankWindow()
        copy.CopyFrom(window)
        fill_gauges(copy, latest.breakdown)
        return copy

    def _turn(self, name: str, job: _Job, ranks: Sequence[RankProcess], windows: Mapping[RankKey, RankWindow]) -> None:
        """Decide on a period's capture, once, when its start is near."""
        period, now = job.settings.period_seconds, self._unix_seconds()
        offset = zlib.crc32(name.encode(errors="replace")) % period
        slot = int((now + self._lead_seconds - offset) // period)
        start = slot * period + offset
        if slot == job.slot:
            return
        first_sight, job.slot = job.slot is None, slot
        if first_sight and start < now + MIN_LEAD_SECONDS:
            return
        if self._is_measured(ranks, windows) or not any(map(self._captures.is_able, ranks)):
            return  # the job does not need captures
        reason = self._reason_to_skip(name, job, slot, ranks, windows)
        if reason is None:
            reason = self._begin(name, job, start, ranks)
        if reason is not None:
            self._results[SKIPPED] += 1
            self._skips[reason] += 1
            if reason != job.logged_reason:
                log.info("duty cycle: job %r is not captured: %s", name[:128], reason)
        job.logged_reason = reason or ""

    def _is_measured(self, ranks: Sequence[RankProcess], windows: Mapping[RankKey, RankWindow]) -> bool:
        """Whether the probe measures any rank: recorded steps and undisturbed steps must not be compared."""
        seeing = (rank.key for rank in ranks if self._windows_without_wait.get(rank.key, 0) < BLIND_WINDOWS)
        found = (windows[key] for key in seeing if key in windows)
        return any(window.HasField("steps") and window.sources.get("steps") != SOURCE_CAPTURE for window in found)

    def _reason_to_skip(
        self,
        name: str,
        job: _Job,
        slot: int,
        ranks: Sequence[RankProcess],
        windows: Mapping[RankKey, RankWindow],
    ) -> str | None:
        if min(self._windows_seen[rank.key] for rank in ranks) < YOUNG_WINDOWS:
            return YOUNG
        if any(rank.key in windows and windows[rank.key].HasField("stall") for rank in ranks):
            return STALLED
        if job.capture_id or self._captures.is_busy(name):
            return BUSY
        objections = (self._captures.objection(rank) for rank in ranks)
        objection = next((objection for objection in objections if objection is not None), None)
        if objection is not None:
            return objection
        # The first capture of a job measures its cost.
        if job.events_per_second is not None:
            order = Order("", ranks[0], job.settings.steps, None, 0, 0.0, step_seconds=job.step_seconds)
            cost = cost_seconds(job.events_per_second, seconds_to_record(order))
            if slot % stride(cost, job.settings):
                return BUDGET
        return None

    def _begin(self, name: str, job: _Job, start: float, ranks: Sequence[RankProcess]) -> str | None:
        request = pb.StartCaptureRequest(
            job=name,
            ranks="all",
            steps=job.settings.steps,
            start_unix_millis=round(start * 1000),
            # A late rank records other steps than the rest; it takes part again in the next period.
            patience_seconds=0.0,
            reason=f"{job.settings.steps} steps every {job.settings.period_seconds:g} s",
        )
        try:
            job.capture_id = self._captures.start(request, DUTY_CYCLE, job.step_seconds)
        except CaptureError as error:
            log.debug("duty cycle: job %r: %s", name[:128], error)
            return BUSY
        job.keys = {rank.rank: rank.key for rank in ranks}
        return None

    def _look_after(self, job: _Job) -> None:
        capture = self._captures.find(job.capture_id)
        if capture is not None and capture.state not in FINAL:
            return
        entries = [] if capture is None else list(capture.ranks)
        measured_ranks = {job.keys.get(entry.rank): breakdown_of(entry) for entry in entries}
        until = self._unix_seconds() + SHOWN_PERIODS * job.settings.period_seconds
        for key, breakdown in measured_ranks.items():
            if key in self._windows_seen and breakdown is not None:  # the recorded process, not its successor
                self._fresh[key] = breakdown
                self._latest[key] = _Latest(breakdown, until)
        is_done = bool(measured_ranks) and all(breakdown is not None for breakdown in measured_ranks.values())
        self._results[DONE if is_done else FAILED] += 1
        if not is_done:
            errors = [*(entry.error for entry in entries if entry.error), "too few whole steps were recorded"]
            log.info("duty cycle: capture %s: %s", job.capture_id, errors[0])
        _learn(job, entries)
        job.capture_id = ""
        self._tidy()

    def _tidy(self) -> None:
        """Keep the newest record of a job, for a limited number of jobs."""
        newest_first = list(reversed(self._captures.kept()))
        jobs: set[str] = set()
        for capture_id, job in newest_first:
            if job in jobs or len(jobs) >= MAX_RECORDS:
                self._captures.forget(capture_id)
            jobs.add(job)


def _learn(job: _Job, entries: Sequence[pb.RankCapture]) -> None:
    """How long to record next time and what that costs: by the slowest and the busiest rank."""
    delivered = [entry.summary for entry in entries if entry.state == pb.CAPTURE_STATE_ANALYSED]
    if not delivered:
        return
    whole = [summary.step_seconds for summary in delivered if summary.each_step_seconds]
    if len(whole) == len(delivered):
        job.step_seconds = max(whole)
    elif job.step_seconds is not None:
        job.step_seconds = None  # steps have become longer; libkineto measures them again
    else:
        job.step_seconds = 2 * max(summary.span_seconds for summary in delivered)
    rates = [summary.events / summary.span_seconds for summary in delivered if summary.span_seconds > 0]
    job.events_per_second = max(rates, default=job.events_per_second)
