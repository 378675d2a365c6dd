"""Captures on request: starts and stops torch.profiler at step boundaries, on the training thread, for a daemon that
asks through the ring. A failure ends captures in this process, never the training and never the probe."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from typing import Any, Callable, List, Optional

from . import ring_layout
from .capture_commands import Answer, Command, Handover, read_command, refusal
from .failure import complain, raised_by_a_signal_handler
from .profiler import AfterStep, Profile, UserProfilers, memory_left_bytes, resident_bytes, timed_ns, write_windows
from .ring import Ring
from .step_boundary import training_thread_id

KEEP_AT_EXIT_SECONDS = 0.5
# Stopping needs six times the memory that recording took, and the trace once more (measured, torch 2.13).
MEMORY_FACTOR = 8
MEMORY_AT_LEAST_BYTES = 256 << 20


class _AtThreadEnd:
    """Kept in a threading.local: collected by a thread that ends, while that can still stop its profiler."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __del__(self) -> None:
        self._action()


class Captures:
    """Made once in a process. `mark` is the command that was looked at last; `active` asks to be called at every
    boundary."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._users = UserProfilers(sys.modules["torch.autograd.profiler"])
        self._users.give_way = self._give_way
        self._after_step = AfterStep(self._users._module.record_function)
        self.mark = bytes(4)
        self.active = False
        self._off = False
        self._ring: Optional[Ring] = None
        self._command: Optional[Command] = None
        self._answer: Optional[Answer] = None
        self._profile: Optional[Profile] = None
        self._thread_id = 0
        self._due_step: Optional[int] = None  # when recording begins, once that is known
        self._first_step: Optional[int] = None  # the first that is recorded, once it is
        self._stop_at_ns = 0
        self._recorded: List[Profile] = []  # windows that are over, of several
        self._more_by_ns = 0
        self._steps = self._start_ns = self._stop_ns = 0  # of all windows so far
        self._resident_limit_bytes: Optional[int] = None
        self._of_thread = threading.local()
        self._held = False
        self._handover = Handover()
        self._at_exit = False

    def at_boundary(self, ring: Ring, step: int, is_inside_step: bool) -> None:
        """`step` steps have ended. `is_inside_step`: torch is still inside the optimizer's step."""
        try:
            mark = ring.command_mark()
            if mark != self.mark and not self._handover.is_busy:
                self.mark = mark
                self._ring = ring
                self._take(ring, mark)
            if self._command is None or threading.get_ident() != self._thread_id:
                return
            self._at_the_end_of_the_step(step, is_inside_step)
        except Exception as error:
            self._fail(error)

    def _at_the_end_of_the_step(self, step: int, is_inside_step: bool) -> None:
        after_step = self._after_step
        if after_step.is_waiting:  # since the boundary before this one: there is no such end here
            after_step.works = False
        if is_inside_step and after_step.works:
            after_step.then(lambda: self._guard(lambda: self._act(step)))
            return
        self._act(step)
        if is_inside_step and self._command is not None:
            after_step.then(lambda: None)  # finds out whether there is an end to wait for

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._fail(error)

    def _take(self, ring: Ring, mark: bytes) -> None:
        command = read_command(ring, mark)
        if command is None or self._off:
            return
        here = threading.get_ident()
        if command.verb == ring_layout.VERB_DROP:
            is_this = self._command is not None and command.start_step == self._command.number
            if is_this and here == self._thread_id:
                self._end("cancelled")
            return
        if command.verb != ring_layout.VERB_CAPTURE or self._command is not None:
            return  # the first one wins; whoever asks sees that the answer is not about his
        answer = Answer(ring, command.number)
        wrong = refusal(command, time.time_ns())
        if wrong is None and here != training_thread_id():
            wrong = "steps end on a thread of autograd's own, where nothing else could be seen"
        if wrong is not None:
            answer.tell(ring_layout.PHASE_FAILED, "the probe refused: " + wrong)
            return
        self._command, self._answer = command, answer
        self._thread_id = here
        self._due_step = self._first_step = None
        self._recorded = []
        self._steps = self._start_ns = self._stop_ns = 0
        self._held = False
        self.active = True
        self._after_step.install()
        self._of_thread.end = _AtThreadEnd(self._thread_ends)
        if not self._at_exit:
            self._at_exit = True
            atexit.register(self._leave)
        answer.tell(ring_layout.PHASE_ARMED)

    def _act(self, step: int) -> None:
        """At a boundary: what is due."""
        command = self._command
        if command is None or self._is_capturing_a_graph():
            return
        if self._first_step is None:
            self._approach(command, step)
        else:
            self._go_on(command, step)

    def _approach(self, command: Command, step: int) -> None:
        assert self._answer is not None
        now_ns = time.time_ns()
        late = time.monotonic_ns() > self._more_by_ns if self._recorded else now_ns > command.give_up_unix_ns
        if late:
            held = "a profiler of the user's own is active; stop it, or ask again with more patience"
            self._give_up(command, held if self._held else "the step to begin with was not reached in time; ask again")
            return
        if self._profile is None and self._users.active():
            if self._recorded:
                self._give_up(command, "a profiler of the user's own began, and went first")
            elif not self._held:
                self._held = True
                self._answer.tell(ring_layout.PHASE_HELD)
            return
        if self._due_step is None:
            begun = step >= command.start_step if command.start_step else now_ns >= command.start_unix_ns
            # A warm-up comes before the step that was agreed on, where that is known.
            early = command.start_step and step + command.warmup_steps >= command.start_step
            if not begun and not early:
                return
            start = max(step, command.start_step) if command.start_step else step + command.warmup_steps
            self._due_step = start + command.wait_steps
        if self._profile is None and step + command.warmup_steps >= self._due_step:
            left_bytes = memory_left_bytes()
            if left_bytes is not None and left_bytes < MEMORY_AT_LEAST_BYTES:
                why = "only {} MB of memory are left, too little for a trace".format(left_bytes >> 20)
                self._give_up(command, why)
                return
            allowed = None if left_bytes is None else resident_bytes() + left_bytes // MEMORY_FACTOR
            if not self._recorded:  # all windows are in memory until the last is over
                self._resident_limit_bytes = allowed
            self._profile = Profile(self._torch, self._users, command.options)
            if step < self._due_step:
                self._profile.prepare()
        if self._profile is not None and step >= self._due_step:
            self._start(command, self._profile, step)

    def _start(self, command: Command, profile: Profile, step: int) -> None:
        assert self._answer is not None
        self._start_ns += timed_ns(profile.start)
        self._first_step = step + 1
        self._stop_at_ns = time.monotonic_ns() + command.length_ns
        unix_ns = time.time_ns()
        profile.annotate(step + 1)
        if self._recorded:
            self._answer.tell(ring_layout.PHASE_RUNNING, start_ns=self._start_ns, steps=self._steps)
            return
        self._more_by_ns = time.monotonic_ns() + ring_layout.WINDOWS_SECONDS * 10**9
        self._answer.tell(
            ring_layout.PHASE_RUNNING, first_step=step + 1, start_unix_ns=unix_ns, start_ns=self._start_ns, steps=0
        )

    def _go_on(self, command: Command, step: int) -> None:
        assert self._first_step is not None and self._profile is not None
        steps = step - self._first_step + 1
        wants_more = steps < (command.steps or steps + 1) and time.monotonic_ns() < self._stop_at_ns
        fits = self._resident_limit_bytes is None or resident_bytes() < self._resident_limit_bytes
        if wants_more and fits:
            self._profile.annotate(step + 1)
            return
        self._stop_ns += timed_ns(self._profile.stop)
        self._recorded.append(self._profile)
        self._steps += steps
        self._profile = self._first_step = None
        if not fits:
            self._hand_over(command, "stopped early: memory would have become short")
        elif len(self._recorded) == command.windows:
            self._hand_over(command)
        else:
            self._due_step = step + command.wait_steps + command.warmup_steps
            self._approach(command, step)  # it may begin here and now

    def _give_up(self, command: Command, why: str) -> None:
        """Windows that were recorded by now are worth having."""
        if self._recorded:
            self._hand_over(command, "stopped early: " + why)
        else:
            self._end(why)

    def _hand_over(self, command: Command, text: str = "") -> None:
        assert self._answer is not None and self._ring is not None
        answer, recorded = self._answer, self._recorded
        self._forget()
        answer.tell(ring_layout.PHASE_WRITING, text, steps=self._steps, start_ns=self._start_ns, stop_ns=self._stop_ns)

        def write() -> int:
            return recorded[0].write() if command.windows == 1 else write_windows(recorded)

        self._handover.start(self._ring, write, answer, text, lambda error: self._fail(error, answer))

    def _forget(self) -> None:
        self._command = self._answer = self._profile = None
        self._recorded = []
        self._first_step = None
        self.active = False
        self._after_step.remove()

    def _end(self, why: str) -> None:
        """Leave things as they were before the capture."""
        profile, answer = self._profile, self._answer
        self._forget()
        if profile is not None:
            profile.abandon()
        if answer is not None:
            answer.tell(ring_layout.PHASE_FAILED, why)

    def _give_way(self) -> None:
        if self._profile is not None and threading.get_ident() == self._thread_id:
            self._guard(lambda: self._end("the user's own profiler began, and went first"))

    def _is_capturing_a_graph(self) -> bool:
        # Profilers synchronise the device, which would ruin the user's graph.
        cuda = self._torch.cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def _fail(self, error: BaseException, answer: Optional[Answer] = None) -> None:
        if raised_by_a_signal_handler(error):
            raise error
        self._off = True
        profile, answer = self._profile, answer or self._answer
        self._forget()
        text = "{}: {}".format(type(error).__name__, error)
        complain("captures disabled: {}; training is not affected".format(text))
        if profile is not None:
            with contextlib.suppress(Exception):
                profile.abandon()
        if answer is not None:
            with contextlib.suppress(Exception):
                answer.tell(ring_layout.PHASE_OFF, text)

    def before_fork(self) -> None:
        """A child would go on recording, for ever: its copy of the profiler cannot be stopped safely."""
        if self._profile is not None and threading.get_ident() == self._thread_id:
            self._guard(
                lambda: self._end("the process forked during the capture (a data loader's workers?); ask again")
            )

    def after_fork_in_child(self) -> None:
        if self._profile is not None and self._profile.with_stack:
            sys.setprofile(None)
        self._off = True
        self._ring = None
        self._command = self._answer = self._profile = None
        self._handover.close()

    def _thread_ends(self) -> None:
        if (self._profile is not None or self._recorded) and threading.get_ident() == self._thread_id:
            self._guard(lambda: self._end("the training thread ended during the capture"))

    def _leave(self) -> None:
        """At the interpreter's end."""
        if self._profile is not None and threading.get_ident() == self._thread_id:
            self._guard(lambda: self._end("the process ended during the capture"))
        # Who waits for the trace gets a moment to fetch it. While it is being written, nothing else runs anyway.
        self._handover.wait(KEEP_AT_EXIT_SECONDS)
