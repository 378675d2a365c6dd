"""Plays one cell of the matrix: a real job, a daemon that is told nothing of its fault, and what it says over time."""

from __future__ import annotations

import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from statistics import median

from rankscope.analysis.verdicts.verdict import Confidence, Kind, Verdict
from rankscope.cli.standalone import Standalone
from rankscope.daemon.config import resolve
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1 import window_pb2
from tests.frameworks.job_process import DELAY_SECONDS, RANKS, SLOW_RANK, FrameworkJob, framework_job

NO_FAULT = "none"
DDP_TIMERS = "ddp timers"
# Ticks (one per window) that say something, before the fault and after its alarm.
SETTLED_TICKS = 3
HEALTHY_TICKS = 10
TICKS_AFTER_ALARM = 2
# A busy machine gives few stacks; the cause may be complete that many ticks later.
TICKS_FOR_CAUSE = 10
# Where wait is not measured, stacks need two stretches of five windows.
BLIND_TICKS = 15
# Limits, not expectations.
SETTLE_SECONDS = 300.0
ALARM_SECONDS = 300.0


@dataclass(frozen=True)
class Heard:
    """One tick: the verdict and every rank's window."""

    at_monotonic: float
    verdict: Verdict
    windows: tuple[window_pb2.RankWindow, ...]

    @property
    def has_steps(self) -> bool:
        return sum(bool(window.steps) and window.HasField("step_seconds") for window in self.windows) == RANKS

    @property
    def is_judged(self) -> bool:
        """By steps: stacks alone may say something before every rank has made some, with low confidence."""
        is_sure = self.verdict.confidence is Confidence.HIGH and self.verdict.kind is not Kind.INSUFFICIENT_DATA
        return is_sure and self.has_steps

    def __str__(self) -> str:
        verdict = self.verdict
        who = f" {list(verdict.culprits)}" if verdict.culprits else ""
        stage = "" if verdict.stage is None else f" stage {verdict.stage}"
        impact = "" if verdict.impact_ratio is None else f", costs {verdict.impact_ratio:.1%}"
        frames = ", ".join(f"{PurePath(f.file).name}:{f.line} {f.function} {f.share:.0%}" for f in verdict.cause.frames)
        cause = f"; {verdict.cause.phase}: {frames}" if verdict.kind.is_finding else ""
        return f"{verdict.kind.value} {verdict.severity.value}{who}{stage}{impact}{cause} ({verdict.reason})"


@dataclass(frozen=True)
class RankFigures:
    """Over the windows of a stretch, in seconds a step; None where nothing was measured. A step is the mean of all,
    self and wait are medians of the windows."""

    rank: int
    step_seconds: float | None
    self_seconds: float | None
    wait_seconds: float | None

    def __str__(self) -> str:
        shown = [f"{name} {_ms(getattr(self, f'{name}_seconds'))}" for name in ("step", "self", "wait")]
        return f"rank {self.rank}: {', '.join(shown)}"


@dataclass(frozen=True)
class Stretch:
    """Ticks of one state of the job: healthy, or with its fault."""

    ticks: tuple[Heard, ...]
    own_seconds: tuple[float | None, ...]  # a step of each rank by its own clock: the same steps

    @property
    def own_step_seconds(self) -> float | None:
        return self.own_seconds[0]

    @property
    def ranks(self) -> tuple[RankFigures, ...]:
        return tuple(self._figures(rank) for rank in range(RANKS))

    def step_seconds(self, rank: int) -> float | None:
        """Mean over all steps that the windows of this stretch report."""
        windows = [w for w in self._windows(rank) if w.HasField("step_seconds") and w.steps]
        steps = sum(window.steps for window in windows)
        return sum(window.step_seconds.mean * window.steps for window in windows) / steps if steps else None

    def _windows(self, rank: int) -> list[window_pb2.RankWindow]:
        return [window for tick in self.ticks for window in tick.windows if window.identity.rank == rank]

    def _figures(self, rank: int) -> RankFigures:
        windows = self._windows(rank)

        def middle(name: str) -> float | None:
            values = [getattr(window, name).mean for window in windows if window.HasField(name)]
            return median(values) if values else None

        return RankFigures(rank, self.step_seconds(rank), middle("self_seconds"), middle("wait_seconds"))


@dataclass(frozen=True)
class PlayedCell:
    fault: str
    heard: tuple[Heard, ...]
    healthy: Stretch
    faulty: Stretch | None
    fault_at_monotonic: float | None
    alarm_at_monotonic: float | None

    @property
    def last(self) -> Verdict:
        return self.heard[-1].verdict

    @property
    def seconds_to_alarm(self) -> float | None:
        if self.fault_at_monotonic is None or self.alarm_at_monotonic is None:
            return None
        return self.alarm_at_monotonic - self.fault_at_monotonic

    @property
    def true_impact_ratios(self) -> tuple[float, float] | None:
        """Bounds of what the fault costs by the job's own clock: what it adds to a step, and the step with it against
        the step before. They differ where the machine became more or less busy meanwhile."""
        before, after = self.healthy.own_step_seconds, self.faulty.own_step_seconds if self.faulty else None
        if not before or not after:
            return None
        added, grown = DELAY_SECONDS / after, max(0.0, (after - before) / after)
        return min(added, grown), max(added, grown)

    @property
    def wait_sources(self) -> tuple[str, ...]:
        """Where the wait comes from, by name, over all windows."""
        windows = [window for tick in self.heard for window in tick.windows]
        return tuple(sorted({name for window in windows if (name := wait_source(window))}))

    def __str__(self) -> str:
        """What a failed assertion has to show."""
        began = self.fault_at_monotonic or self.heard[0].at_monotonic
        lines = [f"fault {self.fault}, alarm after {_seconds(self.seconds_to_alarm)}, load {_load()}"]
        before = None
        for tick in self.heard:
            text = str(tick)
            if text.split("(")[0] != before:
                lines.append(f"  {tick.at_monotonic - began:+6.1f} s {text}")
            before = text.split("(")[0]
        for name, stretch in (("healthy", self.healthy), ("faulty", self.faulty)):
            if stretch is not None:
                lines.append(f"  {name}, by the job's own clock {_ms(stretch.own_step_seconds)} a step:")
                lines += [f"    {figures}" for figures in stretch.ranks]
        if self.true_impact_ratios is not None:
            lines.append("  true impact {:.1%} to {:.1%}".format(*self.true_impact_ratios))
        lines.append(f"  source of wait: {', '.join(self.wait_sources) or 'none'}")
        problems = {problem for tick in self.heard for window in tick.windows for problem in window.problems}
        lines += [f"  problem: {problem}" for problem in sorted(problems)]
        return "\n".join(lines)


def wait_source(window: window_pb2.RankWindow) -> str:
    """Empty where wait is not measured."""
    return window.wait_source


@dataclass
class _Listener:
    """Called by the correlator's thread."""

    job: FrameworkJob
    heard: list[Heard] = field(default_factory=list)
    step_ends: list[list[float]] = field(default_factory=lambda: [[] for _ in range(RANKS)])  # by their own clocks
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, states: tuple[JobState, ...]) -> None:
        for state in states:
            if state.job == self.job.name:
                tick = Heard(time.monotonic(), state.verdict, tuple(state.windows))
                with self.lock:
                    self.heard.append(tick)
                    self._read_step_ends()

    def ticks(self) -> list[Heard]:
        with self.lock:
            return list(self.heard)

    def stretch(self, ticks: list[Heard]) -> Stretch:
        """With the ranks' own measurement of the steps that the ticks' windows report."""
        _wait(self.job, SETTLE_SECONDS, lambda: self._have_ended(ticks))
        return Stretch(tuple(ticks), tuple(self._own(rank, ticks) for rank in range(RANKS)))

    def _have_ended(self, ticks: list[Heard]) -> bool:
        """Also by the ranks' own clocks."""
        with self.lock:
            self._read_step_ends()
        windows = [window for tick in ticks for window in tick.windows]
        return all(window.last_step_unix_nanos * 1e-9 <= self.step_ends[window.identity.rank][-1] for window in windows)

    def _read_step_ends(self) -> None:
        for rank, ends in enumerate(self.step_ends):
            ends += self.job.step_ends(rank, len(ends))

    def _own(self, rank: int, ticks: list[Heard]) -> float | None:
        """A step ends for the job after it did for the probe: much later if the machine pauses in between. So steps are
        matched one by one, and not by the borders of windows. A step with DDP's timers is reported with the next."""
        windows = [window for tick in ticks for window in tick.windows if window.identity.rank == rank]
        held_back = any(DDP_TIMERS in wait_source(window) for window in windows)
        ends, seconds, steps = self.step_ends[rank], 0.0, 0
        for window in windows:
            last = bisect_left(ends, window.last_step_unix_nanos * 1e-9) - held_back
            first = max(0, last - window.steps)
            seconds += ends[last] - ends[first]
            steps += last - first
        return seconds / steps if steps else None


def play(
    python: Path,
    script: str,
    arguments: tuple[str, ...],
    fault: str,
    *,
    is_blind: bool = False,
    is_asynchronous: bool = False,
    slow_rank: int = SLOW_RANK,
    is_complete: Callable[[Verdict], bool] = lambda verdict: True,
) -> PlayedCell:
    """Raises JobError if the job does not run; a fault that is not found is the caller's to see. After the alarm the
    job goes on for a few ticks, and then until `is_complete`, but not for long. A job whose wait cannot be measured
    (`is_blind`) is watched for a number of ticks, as no alarm need come."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-frameworks-"))
        config = resolve({"socket": f"{folder}/daemon.sock", "metrics_listen": "none", "captures": False}, {}).config
        # The tests run in the same process; the daemon's budget is charged for the daemon's thread.
        standalone = stack.enter_context(Standalone(config, own_cpu_seconds=time.thread_time))
        job = stack.enter_context(framework_job(python, script, arguments, fault, slow_rank))
        listener = _Listener(job)
        stack.callback(standalone.correlator.listen(listener))
        job.wait_until_training()

        def good(since: int = 0) -> list[Heard]:
            return [tick for tick in listener.ticks()[since:] if (tick.has_steps if is_blind else tick.is_judged)]

        settled = HEALTHY_TICKS if fault == NO_FAULT or is_blind else SETTLED_TICKS
        _wait(job, SETTLE_SECONDS, lambda: len(good()) >= settled)
        before = listener.ticks()
        healthy = listener.stretch(good()[-settled:])
        if fault == NO_FAULT:
            return PlayedCell(fault, tuple(before), healthy, None, None, None)
        job.start_fault(is_asynchronous)
        fault_at, fault_at_unix = time.monotonic(), time.time()
        count = len(before)
        if is_blind:
            _wait(job, ALARM_SECONDS, lambda: len(good(count)) >= BLIND_TICKS)
        elif _wait(job, ALARM_SECONDS, lambda: any(tick.verdict.is_alarm for tick in good(count))):
            then = len(listener.ticks())
            _wait(job, ALARM_SECONDS, lambda: len(listener.ticks()) >= then + TICKS_AFTER_ALARM)
            _wait(
                job,
                ALARM_SECONDS,
                lambda: is_complete(listener.ticks()[-1].verdict) or len(listener.ticks()) >= then + TICKS_FOR_CAUSE,
            )
        inside = [tick for tick in good(count) if _begins(tick) > fault_at_unix]
        heard = listener.ticks()
        alarms = (tick.at_monotonic for tick in heard[count:] if tick.verdict.is_alarm)
        return PlayedCell(fault, tuple(heard), healthy, listener.stretch(inside), fault_at, next(alarms, None))


def _begins(tick: Heard) -> float:
    return min(window.start_unix_nanos for window in tick.windows) * 1e-9


def _wait(job: FrameworkJob, seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        job.ranks.check()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _ms(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1000:.1f} ms"


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def _load() -> str:
    return Path("/proc/loadavg").read_text().strip()
