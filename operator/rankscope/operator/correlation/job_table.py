"""The job table: windows of any number of daemons, grouped by job and tick. Bounded in every dimension."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from rankscope.analysis.verdicts.windows import JobWindow
from rankscope.operator.correlation.columns import Layout, Tick, job_windows
from rankscope.operator.correlation.daemon_windows import HeldWindow, RankSeen
from rankscope.v1 import identity_pb2

# Clocks of nodes, compared by when their windows arrive: a node whose clock is far off, or was set, is judged with
# the others. Smaller differences are left to the detector, which reports them.


log = logging.getLogger(__name__)

# Up to so many windows, a difference may be a delay.
TOLERATED_WINDOWS = 2.0
MAX_WINDOWS = 16
COMPARED_EVERY_SECONDS = 1.0
FORGET_AFTER_SECONDS = 60.0


@dataclass
class _Node:
    # The end of each window on the node's clock less its arrival on ours. A delay makes it smaller: the largest counts.
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_WINDOWS))
    end_unix_seconds: float = 0.0
    heard_monotonic: float = 0.0
    shift_seconds: float = 0.0


class NodeClocks:
    """`now` is our monotonic clock: whether our own wall clock is right does not matter."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._usual_seconds: float | None = None
        self._compared_monotonic = 0.0
        self.epoch = 0  # changes when most nodes have moved to another time

    @property
    def shifts(self) -> dict[str, float]:
        """By how many seconds the clocks of nodes are ahead of most others', for those that are far off."""
        return {name: self._ahead(node) for name, node in self._nodes.items() if node.shift_seconds}

    def shift(self, name: str, end_unix_seconds: float, window_seconds: float, now: float) -> float:
        """What to subtract from times of this node: whole windows, 0 for a clock that is about right."""
        node = self._nodes.setdefault(name, _Node())
        if end_unix_seconds < node.end_unix_seconds - window_seconds / 2:
            node.recent.clear()  # set back: a delay never changes the order of windows
        node.recent.append(end_unix_seconds - now)
        node.end_unix_seconds, node.heard_monotonic = end_unix_seconds, now
        if self._usual_seconds is None or now - self._compared_monotonic >= COMPARED_EVERY_SECONDS:
            self._compare(window_seconds, now)
        ahead = self._ahead(node)
        if abs(ahead - node.shift_seconds) > TOLERATED_WINDOWS * window_seconds:
            before = node.shift_seconds
            is_off = abs(ahead) > TOLERATED_WINDOWS * window_seconds and window_seconds > 0
            node.shift_seconds = round(ahead / window_seconds) * window_seconds if is_off else 0.0
            if node.shift_seconds != before:
                log.warning("the clock of node %s is %+.1f s from most others; check NTP or chrony there", name, ahead)
        return node.shift_seconds

    def _ahead(self, node: _Node) -> float:
        assert self._usual_seconds is not None
        return max(node.recent) - self._usual_seconds

    def _compare(self, window_seconds: float, now: float) -> None:
        gone = [name for name, node in self._nodes.items() if now - node.heard_monotonic > FORGET_AFTER_SECONDS]
        for name in gone:
            del self._nodes[name]
        # The upper median, so that it is the time of a node and not the mean of two.
        ordered = sorted(max(node.recent) for node in self._nodes.values())
        usual, before = ordered[len(ordered) // 2], self._usual_seconds
        if before is not None and abs(usual - before) > TOLERATED_WINDOWS * window_seconds:
            self.epoch += 1
        self._usual_seconds, self._compared_monotonic = usual, now


# The table.


# Open ticks of a job: slow daemons are waited for, dead ones are not.
OPEN_TICKS = 4
# Limits of what one fleet may occupy; beyond them new jobs and ranks are refused.
MAX_JOBS = 20_000
RANKS_PER_JOB = 131_072
# How long after the last window of a job the missing ones are given up, and when in any case.
QUIET_SECONDS = 0.5
MAX_GRACE_SECONDS = 4
# Windows end on a shared border; ends that differ by less belong to the same tick.
TICK_NANOS = 100_000_000


@dataclass
class Job:
    name: str
    world_size: int = 0
    incarnations: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    latest: dict[int, HeldWindow] = field(default_factory=dict)
    departed: dict[int, str] = field(default_factory=dict)
    open_ticks: dict[int, dict[int, HeldWindow]] = field(default_factory=dict)
    judged_tick: int = -1
    last_heard_monotonic: float = 0.0
    layout: Layout | None = None


class JobTable:
    """Moments are on our monotonic clock; only the ends of windows are on the nodes' clocks."""

    def __init__(self, grace_seconds: float = 1.0, forget_after_seconds: float = 60.0) -> None:
        self._grace_seconds = grace_seconds
        self._forget_after_seconds = forget_after_seconds
        self._jobs: dict[str, Job] = {}
        self._restarted: set[str] = set()
        self._swept_monotonic = 0.0
        self._clocks = NodeClocks()
        self._epoch = 0

    @property
    def jobs(self) -> dict[str, Job]:
        return self._jobs

    def accept(self, windows: Iterable[HeldWindow], now: float) -> None:
        seen, shift_nanos = ("", 0), 0
        for window in windows:
            # A message has windows of one node with the same end.
            if seen != (seen := (window.who.node, window.end_unix_nanos)):
                shift_nanos = self._shift_nanos(window, now)
            self._accept(window, now, shift_nanos)

    def _shift_nanos(self, window: HeldWindow, now: float) -> int:
        end = window.end_unix_nanos / 1e9
        shift = self._clocks.shift(window.who.node, end, window.window_seconds, now)
        if self._clocks.epoch != self._epoch:
            self._epoch = self._clocks.epoch
            for job in self._jobs.values():
                job.judged_tick = -1
                job.open_ticks.clear()
        return round(shift * 1e9)

    def _accept(self, window: HeldWindow, now: float, shift_nanos: int) -> None:
        who = window.who
        rank = who.rank
        job = self._jobs.get(who.job) or self._new_job(who.job)
        if job is None:
            return
        if job.incarnations.get(rank) is not who.incarnation and not self._meet(job, who):
            return
        if job.departed:
            job.departed.pop(rank, None)
        job.world_size = who.world_size
        job.latest[rank] = window
        window.heard_monotonic = job.last_heard_monotonic = now
        tick = round((window.end_unix_nanos - shift_nanos) / TICK_NANOS)
        if tick <= job.judged_tick:
            return
        open_tick = job.open_ticks.get(tick)
        if open_tick is None:
            open_tick = job.open_ticks[tick] = {}
            if len(job.open_ticks) > OPEN_TICKS:
                del job.open_ticks[min(job.open_ticks)]
        open_tick.setdefault(rank, window)

    def _meet(self, job: Job, who: RankSeen) -> bool:
        """Register a process that is new for this rank or was registered before; False if its windows are refused."""
        if not 0 <= who.rank < min(who.world_size, RANKS_PER_JOB):
            return False
        known = job.incarnations.get(who.rank)
        if known is not None and known != who.incarnation:
            if known[2] > who.incarnation[2] and known[0] == who.incarnation[0]:
                return False  # late windows of the process that this one replaced
            self._restart(job)
        elif known is None and job.incarnations and who.world_size != job.world_size:
            # One process that claims another size must not make the whole job look incomplete.
            return False
        job.incarnations[who.rank] = who.incarnation
        return True

    def _new_job(self, name: str) -> Job | None:
        if len(self._jobs) >= MAX_JOBS:
            return None
        job = self._jobs[name] = Job(name)
        return job

    def _restart(self, job: Job) -> None:
        job.incarnations.clear()
        job.latest.clear()
        job.departed.clear()
        job.open_ticks.clear()
        self._restarted.add(job.name)

    def depart(self, identities: Iterable[identity_pb2.RankIdentity]) -> None:
        for identity in identities:
            job = self._jobs.get(identity.job)
            if job is not None and job.incarnations.get(identity.rank, ("", 0, 0))[1:] == (
                identity.pid,
                identity.incarnation,
            ):
                job.departed[identity.rank] = identity.node
                job.latest.pop(identity.rank, None)

    def take_restarted(self) -> set[str]:
        """Jobs whose processes were replaced since the last call."""
        restarted, self._restarted = self._restarted, set()
        return restarted

    def take_ended(self, now: float) -> list[str]:
        """Remove and return jobs whose ranks have all ended, or that have been silent for long. A rank that has been
        silent for long is removed too: otherwise invented ranks would fill the memory."""
        if now - self._swept_monotonic > self._forget_after_seconds / 4:
            self._swept_monotonic = now
            for job in self._jobs.values():
                self._sweep(job, now - self._forget_after_seconds)
        ended = [
            job.name
            for job in self._jobs.values()
            if not job.latest or now - job.last_heard_monotonic > self._forget_after_seconds
        ]
        for name in ended:
            del self._jobs[name]
        return ended

    def _sweep(self, job: Job, deadline: float) -> None:
        silent = [rank for rank, window in job.latest.items() if window.heard_monotonic < deadline]
        for rank in silent:
            del job.latest[rank]

    def take_ready(self, now: float) -> dict[str, JobWindow]:
        """For each job the oldest tick that is complete, or whose grace period is over."""
        ready: dict[str, Tick] = {}
        shifts = self._clocks.shifts
        for job in self._jobs.values():
            tick = self._ready_tick(job, now)
            if tick is None:
                continue
            windows = job.open_ticks.pop(tick)
            job.open_ticks = {later: kept for later, kept in job.open_ticks.items() if later > tick}
            job.judged_tick = tick
            ready[job.name] = Tick(windows, job.world_size, tuple(sorted(job.departed)), job.layout, shifts)
        windows_ready = job_windows(ready)
        for name, judged in ready.items():
            self._jobs[name].layout = judged.layout
        return windows_ready

    def _ready_tick(self, job: Job, now: float) -> int | None:
        if not job.open_ticks:
            return None
        tick = min(job.open_ticks)
        expected = job.world_size - len(job.departed)
        windows = job.open_ticks[tick]
        complete = len(windows) >= expected
        late_seconds = now - next(iter(windows.values())).heard_monotonic
        # While windows of the job still arrive, the missing ones may be queued: reading what a large fleet sends at one
        # border takes a while.
        quiet_seconds = now - job.last_heard_monotonic
        overdue = late_seconds > self._grace_seconds and quiet_seconds > QUIET_SECONDS
        return tick if complete or overdue or late_seconds > MAX_GRACE_SECONDS * self._grace_seconds else None
