"""Windows in, verdicts out: the job table, the rules, and the listeners to their verdicts."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.stats.robust import median_or_nan
from rankscope.analysis.step_graph.step_breakdown import StepBreakdown
from rankscope.analysis.step_graph.step_picture import StepPicture
from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import FINDINGS, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import JobWindow, RankColumns
from rankscope.common.rank_selection import Suspected
from rankscope.operator.correlation.daemon_windows import HeldWindow, HeldWindows
from rankscope.operator.correlation.job_table import JobTable
from rankscope.v1 import identity_pb2, window_pb2
from rankscope.v1.window_pb2 import RankWindow

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2


@dataclass(frozen=True)
class JobState:
    """What is known of a job after its latest tick."""

    job: str
    world_size: int
    verdict: Verdict
    since_unix_seconds: float  # when the verdict got its kind, severity and culprits
    evaluated_unix_seconds: float
    ranks_seen: int
    step_seconds: float | None
    mfu_ratio: float | None
    exposed_communication_ratio: float | None
    windows: Sequence[window_pb2.RankWindow]  # in the order of ranks; each is parsed on access
    window_end_unix_seconds: float = 0.0  # of the evaluated windows; `windows` may be newer
    restarts: int = 0  # that were seen: all processes were replaced
    picture: StepPicture | None = None  # a step that explains the verdict, where the critical path is judged
    breakdown: StepBreakdown | None = None  # None where the job is not judged by the critical path

    @property
    def identities(self) -> Mapping[int, identity_pb2.RankIdentity]:
        """Identities by rank: far cheaper than the windows."""
        if isinstance(self.windows, HeldWindows):
            return self.windows.identities
        return {window.identity.rank: window.identity for window in self.windows}

    @property
    def program(self) -> identity_pb2.Program:
        """What the job runs and for whom, as its lowest rank says."""
        lowest = self.windows.lowest if isinstance(self.windows, HeldWindows) else None
        if lowest is None and self.identities:
            lowest = self.identities[min(self.identities)]
        return identity_pb2.Program() if lowest is None else lowest.program


Listener = Callable[[tuple[JobState, ...]], None]


class Correlator:
    """Thread-safe. `take` may be called from any thread; `start` runs the ticks in a thread of its own. `policy_of`
    returns a job's own policy, or None for `policy`. It is called at every tick and must be quick."""

    def __init__(
        self,
        policy: Policy = DEFAULT_POLICY,
        clock: Callable[[], float] = time.time,
        policy_of: Callable[[str], Policy | None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._table = JobTable()
        self._fleet = FleetDetector(policy, policy_of)
        self._states: dict[str, JobState] = {}
        self._restarts: Counter[str] = Counter()
        self._left_out: set[str] = set()
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, windows: Iterable[HeldWindow], departed: Iterable[identity_pb2.RankIdentity] = ()) -> None:
        with self._lock:
            self._table.accept(windows, self._monotonic())
            self._table.depart(departed)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with all jobs after each evaluation; the result ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @property
    def states(self) -> tuple[JobState, ...]:
        return tuple(self._states.values())

    def tick(self) -> bool:
        """Evaluate what is ready; True if anything was. One call at a time; windows may arrive meanwhile."""
        with self._lock:
            now, moment = self._clock(), self._monotonic()
            restarted = self._table.take_restarted()
            ended = self._table.take_ended(moment)
            ready = {job: window for job, window in self._table.take_ready(moment).items() if job not in self._left_out}
            latest = {job: HeldWindows(self._table.jobs[job].latest.copy()) for job in ready}
        for job in (*restarted, *ended):
            self._fleet.forget(job)
            self._left_out.discard(job)
        self._restarts.update(restarted)
        for job in ended:
            self._states.pop(job, None)
            self._restarts.pop(job, None)
        for job, verdict in self._judge(ready).items():
            self._states[job] = self._state(job, ready[job], verdict, latest[job], now)
        if ready or ended:
            for listener in list(self._listeners):
                self._tell(listener)
        return bool(ready)

    def _judge(self, ready: dict[str, JobWindow]) -> dict[str, Verdict]:
        """A job whose windows cannot be evaluated does not affect the others: it is left out until it ends or
        restarts. The others have counted one window twice by then."""
        try:
            return self._fleet.evaluate(ready)
        except Exception:
            log.exception("%d jobs cannot be judged together; each is judged by itself", len(ready))
        verdicts = {}
        for job, window in ready.items():
            try:
                verdicts.update(self._fleet.evaluate({job: window}))
            except Exception:
                log.exception("%s cannot be judged, and is left out", job)
                self._left_out.add(job)
                self._fleet.forget(job)
                self._states.pop(job, None)
        return verdicts

    def _tell(self, listener: Listener) -> None:
        try:
            listener(self.states)
        except Exception:
            log.exception("a listener failed")

    def _state(self, job: str, window: JobWindow, verdict: Verdict, latest: HeldWindows, now: float) -> JobState:
        before = self._states.get(job)
        same = before is not None and _gist(before.verdict) == _gist(verdict)
        columns, breakdown = window.columns, self._fleet.breakdown(job)
        # Sums of waiting leave out the transfer itself, and count what was passed on several times.
        exposed = _mean(columns.wait_seconds / columns.step_seconds) if breakdown is None else breakdown.exposed_ratio
        state = JobState(
            job=job,
            world_size=window.world_size,
            verdict=verdict,
            since_unix_seconds=before.since_unix_seconds if before and same else now,
            evaluated_unix_seconds=now,
            ranks_seen=len(columns),
            step_seconds=_known(median_or_nan(columns.step_seconds)),
            mfu_ratio=_known(median_or_nan(columns.mfu_ratio)),
            exposed_communication_ratio=_known(exposed),
            windows=latest.with_compared(_compared(columns)),
            window_end_unix_seconds=window.end_unix_seconds,
            restarts=self._restarts[job],
            picture=self._fleet.picture(job),
            breakdown=breakdown,
        )
        if before is not None and state.step_seconds is None:
            # A tick without a finished step has no pace; the last known one is kept.
            state = replace(
                state,
                step_seconds=before.step_seconds,
                mfu_ratio=before.mfu_ratio,
                exposed_communication_ratio=before.exposed_communication_ratio,
            )
        return state

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rankscope-correlator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(TICK_SECONDS):
            self.tick()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()


def _gist(verdict: Verdict) -> tuple[Kind, Severity, tuple[int, ...], int | None]:
    return (verdict.kind, verdict.severity, verdict.culprits, verdict.stage)


def _compared(columns: RankColumns) -> dict[int, tuple[float, float]]:
    """Of ranks that are timed on a device; other windows have these figures themselves."""
    known = ~np.isnan(columns.host_seconds) & ~np.isnan(columns.self_seconds)
    if not known.any():
        return {}
    # With what long steps took: people expect the parts of a step to add up.
    late, long = np.nan_to_num(columns.late_seconds[known]), np.nan_to_num(columns.long_seconds[known])
    own, waited = columns.self_seconds[known] + late, columns.wait_seconds[known] + np.maximum(long - late, 0.0)
    pairs = zip(own.tolist(), waited.tolist(), strict=True)
    return dict(zip(columns.rank[known].tolist(), pairs, strict=True))


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.sum()) / len(known) if len(known) else float("nan")


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


class LostSeconds:
    """GPU time that findings cost a job over its whole life, by the kind of the finding; a verdict knows only its own.
    A listener. The sums of a job never decrease while the job exists, including restarts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, dict[Kind, float]] = {}
        self._standing: dict[str, float] = {}

    def __call__(self, states: tuple[JobState, ...]) -> None:
        with self._lock:
            present = {state.job for state in states}
            for job in self._totals.keys() - present:
                del self._totals[job]
                self._standing.pop(job, None)
            for state in states:
                self._count(state.job, state.verdict)

    def _count(self, job: str, verdict: Verdict) -> None:
        before, lost = self._standing.get(job, 0.0), verdict.lost_gpu_seconds or 0.0
        # A smaller value is the loss of another finding, from its beginning.
        grown = lost - before if lost >= before else lost
        totals = self._totals.setdefault(job, dict.fromkeys(FINDINGS, 0.0))
        if verdict.kind in totals:
            totals[verdict.kind] += grown
        self._standing[job] = lost

    def of(self, job: str) -> float:
        return sum(self.by_verdict(job).values())

    def by_verdict(self, job: str) -> Mapping[Kind, float]:
        """Of every kind of finding: a counter must begin at 0, or its first increase is not seen."""
        with self._lock:
            return dict(self._totals.get(job, dict.fromkeys(FINDINGS, 0.0)))


# A few ranks are enough for a capture: hundreds of accused ranks are a job-wide problem, of which these are samples.
MAX_ACCUSED = 7
# If no rank is accused, this many typical ranks are recorded, so that their traces can be joined.
SAMPLES = 2


def ranks_to_capture(state: JobState, named: Sequence[int] = ()) -> tuple[list[int], tuple[int, ...]]:
    """The accused, `named` or the culprits that report, and all to record: the accused and a healthy peer, or a few
    typical ranks; none where no rank reports."""
    suspected = suspects(state)
    accused = list(named or [rank for rank in suspected.culprits if rank in state.identities])[:MAX_ACCUSED]
    peers = [rank for rank in suspected.peers if rank not in accused]
    return accused, tuple(sorted([*accused, *peers[: 1 if accused else SAMPLES]]))


def suspects(state: JobState) -> Suspected:
    """Culprits, and peers, the most typical first. Without culprits if no rank is to blame. The peers of a slow stage
    are ranks of other stages."""
    culprits = state.verdict.culprits if state.verdict.kind.is_finding else ()
    windows = {window.identity.rank: window for window in state.windows}
    accused = [windows[rank] for rank in culprits if rank in windows]
    others = [window for rank, window in windows.items() if rank not in culprits]
    if accused and state.verdict.stage is None:
        others = [window for window in others if _stage(window) == _stage(accused[0])]
    known = sorted((window for window in others if window.HasField("self_seconds")), key=lambda w: w.self_seconds.mean)
    middle = len(known) // 2
    typical = [*known[middle:], *reversed(known[:middle])] if known else others
    return Suspected(culprits, tuple(window.identity.rank for window in typical), state.verdict.reason)


def _stage(window: RankWindow) -> int | None:
    coordinates = window.identity.coordinates
    return coordinates.pipeline if coordinates.HasField("pipeline") else None
