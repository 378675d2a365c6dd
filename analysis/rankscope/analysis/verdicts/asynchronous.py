"""Asynchronous runs: ranks that do not meet in their steps, as the workers of a parameter server.

Synchronous ranks end the same number of steps in the same time. A run is asynchronous when its ranks exchange messages
but share no collective, and their step counts drift apart from stretch to stretch. Local SGD shares collectives, so it
is not: its ranks wait for the slowest one at every synchronisation, and are compared as synchronous ranks are.

A worker costs its own share of the run's updates, never the time of all. The server is the bottleneck when workers wait
for it and it does not wait for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import isnan

import numpy as np

from rankscope.analysis.profiles.frames import Frame, is_user_code
from rankscope.analysis.profiles.phases import WAITING_PHASES
from rankscope.analysis.stats.robust import Bools, Floats, Ints, median_or_nan
from rankscope.analysis.verdicts.slow_rank import Screen
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.verdict import Cause, percent, ranks
from rankscope.analysis.verdicts.windows import (
    AsynchronousRun,
    FrameSeen,
    JobWindow,
    RankColumns,
    RankEvidence,
    step_phase,
)

# With one worker, it would be a second server.
MIN_WORKERS = 2
FRAMES_SHOWN = 3


class Cadence(Enum):
    SYNCHRONOUS = "synchronous"
    DRIFTING = "drifting"  # not known yet
    ASYNCHRONOUS = "asynchronous"


class StepCounts:
    """The steps of a job's ranks, window by window, and whether they step together."""

    def __init__(self) -> None:
        self.cadence = Cadence.SYNCHRONOUS
        self.servers: Ints = np.empty(0, dtype=np.int64)  # known once it is asynchronous
        self._has_met = False
        self._start(np.empty(0, dtype=np.int64))

    def _start(self, members: Ints) -> None:
        self._members = members
        self._total = np.zeros(len(members))
        self._stretch = np.zeros(len(members))
        self._exchanged = np.zeros(len(members), dtype=bool)
        self._spread_steps = 0.0
        self._grown = 0  # stretches in a row

    def add(self, window: JobWindow, policy: Policy) -> None:
        if self._has_met:
            return
        columns = window.columns
        if window.has_collectives or window.is_captured or bool((columns.stage >= 0).any()):
            # Collectives that come later count as well: a first interval of local SGD may be long.
            self._has_met, self.cadence = True, Cadence.SYNCHRONOUS
            return
        has_steps = ~np.isnan(columns.steps)
        if not np.array_equal(columns.rank[has_steps], self._members):
            # A rank that restarts, joins late or has no window in this tick is behind for that reason.
            self._start(columns.rank[has_steps])
            if self.cadence is Cadence.DRIFTING:
                self.cadence = Cadence.SYNCHRONOUS
            return
        self._total += columns.steps[has_steps]
        self._stretch += columns.steps[has_steps]
        self._exchanged |= columns.wait_seconds[has_steps] > 0
        if len(self._members) >= MIN_WORKERS and self._stretch.min() >= FIXED.stretch_steps:
            self._end_stretch(policy)

    def _end_stretch(self, policy: Policy) -> None:
        spread = float(self._total.max() - self._total.min())
        # A server that answers remote calls waits in threads that nothing times.
        is_exchanging = 2 * int(self._exchanged.sum()) >= len(self._members)
        is_growing = is_exchanging and spread >= self._spread_steps + FIXED.growth_steps
        self._grown = self._grown + 1 if is_growing else 0
        self._spread_steps = spread
        self._stretch[:] = 0.0
        self._exchanged[:] = False
        is_apart = spread >= max(policy.asynchronous_steps, policy.asynchronous_ratio * float(self._total.max()))
        if self._grown >= policy.windows_for_alarm and is_apart:
            self.cadence = Cadence.ASYNCHRONOUS
        elif self.cadence is not Cadence.ASYNCHRONOUS:
            self.cadence = Cadence.DRIFTING if self._grown else Cadence.SYNCHRONOUS
        if self.cadence is Cadence.ASYNCHRONOUS:
            self.servers = np.sort(self._members[find_servers(self._total)])

    def is_worker(self, columns: RankColumns) -> Bools:
        """Ranks whose steps are not known are no workers: there is nothing to compare them by."""
        return ~np.isnan(columns.steps) & ~np.isin(columns.rank, self.servers)


def ends_steps_together(window: JobWindow) -> bool:
    """False where ranks do not meet in every step, and so are at different steps at one time. Most steps of local SGD
    have no wait. DDP and devices may hide one in every step."""
    columns = window.columns
    is_timed_whole = np.isnan(columns.host_seconds) & np.isnan(columns.forward_seconds)
    return window.asynchronous is None and not bool(((columns.transfer_seconds == 0.0) & is_timed_whole).all())


def find_servers(steps: Floats) -> Ints:
    """The rows that make as many steps as all other rows together; none where there are no such."""
    order = np.argsort(-steps, kind="stable")
    for count in range(1, len(steps) - MIN_WORKERS + 1):
        rest = float(steps[order[count:]].sum())
        if bool((np.abs(steps[order[:count]] - rest) <= FIXED.server_steps_ratio * rest).all()):
            return order[:count]
    return order[:0]


@dataclass(frozen=True)
class SlowServer:
    wait_ratio: float  # of a worker's cycle, for the server
    cycle_seconds: float
    update_seconds: float  # that the server takes for one update; 0 where not known
    culprits: tuple[int, ...]  # empty where the server is not known
    is_sure: bool  # it is known to wait little

    def impact_ratio(self, usual_wait_seconds: float | None) -> float:
        """Share of the updates that come back without the queue: an exchange takes as long as before, if that is known,
        or else at least what the server takes for one update."""
        needed = self.update_seconds if usual_wait_seconds is None else usual_wait_seconds
        return max(self.wait_ratio - needed / self.cycle_seconds, 0.0)


def split(window: JobWindow, is_worker: Bools, servers: Ints) -> JobWindow:
    """The window with its workers only. What a worker loses in long steps is part of its work: nobody waits for it."""
    columns = window.columns
    workers = columns.take(is_worker)
    unknown = np.full(len(workers), np.nan)
    workers = replace(
        workers,
        self_seconds=workers.self_seconds + np.nan_to_num(workers.late_seconds),
        **dict.fromkeys(("long_seconds", "late_seconds", "long_ratio", "late_ratio", "late_ahead_seconds"), unknown),
    )
    is_server = np.isin(columns.rank, servers)
    without_steps = tuple(columns.rank[~is_worker & ~is_server].tolist())
    run = AsynchronousRun(columns.take(is_server), without_steps)
    missing = window.world_size - len(columns)
    return replace(window, columns=workers, world_size=len(workers) + missing, asynchronous=run)


def with_own_shares(screen: Screen, columns: RankColumns, policy: Policy) -> Screen:
    """The comparison with the impact of each rank on the updates of all workers: the rest do not wait for it."""
    with np.errstate(all="ignore"):
        step = np.where(columns.step_seconds > 0, columns.step_seconds, np.nan)
        excess = np.maximum(screen.compared_seconds - screen.reference_seconds, 0.0)
        gained = np.where(screen.outlier, 1 / np.maximum(step - excess, FIXED.least_work_ratio * step) - 1 / step, 0.0)
        impact = np.nan_to_num(gained / (np.nansum(1 / step) + np.nansum(gained)))
    outlier = screen.outlier & (impact >= policy.impact_ratio)
    return replace(screen, impact_ratio=np.where(outlier, impact, np.nan), outlier=outlier)


def find_slow_server(workers: RankColumns, run: AsynchronousRun, policy: Policy) -> SlowServer | None:
    """Ranks may exchange messages without any server: then nobody is named."""
    with np.errstate(all="ignore"):
        waited = workers.wait_seconds / workers.step_seconds
        busy = run.servers.step_seconds - run.servers.wait_seconds
        # Exactly none: its waiting is not measured.
        busy_ratio = np.where(run.servers.wait_seconds > 0, busy / run.servers.step_seconds, np.nan)
    wait_ratio = float(np.nanmean(np.clip(waited, 0.0, 1.0))) if not np.isnan(waited).all() else 0.0
    cycle = median_or_nan(workers.step_seconds)
    if not cycle > 0:
        return None
    is_busy = busy_ratio >= policy.server_busy_ratio
    if is_busy.any():
        culprits = tuple(run.servers.rank[is_busy].tolist())
        found = SlowServer(wait_ratio, cycle, float(busy[is_busy].max()), culprits, is_sure=True)
        return found if wait_ratio >= policy.server_wait_ratio else None
    is_unknown = bool(run.unknown_ranks) if len(run.servers) == 0 else bool(np.isnan(busy_ratio).any())
    if not is_unknown or wait_ratio < policy.unmeasured_server_wait_ratio:
        return None
    return SlowServer(wait_ratio, cycle, 0.0, tuple(run.servers.rank.tolist()), is_sure=False)


def server_cause(found: SlowServer, evidence: RankEvidence | None) -> Cause:
    """The lines that the server is seen in. It has no peers to be compared with, so that it must be known to work: the
    main thread of a server that answers remote calls sleeps."""
    said = f"workers wait for it {percent(found.wait_ratio)} of the time"
    said += ", and it does not wait for them" if found.is_sure else ""
    stacks = None if evidence is None else evidence.stacks
    frames: list[FrameSeen] = []
    if stacks is not None and found.is_sure:
        frames = [
            frame
            for frame in stacks.frames
            if frame.phase not in WAITING_PHASES
            and frame.own_share >= FIXED.server_frame_share
            and is_user_code(Frame(frame.function, frame.file, frame.line))
        ]
    frames.sort(key=lambda frame: -frame.own_share)
    return Cause(step_phase(frames[0].phase) if frames else "unknown", tuple(frames[:FRAMES_SHOWN]), said)


def staleness(step_seconds: Floats) -> Floats:
    """Updates of others during a cycle of each worker: so many updates its gradients are behind."""
    with np.errstate(all="ignore"):
        rates = np.where(step_seconds > 0, 1 / step_seconds, np.nan)
        return np.asarray((np.nansum(rates) - rates) / rates)


def pace(workers: RankColumns, culprits: tuple[int, ...]) -> str:
    """`asynchronous: 3 workers, 52 updates/s; rank 2 8.3/s, 5.2 behind; the others 21.9/s, 1.4 behind`"""
    with np.errstate(all="ignore"):
        rates = np.where(workers.step_seconds > 0, 1 / workers.step_seconds, np.nan)
    behind = staleness(workers.step_seconds)
    if np.isnan(rates).all():
        return ""
    parts = [f"asynchronous: {len(rates)} workers, {_rate(float(np.nansum(rates)))} updates/s"]
    slow = np.isin(workers.rank, culprits)
    if slow.any():
        parts.append(f"{ranks(workers.rank[slow].tolist())} {_typical(rates[slow], behind[slow])}")
    who = "the others" if slow.any() else "each"
    if not slow.all():
        parts.append(f"{who} {_typical(rates[~slow], behind[~slow])}")
    return "; ".join(parts)


def _typical(rates: Floats, behind: Floats) -> str:
    updates = median_or_nan(behind)
    staleness_text = "" if isnan(updates) else f", {updates:.1f} behind"
    return f"{_rate(median_or_nan(rates))}/s{staleness_text}"


def _rate(updates_per_second: float) -> str:
    return f"{updates_per_second:.3g}"
