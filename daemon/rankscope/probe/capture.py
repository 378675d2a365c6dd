"""Captures on request: starts and stops torch.profiler at step boundaries, on the training thread, for a daemon that
asks through the ring. A failure ends captures in this process, never the training and never the probe.

    IDLE ──command──▶ ARMED ──▶ SCHEDULED ──▶ WARMING_UP ──▶ RECORDING ──last window──▶ IDLE, the trace is handed over
                                    ▲                             │
                                    └───────── more windows ──────┘

Each state but OFF goes to IDLE when the capture is dropped or given up, and to OFF on a failure."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Callable, ClassVar, Optional, Tuple, Union

from . import ring_layout
from .capture_commands import Answer, Command, Handover, read_command, refusal
from .counters import dump_recorder
from .failure import complain, raised_by_a_signal_handler
from .profiler import (
    AfterStep,
    Profile,
    UserProfilers,
    memory_left_bytes,
    resident_bytes,
    sealed,
    timed_ns,
    write_windows,
)
from .ring import Ring
from .step_boundary import training_thread_id

KEEP_AT_EXIT_SECONDS = 0.5
# Stopping needs six times the memory that recording took, and the trace once more (measured, torch 2.13).
MEMORY_FACTOR = 8
MIN_MEMORY_BYTES = 256 << 20


class State(Enum):
    IDLE = "no capture"
    ARMED = "a command is accepted; the step to record from is not known yet"
    SCHEDULED = "the step to record from is known"
    WARMING_UP = "the profiler is prepared, and records from a known step"
    RECORDING = "the profiler records"
    OFF = "a capture failed, or this process is a fork: commands are ignored"


@dataclass(frozen=True)
class Windows:
    """The windows of a capture that are over. All of them stay in memory until the last one is over."""

    profiles: Tuple[Profile, ...] = ()
    steps: int = 0
    start_ns: int = 0  # spent starting profilers, that of the present window included
    stop_ns: int = 0
    deadline_ns: int = 0  # monotonic; from the first window on
    resident_limit_bytes: Optional[int] = None


@dataclass(frozen=True)
class Capture:
    """What all states of one capture share. Everything happens on the thread that took the command."""

    command: Command
    answer: Answer
    ring: Ring
    thread_id: int
    was_held: bool = False  # by a profiler of the user's own
    windows: Windows = field(default_factory=Windows)


@dataclass(frozen=True)
class Idle:
    state: ClassVar[State] = State.IDLE


@dataclass(frozen=True)
class Off:
    state: ClassVar[State] = State.OFF


@dataclass(frozen=True)
class Armed:
    state: ClassVar[State] = State.ARMED
    capture: Capture


@dataclass(frozen=True)
class Scheduled:
    state: ClassVar[State] = State.SCHEDULED
    capture: Capture
    due_step: int


@dataclass(frozen=True)
class WarmingUp:
    state: ClassVar[State] = State.WARMING_UP
    capture: Capture
    due_step: int
    profile: Profile


@dataclass(frozen=True)
class Recording:
    state: ClassVar[State] = State.RECORDING
    capture: Capture
    profile: Profile
    first_step: int
    stop_at_ns: int  # monotonic


Pending = Union[Armed, Scheduled, WarmingUp]
Present = Union[Idle, Off, Pending, Recording]
IDLE = Idle()


def profile_of(now: Present) -> Optional[Profile]:
    """A profiler that has to be stopped before anything else may use one."""
    return now.profile if isinstance(now, (WarmingUp, Recording)) else None


def capture_of(now: Present) -> Optional[Capture]:
    return None if isinstance(now, (Idle, Off)) else now.capture


def schedule(now: Armed, step: int, unix_ns: int) -> Union[Armed, Scheduled]:
    """SCHEDULED once the first step to record is known."""
    command = now.capture.command
    if command.start_step:
        # A warm-up comes before the step that was agreed on.
        if step + command.warmup_steps < command.start_step:
            return now
        start = max(step, command.start_step)
    else:
        if unix_ns < command.start_unix_ns:
            return now
        start = step + command.warmup_steps
    return Scheduled(now.capture, start + command.wait_steps)


def is_late(capture: Capture) -> bool:
    if capture.windows.profiles:
        return time.monotonic_ns() > capture.windows.deadline_ns
    return time.time_ns() > capture.command.give_up_unix_ns


class _AtThreadEnd:
    """Kept in a threading.local: collected by a thread that ends, while that can still stop its profiler."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __del__(self) -> None:
        self._action()


class Captures:
    """Made once in a process. `mark` identifies the last command that was looked at."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._users = UserProfilers(sys.modules["torch.autograd.profiler"], self._give_way)
        self._after_step = AfterStep(sys.modules["torch.autograd.profiler"].record_function)
        self.mark = bytes(4)
        self._recorder_mark = bytes(4)
        # A profiler is in the state before it is touched: whatever fails then, `_fail` finds and stops it.
        self._now: Present = IDLE
        self._of_thread = threading.local()
        self._handover = Handover()
        self._at_exit = False

    @property
    def state(self) -> State:
        return self._now.state

    @property
    def active(self) -> bool:
        """Whether `at_boundary` has to be called at every boundary, not only for a new command."""
        return self._now is not IDLE and self._now.state is not State.OFF

    def at_boundary(self, ring: Ring, step: int, is_inside_step: bool) -> None:
        """`step` steps have ended. `is_inside_step`: torch is still inside the optimizer's step."""
        try:
            mark = ring.command_mark()
            if mark != self.mark and not self._handover.is_busy:
                self.mark = mark
                self._take(ring, mark)
            if self._is_on_its_thread():
                self._at_the_end_of_the_step(step, is_inside_step)
        except Exception as error:
            self._fail(error)

    def hand_over_recorder(self, ring: Ring) -> None:
        """On the thread beside the training loop, while no step ends: hand the flight recorder over if a command asks
        for it. Captures go first, because both use the same answer."""
        mark = ring.command_mark()
        if mark == self._recorder_mark or self._handover.is_busy:
            return
        self._recorder_mark = mark
        command = read_command(ring, mark)
        if command is None or command.verb != ring_layout.VERB_RECORDER or time.time_ns() > command.give_up_unix_ns:
            return
        answer = Answer(ring, command.number)

        def fail(error: Exception) -> None:
            answer.report(ring_layout.PHASE_FAILED, "{}: {}".format(type(error).__name__, error))

        try:
            content = dump_recorder(self._torch)
            self._handover.start(ring, lambda: sealed(content), answer, "", fail)
        except Exception as error:
            fail(error)

    def _is_on_its_thread(self) -> bool:
        capture = capture_of(self._now)
        return capture is not None and threading.get_ident() == capture.thread_id

    def _at_the_end_of_the_step(self, step: int, is_inside_step: bool) -> None:
        after_step = self._after_step
        if after_step.is_waiting:  # since the boundary before this one: there is no such end here
            after_step.works = False
        if is_inside_step and after_step.works:
            after_step.then(lambda: self._guard(lambda: self._act(step)))
            return
        self._act(step)
        if is_inside_step and self.active:
            after_step.then(lambda: None)  # finds out whether there is an end to wait for

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._fail(error)

    def _take(self, ring: Ring, mark: bytes) -> None:
        """From IDLE to ARMED, or back on a drop."""
        command = read_command(ring, mark)
        if command is None or self._now.state is State.OFF:
            return
        current = capture_of(self._now)
        if command.verb == ring_layout.VERB_DROP:
            if current is not None and command.start_step == current.command.number and self._is_on_its_thread():
                self._end("cancelled")
            return
        if command.verb != ring_layout.VERB_CAPTURE or current is not None:
            return  # the first one wins; the answer's number shows the other daemon that its command was not taken
        answer = Answer(ring, command.number)
        here = threading.get_ident()
        wrong = refusal(command, time.time_ns())
        if wrong is None and here != training_thread_id():
            wrong = "steps end on a thread of autograd's own, where nothing else could be seen"
        if wrong is not None:
            answer.report(ring_layout.PHASE_FAILED, "the probe refused: " + wrong)
            return
        self._now = Armed(Capture(command, answer, ring, here))
        self._after_step.install()
        self._of_thread.end = _AtThreadEnd(self._thread_ends)
        if not self._at_exit:
            self._at_exit = True
            atexit.register(self._leave)
        answer.report(ring_layout.PHASE_ARMED)

    def _act(self, step: int) -> None:
        """At a boundary: what is due."""
        now = self._now
        if isinstance(now, (Idle, Off)) or self._is_capturing_a_graph():
            return
        if isinstance(now, Recording):
            self._record(now, step)
        else:
            self._approach(now, step)

    def _approach(self, now: Pending, step: int) -> None:
        """Towards RECORDING, through as many states as are due at this step."""
        capture = now.capture
        if is_late(capture):
            held = "a profiler of the user's own is active; stop it, or ask again with more patience"
            late = "the step to begin with was not reached in time; ask again"
            self._give_up(capture, held if capture.was_held else late)
            return
        if not isinstance(now, WarmingUp) and self._users.active():
            self._hold(now)
            return
        if isinstance(now, Armed):
            now = self._now = schedule(now, step, time.time_ns())
        if isinstance(now, Scheduled) and step + capture.command.warmup_steps >= now.due_step:
            self._warm_up(now, step)
        reached = self._now
        if isinstance(reached, WarmingUp) and step >= reached.due_step:
            self._start(reached, step)

    def _hold(self, now: Union[Armed, Scheduled]) -> None:
        """Wait for a profiler of the user's own."""
        capture = now.capture
        if capture.windows.profiles:
            self._give_up(capture, "a profiler of the user's own began, and went first")
        elif not capture.was_held:
            self._now = replace(now, capture=replace(capture, was_held=True))
            capture.answer.report(ring_layout.PHASE_HELD)

    def _warm_up(self, now: Scheduled, step: int) -> None:
        capture = now.capture
        left_bytes = memory_left_bytes()
        if left_bytes is not None and left_bytes < MIN_MEMORY_BYTES:
            why = "only {} MB of memory are left, too little for a trace".format(left_bytes >> 20)
            self._give_up(capture, why)
            return
        if not capture.windows.profiles:
            allowed = None if left_bytes is None else resident_bytes() + left_bytes // MEMORY_FACTOR
            capture = replace(capture, windows=replace(capture.windows, resident_limit_bytes=allowed))
        profile = Profile(self._torch, self._users, capture.command.options)
        self._now = WarmingUp(capture, now.due_step, profile)
        if step < now.due_step:
            profile.prepare()

    def _start(self, now: WarmingUp, step: int) -> None:
        capture, windows = now.capture, now.capture.windows
        is_first = not windows.profiles
        windows = replace(windows, start_ns=windows.start_ns + timed_ns(now.profile.start))
        started_ns, unix_ns = time.monotonic_ns(), time.time_ns()
        if is_first:
            windows = replace(windows, deadline_ns=started_ns + ring_layout.WINDOWS_SECONDS * 10**9)
        capture = replace(capture, windows=windows)
        self._now = Recording(capture, now.profile, step + 1, started_ns + capture.command.length_ns)
        now.profile.annotate(step + 1)
        first = {"first_step": step + 1, "start_unix_ns": unix_ns} if is_first else {}
        capture.answer.report(ring_layout.PHASE_RUNNING, "", start_ns=windows.start_ns, steps=windows.steps, **first)

    def _record(self, now: Recording, step: int) -> None:
        capture, command, windows = now.capture, now.capture.command, now.capture.windows
        steps = step - now.first_step + 1
        wants_more = steps < (command.steps or steps + 1) and time.monotonic_ns() < now.stop_at_ns
        fits = windows.resident_limit_bytes is None or resident_bytes() < windows.resident_limit_bytes
        if wants_more and fits:
            now.profile.annotate(step + 1)
            return
        stop_ns = windows.stop_ns + timed_ns(now.profile.stop)
        profiles = (*windows.profiles, now.profile)
        capture = replace(
            capture, windows=replace(windows, profiles=profiles, steps=windows.steps + steps, stop_ns=stop_ns)
        )
        if not fits:
            self._hand_over(capture, "stopped early: memory would have become short")
        elif len(profiles) == command.windows:
            self._hand_over(capture)
        else:
            again = self._now = Scheduled(capture, step + command.wait_steps + command.warmup_steps)
            self._approach(again, step)  # the next window may begin here and now

    def _give_up(self, capture: Capture, why: str) -> None:
        """Windows that were recorded by now are worth having."""
        if capture.windows.profiles:
            self._hand_over(capture, "stopped early: " + why)
        else:
            self._end(why)

    def _hand_over(self, capture: Capture, text: str = "") -> None:
        answer, windows = capture.answer, capture.windows
        self._leave_for(IDLE)
        answer.report(
            ring_layout.PHASE_WRITING, text, steps=windows.steps, start_ns=windows.start_ns, stop_ns=windows.stop_ns
        )

        def write() -> int:
            return windows.profiles[0].write() if capture.command.windows == 1 else write_windows(windows.profiles)

        self._handover.start(capture.ring, write, answer, text, lambda error: self._fail(error, answer))

    def _leave_for(self, rest: Union[Idle, Off]) -> None:
        self._now = rest
        self._after_step.remove()

    def _end(self, why: str) -> None:
        """Leave things as they were before the capture."""
        profile, capture = profile_of(self._now), capture_of(self._now)
        self._leave_for(IDLE)
        if profile is not None:
            profile.abandon()
        if capture is not None:
            capture.answer.report(ring_layout.PHASE_FAILED, why)

    def _end_profiler(self, why: str) -> None:
        """End the capture if there is a profiler to stop, and this thread may."""
        if profile_of(self._now) is not None and self._is_on_its_thread():
            self._guard(lambda: self._end(why))

    def _give_way(self) -> None:
        self._end_profiler("the user's own profiler began, and went first")

    def _is_capturing_a_graph(self) -> bool:
        # Profilers synchronise the device, which would ruin the user's graph.
        cuda = self._torch.cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def _fail(self, error: BaseException, answer: Optional[Answer] = None) -> None:
        if raised_by_a_signal_handler(error):
            raise error
        profile, capture = profile_of(self._now), capture_of(self._now)
        if answer is None and capture is not None:
            answer = capture.answer
        self._leave_for(Off())
        text = "{}: {}".format(type(error).__name__, error)
        complain("captures disabled: {}; training is not affected".format(text))
        if profile is not None:
            with contextlib.suppress(Exception):
                profile.abandon()
        if answer is not None:
            with contextlib.suppress(Exception):
                answer.report(ring_layout.PHASE_OFF, text)

    def before_fork(self) -> None:
        """A child would go on recording, forever: its copy of the profiler cannot be stopped safely."""
        self._end_profiler("the process forked during the capture (a data loader's workers?); ask again")

    def after_fork_in_child(self) -> None:
        profile = profile_of(self._now)
        if profile is not None and profile.with_stack:
            sys.setprofile(None)
        self._now = Off()
        self._handover.close()

    def _thread_ends(self) -> None:
        capture = capture_of(self._now)
        has_windows = capture is not None and bool(capture.windows.profiles)
        if (has_windows or profile_of(self._now) is not None) and self._is_on_its_thread():
            self._guard(lambda: self._end("the training thread ended during the capture"))

    def _leave(self) -> None:
        """At the interpreter's end."""
        self._end_profiler("the process ended during the capture")
        # A daemon that waits for the trace gets a moment to fetch it. While it is written, nothing else runs anyway.
        self._handover.wait(KEEP_AT_EXIT_SECONDS)
