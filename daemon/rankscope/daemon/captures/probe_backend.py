"""Captures by the probe (level 2): torch.profiler, started and stopped at step boundaries by the process itself, on
a command in its ring. For processes without libkineto's own thread."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from rankscope.daemon.captures import probe_commands as commands
from rankscope.daemon.captures.orders import (
    MAX_RECORDING_SECONDS,
    CancelledError,
    CaptureError,
    NoStepsError,
    Order,
    Recording,
    Stage,
    Workspace,
)
from rankscope.daemon.captures.probe_commands import Answer, Command, take_apart
from rankscope.daemon.captures.request import slowdown_objection, uses_cuda
from rankscope.daemon.procfs import is_alive
from rankscope.daemon.samples import RankProcess
from rankscope.daemon.steps import ring_reader
from rankscope.probe import ring_layout

TICK_SECONDS: Final = 0.05
# Added to the requested length: a long step, and writing a large trace.
STEP_SECONDS_ALLOWED: Final = 60.0
WRITE_SECONDS: Final = 60.0
# Ranks that count steps alike start at a multiple of this step where steps are short: daemons of several nodes estimate
# the start independently and arrive at the same step in almost all cases.
ROUND_STEPS: Final = 8
ROUND_SECONDS: Final = 1.0
# A command is written this long before the start: enough for every rank to see it, even if steps are much shorter than
# estimated, as in the first seconds of a job.
LEAD_SECONDS: Final = 0.8
LEAD_STEPS: Final = 2
# Ranks whose counts differ by this much at the same time do not count alike.
STEPS_APART: Final = 1.5
MAX_AGREEMENTS: Final = 64
MAX_RECORDS: Final = 64
UNKNOWN_STEP_SECONDS: Final = 1.0
SINCE_STEP_SECONDS: Final = 3600.0


@dataclass(frozen=True)
class _Agreement:
    """The step at which all ranks of a capture start, and the rank whose count it is based on."""

    start_step: int
    rank: RankProcess


class ProbeBackend:
    name = "probe"
    keeps_schedules = True
    needs_steps = True

    def __init__(self, proc_root: Path = Path("/proc")) -> None:
        self._proc_root = proc_root
        self._lock = threading.Lock()
        self._agreements: OrderedDict[tuple[str, int], _Agreement] = OrderedDict()

    def objection(self, rank: RankProcess) -> str | None:
        try:
            with commands.opened(rank, self._proc_root) as (ring, _):
                answer = commands.read_answer(ring)
        except CaptureError as error:
            return str(error)
        if answer is not None and answer.phase == ring_layout.PHASE_OFF:
            return f"the probe has given captures up in this process: {answer.text}"
        return None

    def record(
        self, order: Order, workspace: Workspace, report: Callable[[Stage], None], cancelled: threading.Event
    ) -> Recording:
        objection = self.objection(order.rank) or slowdown_objection(order.rank, order.options, self._proc_root)
        if objection is not None:
            raise CaptureError(objection)
        with commands.opened(order.rank, self._proc_root) as (ring, header):
            step_seconds = order.step_seconds or _recent_step_seconds(ring, header)
            attempt = _Attempt(self._proc_root, order, ring, workspace, report, cancelled)
            # As late as possible, so that the estimate holds: daemons of several nodes must arrive at the same step.
            lead_seconds = LEAD_SECONDS + (LEAD_STEPS + attempt.early_steps) * (step_seconds or 0.0)
            attempt.wait_until(order.start_unix_millis / 1000 - lead_seconds)
            return attempt.run(self._agreed_step(order, ring, step_seconds, attempt.early_steps), step_seconds)

    def _agreed_step(self, order: Order, ring: int, step_seconds: float | None, early_steps: int = 0) -> int:
        """The same step for all ranks that count alike; 0 if there is none: then they start by time. The probe
        starts to warm up `early_steps` before it."""
        if step_seconds is None:
            return 0
        key = (order.capture_id, order.start_unix_millis)
        with self._lock:
            agreement = self._agreements.get(key)
            if agreement is None:
                start_step = self._planned_step(order, ring, step_seconds, early_steps)
                self._agreements[key] = _Agreement(start_step, order.rank)
                if len(self._agreements) > MAX_AGREEMENTS:
                    self._agreements.popitem(last=False)
                return start_step
        return agreement.start_step if self._count_alike(ring, agreement.rank, step_seconds) else 0

    def _planned_step(self, order: Order, ring: int, step_seconds: float, early_steps: int) -> int:
        steps, ended_seconds = _progress(ring)
        left = max(order.start_unix_millis / 1000 - time.time(), (LEAD_STEPS + early_steps) * step_seconds)
        return _start_step(steps, time.monotonic() - ended_seconds, left, step_seconds)

    def _count_alike(self, ring: int, other: RankProcess, step_seconds: float) -> bool:
        """Both rings are read now, not one of them when the step was planned: the pace may have changed since. Of short
        steps a record has several, so that the last ones of two rings ended at different times."""
        try:
            with commands.opened(other, self._proc_root) as (other_ring, _):
                their_steps, they_ended_seconds = _progress(other_ring)
                steps, ended_seconds = _progress(ring)
        except CaptureError:
            return False
        apart = steps - their_steps
        return min(abs(apart), abs(apart - (ended_seconds - they_ended_seconds) / step_seconds)) < STEPS_APART


def _progress(ring: int) -> tuple[int, float]:
    """Steps so far, and when the last one ended, by the monotonic clock."""
    header = ring_reader.read_header(ring)
    since_last = ring_reader.seconds_since_last_step(ring, header) or 0.0
    return header.steps, time.monotonic() - (since_last if since_last < SINCE_STEP_SECONDS else 0.0)


def _start_step(steps: int, since_last_seconds: float, left_seconds: float, step_seconds: float) -> int:
    """The first step that ends at or after the start, but late enough for every rank to see it."""
    margin_seconds = min(1.0, 2 * step_seconds) + 0.05
    step = steps + math.ceil((since_last_seconds + max(left_seconds, margin_seconds)) / step_seconds)
    if step_seconds * ROUND_STEPS <= ROUND_SECONDS:
        step = math.ceil(step / ROUND_STEPS) * ROUND_STEPS
    return step


def _recent_step_seconds(ring: int, header: ring_reader.Header) -> float | None:
    """From the ring; None before two steps."""
    if not 0 < header.records < 1 << 53:
        return None
    first = max(1, header.records - MAX_RECORDS + 1)
    records, whole = ring_reader.read_records(ring, first, header.records)
    usable = whole & (records["span_ns"] > 0) & (records["span_ns"] < 1 << 50) & (records["steps"] > 0)
    if not usable.any():
        return None
    return float(np.median(records["span_ns"][usable] / records["steps"][usable])) / 1e9


class _Attempt:
    def __init__(
        self,
        proc_root: Path,
        order: Order,
        ring: int,
        workspace: Workspace,
        report: Callable[[Stage], None],
        cancelled: threading.Event,
    ) -> None:
        self._proc_root = proc_root
        self._order = order
        self._ring = ring
        self._workspace = workspace
        self._report = report
        self._cancelled = cancelled
        self._who = str(order.rank)
        self._length_seconds = MAX_RECORDING_SECONDS if order.seconds is None else order.seconds
        options = order.options
        warmup_steps = options.warmup_steps
        if warmup_steps is None:
            warmup_steps = 1 if uses_cuda(order.rank.pid, proc_root) else 0
        self.early_steps = max(0, warmup_steps - options.wait_steps)
        self._command = Command(
            number=commands.new_number(),
            start_unix_nanos=order.start_unix_millis * 1_000_000,
            start_step=0,
            wait_steps=options.wait_steps,
            warmup_steps=warmup_steps,
            windows=options.repeat,
            steps=order.steps or 0,
            length_nanos=round(self._length_seconds * 1e9),
            give_up_unix_nanos=round(order.give_up_unix_seconds * 1e9),
            options=options,
        )
        self._give_up_unix_seconds = order.give_up_unix_seconds

    def wait_until(self, unix_seconds: float) -> None:
        while (left := unix_seconds - time.time()) > 0:
            self._check()
            self._cancelled.wait(min(TICK_SECONDS, left))

    def run(self, start_step: int, step_seconds: float | None) -> Recording:
        # Time before the first window does not count against the caller's patience.
        schedule_steps = self._command.wait_steps + self._command.warmup_steps
        self._give_up_unix_seconds += schedule_steps * (step_seconds or UNKNOWN_STEP_SECONDS)
        give_up_unix_nanos = round(self._give_up_unix_seconds * 1e9)
        self._command = replace(self._command, start_step=start_step, give_up_unix_nanos=give_up_unix_nanos)
        commands.write_command(self._ring, self._command)
        try:
            answer = self._follow()
            target = self._workspace.folder / f"rank{self._order.rank.rank}.json"
            commands.take_trace(self._order.rank, answer, target, self._workspace.reserve, self._proc_root)
            windows = take_apart(target, self._command.windows, self._who) if self._command.windows > 1 else (target,)
        except BaseException:
            for path in self._workspace.folder.glob(f"rank{self._order.rank.rank}.*"):
                path.unlink()
            raise
        finally:
            # Fetched, failed, cancelled or late: the process is done with it.
            commands.drop(self._ring, self._command)
        return Recording(
            target,
            is_trace=True,
            start_unix_millis=round(answer.start_unix_nanos / 1e6),
            steps=answer.steps,
            notes=self._notes(answer),
            more_windows=windows[1:],
        )

    def _follow(self) -> Answer:
        """Follow until the trace is written."""
        phase = 0
        deadline = self._give_up_unix_seconds
        windows_seconds = ring_layout.WINDOWS_SECONDS if self._command.windows > 1 else 0.0
        while True:
            is_late = time.time() > deadline  # before the last look: this process may have been late itself
            answer = commands.read_answer(self._ring)
            if answer is not None and answer.number == self._command.number and commands.plausible(answer):
                if answer.phase in (ring_layout.PHASE_FAILED, ring_layout.PHASE_OFF):
                    raise CaptureError(f"{self._who}: {answer.text}")
                if answer.phase != phase:
                    self._enter(phase, answer.phase)
                    phase = answer.phase
                    if phase == ring_layout.PHASE_WRITTEN:
                        return answer
                    if phase == ring_layout.PHASE_RUNNING:
                        deadline = time.time() + self._length_seconds + windows_seconds + STEP_SECONDS_ALLOWED
                        continue
                    if phase == ring_layout.PHASE_WRITING:
                        deadline = time.time() + WRITE_SECONDS
                        continue
            if is_late:
                raise self._lateness(phase, answer)
            self._cancelled.wait(TICK_SECONDS)
            self._check()

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError(f"{self._who}: cancelled")
        if not is_alive(str(self._proc_root / str(self._order.rank.pid)), self._order.rank.start_ticks):
            raise CaptureError(f"{self._who}: the process ended during the capture")

    def _enter(self, before: int, phase: int) -> None:
        """Short captures end before the next look: every stage is still reported."""
        if before == 0:
            self._report(Stage.ARMED)
        if before < ring_layout.PHASE_RUNNING <= phase:
            self._report(Stage.RUNNING)

    def _is_of_another(self, answer: Answer | None) -> bool:
        if answer is None or answer.number == self._command.number:
            return False
        return answer.phase < ring_layout.PHASE_WRITTEN

    def _lateness(self, phase: int, answer: Answer | None) -> CaptureError:
        if phase == ring_layout.PHASE_HELD:
            why = "a profiler of the user's own is active; stop it, or ask again with more patience"
        elif phase == ring_layout.PHASE_WRITING:
            why = f"the trace was not written within {WRITE_SECONDS:g} s; capture fewer steps"
        elif phase == 0 and self._is_of_another(answer):
            why = "the probe is busy with another capture, of another daemon"
        else:
            since = {
                ring_layout.PHASE_RUNNING: f"for {STEP_SECONDS_ALLOWED:g} s in the middle of the capture",
                ring_layout.PHASE_ARMED: "since the capture was to begin",
            }.get(phase, "since the capture was asked for")
            hint = "does it hang? `rankscope top` shows what it does"
            return NoStepsError(f"{self._who}: no step has ended {since}; {hint}")
        return CaptureError(f"{self._who}: {why}")

    def _notes(self, answer: Answer) -> tuple[str, ...]:
        notes = [
            "recorded by the probe: its starting and stopping held training up by "
            f"{(answer.start_nanos + answer.stop_nanos) / 1e6:.0f} ms, and while it wrote the trace, for "
            f"{answer.write_nanos / 1e6:.0f} ms, no Python code could run"
        ]
        late_steps = answer.first_step - 1 - self._command.start_step
        if self._command.start_step and late_steps:
            notes.append(f"began at step {answer.first_step}, {late_steps} after the one agreed on")
        asked = None if self._order.steps is None else self._order.steps * self._command.windows
        if asked is not None and answer.steps != asked:
            why = answer.text or f"{self._length_seconds:g} s are the limit"
            notes.append(f"{answer.steps} steps were recorded, of {asked}; {why}")
        elif answer.text:
            notes.append(answer.text)
        return tuple(notes)
