"""Recordings of one rank's stacks: starting and reaping py-spy, and the summary of what it recorded."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from rankscope.analysis.profiles.frames import Frame, Stack, is_user_code
from rankscope.analysis.profiles.phases import phase_of
from rankscope.daemon import procfs
from rankscope.daemon.samples import FrameCount, Problem, RankProcess, Recording, Span, StackSample
from rankscope.daemon.stacks import pyspy
from rankscope.daemon.stacks.device_waits import DeviceWaits
from rankscope.daemon.stacks.pyspy_output import parse_errors, parse_recording
from rankscope.daemon.stacks.sampling_budget import Plan, back_off_seconds

MAX_FRAMES: Final = 64
# Frames of the program's own source come first: its author can change them. Some library frames stay in any case: they
# show what the program waits for.
MAX_LIBRARY_FRAMES: Final = 16
MAX_ERRORS_RATIO: Final = 0.5
# py-spy randomises the pauses between its samples, and a busy machine stretches them.
OVERSTAY_FACTOR: Final = 2.0
OVERSTAY_SECONDS: Final = 3.0
MAX_RECORDINGS: Final = 16
# What recordings of a rank may take: the CPU time of one, which is ten times that of a process with 200 threads, and on
# average twice the budget of a rank. The rest of the budget is for the other ranks.
MAX_CPU_SECONDS: Final = 2.0
RANK_CORE_RATIO: Final = 0.02
# One recording in so long may cost more without a pause after it: py-spy has been seen to take 2 s of CPU time on a
# process that was importing torch, and a few milliseconds a sample from then on.
FORGIVEN_SECONDS: Final = 600.0
# Problems that do not go away by themselves; anything else may have been an accident.
LASTING_KINDS: Final = frozenset({"permission", "threads", "stuck", "blocked"})


def summarise(stacks: Mapping[Stack, int], errors: int, span: Span) -> StackSample:
    phase_counts: Counter[str] = Counter()
    inclusive: Counter[Frame] = Counter()
    own: Counter[Frame] = Counter()
    phases_of_frame: dict[Frame, Counter[str]] = {}
    for stack, count in stacks.items():
        phase = phase_of(stack)
        phase_counts[phase] += count
        for frame in set(stack):  # once, however deep the recursion
            inclusive[frame] += count
            phases_of_frame.setdefault(frame, Counter())[phase] += count
        for frame in {*stack[:1], *islice(filter(is_user_code, stack), 1)}:
            own[frame] += count
    counts = [
        FrameCount(frame, total, own[frame], phases_of_frame[frame].most_common(1)[0][0])
        for frame, total in inclusive.items()
    ]
    return StackSample(
        span=span,
        samples=sum(stacks.values()),
        errors=errors,
        phase_counts=dict(phase_counts),
        frames=_largest(counts),
        distinct_stacks=len(stacks),
    )


def _largest(counts: list[FrameCount]) -> tuple[FrameCount, ...]:
    if len(counts) > MAX_FRAMES:
        own = sorted((count for count in counts if is_user_code(count.frame)), key=_weight)
        library = sorted((count for count in counts if not is_user_code(count.frame)), key=_own_weight)
        own_kept = max(MAX_FRAMES - MAX_LIBRARY_FRAMES, MAX_FRAMES - len(library))
        counts = [*own[:own_kept], *library[: MAX_FRAMES - min(len(own), own_kept)]]
    return tuple(sorted(counts, key=_weight))


def _weight(count: FrameCount) -> tuple[int, int, str, int]:
    return (-count.inclusive, -count.own, count.frame.file, count.frame.line)


def _own_weight(count: FrameCount) -> tuple[int, int, str, int]:
    return (-count.own, -count.inclusive, count.frame.file, count.frame.line)


@dataclass(frozen=True)
class _Running:
    child: pyspy.Child
    started_seconds: float
    kill_at_seconds: float
    period_nanos: int  # that a sample stands for


@dataclass(frozen=True)
class _Ended:
    stacks: Counter[Stack]
    errors: int
    span: Span


class RankRecorder:
    """Never blocks. `start` it only when it `is_ready`: not while it runs, nor while it backs off."""

    def __init__(
        self,
        rank: RankProcess,
        py_spy: Path,
        killed: pyspy.KilledChildren,
        proc_root: Path = Path("/proc"),
        unix_nanos: Callable[[], int] = time.time_ns,
        keep: Callable[[Recording], None] = lambda recording: None,
    ) -> None:
        """`keep` gets every recording that has samples, as soon as it ends. It must not block."""
        self.rank = rank
        self._keep = keep
        self.due_seconds = -math.inf  # on the clock that `start` and `poll` are given
        self._py_spy = py_spy
        self._killed = killed
        self._process_folder = f"{proc_root}/{rank.pid}"
        self._device_waits = DeviceWaits(rank.pid, proc_root)
        self._unix_nanos = unix_nanos
        self._pids = frozenset((rank.pid, *rank.namespace_pids))
        self._running: _Running | None = None
        self._not_before_seconds = -math.inf
        self._forgiven_at_seconds = -math.inf
        self._plan: Plan | None = None
        self._ended: deque[_Ended] = deque(maxlen=MAX_RECORDINGS)
        self._failures = 0
        self._problem: Problem | None = None

    @property
    def is_running(self) -> bool:
        return self._running is not None

    @property
    def running_cpu_seconds(self) -> float:
        """Of the recording in progress."""
        return self._running.child.cpu_seconds if self._running is not None else 0.0

    def is_ready(self, now_seconds: float) -> bool:
        is_free = self._running is None and not self._killed.hold(self.rank)
        return is_free and self._not_before_seconds <= now_seconds

    def start(self, plan: Plan, now_seconds: float, due_seconds: float) -> None:
        """`due_seconds` is when the next recording is due."""
        self._plan, self.due_seconds = plan, due_seconds
        if not self._py_spy.is_file():
            self._problem = pyspy.missing(self._py_spy)
            return
        problem = self._killed.objection(self.rank) or pyspy.objection(self.rank, self._process_folder)
        if problem is not None:
            self._fail(problem, now_seconds)
            return
        try:
            child = pyspy.Child(pyspy.record_command(self._py_spy, self.rank.pid, plan.seconds, plan.rate_hz))
        except OSError as error:
            problem = Problem("stacks", "unstartable", f"{self.rank}: py-spy could not be started: {error}")
            self._fail(problem, now_seconds)
            return
        kill_at_seconds = now_seconds + plan.seconds * OVERSTAY_FACTOR + OVERSTAY_SECONDS
        self._running = _Running(child, now_seconds, kill_at_seconds, round(1e9 / plan.rate_hz))

    def poll(self, now_seconds: float) -> float:
        """Reap the child if it has ended; kill it if it takes too long or costs too much. Returns the CPU seconds of an
        ended child."""
        running = self._running
        if running is None:
            return 0.0
        ended = running.child.poll()
        if ended is not None:
            self._running = None
            self._pause_for_cost(running.started_seconds, ended.cpu_seconds, now_seconds)
            self._read_output(running, ended, now_seconds)
            return ended.cpu_seconds
        is_expensive = running.child.cpu_seconds > MAX_CPU_SECONDS
        if is_expensive or now_seconds >= running.kill_at_seconds:
            self.close()
            problem = pyspy.explain_failure(self.rank, None, "", self._is_alive())
            if is_expensive and problem.kind == "timeout":
                text = f"{self.rank}: py-spy took {running.child.cpu_seconds:.1f} s of CPU time (deep stacks?)"
                problem = Problem("stacks", "expensive", f"{text}; it is sampled rarely if that happens again")
            self._fail(problem, now_seconds)
            self._pause_for_cost(now_seconds, running.child.cpu_seconds, now_seconds)
        return 0.0

    def take(self) -> StackSample | Problem | None:
        """One sample of the recordings that ended since the last call. Without any, why there is none, or None if one
        is in progress."""
        ended = list(self._ended)
        self._ended.clear()
        if not ended:
            problem = self._problem
            if problem is not None and problem.kind == "died":
                self._problem = None
            return self._killed.objection(self.rank) or problem
        stacks: Counter[Stack] = Counter()
        for recording in ended:
            stacks.update(recording.stacks)
        span = Span(ended[0].span.start_unix_nanos, ended[-1].span.end_unix_nanos)
        return summarise(stacks, sum(recording.errors for recording in ended), span)

    def close(self) -> None:
        """Kill the child, if there is one."""
        running, self._running = self._running, None
        if running is not None:
            self._killed.kill(running.child, self.rank)

    def _read_output(self, running: _Running, ended: pyspy.Ended, now_seconds: float) -> None:
        log = running.child.log
        if ended.status != 0:
            self._fail(pyspy.explain_failure(self.rank, ended, log, self._is_alive()), now_seconds)
            return
        engine_threads = partial(pyspy.engine_threads, self._process_folder)
        recording = parse_recording(running.child.output, self._pids, engine_threads)
        stacks = self._device_waits.mark(recording.stacks)
        samples = stacks.total()
        errors = parse_errors(log) + recording.garbled_lines
        if samples:
            # Only its end is read from the wall clock, which may have been set since its start.
            end = self._unix_nanos()
            span = Span(end - round((now_seconds - running.started_seconds) * 1e9), end)
            self._ended.append(_Ended(stacks, errors, span))
            self._keep(Recording(self.rank.job, self.rank.rank, span, running.period_nanos, stacks))
        if errors <= MAX_ERRORS_RATIO * (samples + errors) and samples:
            self._failures, self._problem = 0, None
        elif not self._is_alive():
            self._fail(pyspy.explain_failure(self.rank, ended, log, False), now_seconds)
        else:
            what = f"could not read {errors} of {samples + errors} samples" if errors else "saw no training thread"
            text = f"{self.rank}: py-spy {what}; it is sampled less often until that gets better"
            self._fail(Problem("stacks", "unreadable", text), now_seconds)

    def _pause_for_cost(self, since_seconds: float, cpu_seconds: float, now_seconds: float) -> None:
        """A rank that costs far more than others is recorded less often, so that others are not."""
        assert self._plan is not None
        pause_seconds = cpu_seconds / RANK_CORE_RATIO
        if pause_seconds > self._plan.period_seconds and now_seconds >= self._forgiven_at_seconds + FORGIVEN_SECONDS:
            self._forgiven_at_seconds, pause_seconds = now_seconds, self._plan.period_seconds
        self._not_before_seconds = max(self._not_before_seconds, since_seconds + pause_seconds)

    def _fail(self, problem: Problem, now_seconds: float) -> None:
        assert self._plan is not None
        self._problem = problem
        self._failures += 1
        pause_seconds = back_off_seconds(self._plan, self._failures, problem.kind in LASTING_KINDS)
        self._not_before_seconds = max(self._not_before_seconds, now_seconds + pause_seconds)

    def _is_alive(self) -> bool:
        return procfs.is_alive(self._process_folder, self.rank.start_ticks)
