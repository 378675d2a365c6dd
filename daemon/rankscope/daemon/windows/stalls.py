"""Detects ranks that make no progress and fetches their stacks without delaying the windows; detects jobs that
became slower, whose stacks are then recorded first."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.verdicts.windows import UNREADABLE, Communicator
from rankscope.common.text import printable
from rankscope.daemon.procfs import CLOCK_TICKS_PER_SECOND
from rankscope.daemon.samples import (
    Activity,
    Problem,
    ProcessSample,
    RankKey,
    RankProcess,
    Span,
    StackSample,
    StallDump,
    StepSample,
)
from rankscope.daemon.windows.window import NAME_CHARACTERS, RankSamples
from rankscope.v1.window_pb2 import NcclCommunicator, NcclOperation, RankWindow, Stall

STALL_SECONDS = 3.0
STALL_STEPS = 8
# No step of this rank was seen yet, so the length of a step is unknown.
STALL_SECONDS_UNKNOWN_STEP = 30.0
MAX_STEPS = 64
# Soon at first, because a second dump with the same stack distinguishes a hang from a long evaluation; then rarely.
FIRST_DUMPS = 5
FIRST_DUMPS_EVERY_SECONDS = 1.5
DUMP_EVERY_SECONDS = 10.0
STILL_RECORDINGS = 2
# Longer ago than this, a recording did not begin: the clock was set.
RECORDING_SECONDS = 30.0
STILL_SAMPLES = 20
STILL_CPU_RATIO = 0.02
# A rank is at work with more than the threads of its libraries take while it waits.
WORKING_CPU_RATIO = 0.05
WORKING_BYTES_PER_SECOND = 32 * 1024
WORKING_SECONDS = 3.0
STOPPED_RATIO = 0.9
STACK_LINES = 64

WINDOWS_OF_A_PACE = 8
SLOWER_RATIO = 1.15

Dump = Callable[[Sequence[RankProcess]], Mapping[RankKey, StallDump | Problem]]


@dataclass
class _Memory:
    """State of one incarnation."""

    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    steps_total: int | None = None  # at the end of the previous window
    since_step_seconds: float = 0.0
    # The uninterrupted run of recordings that all show the same stack.
    still_frames: frozenset[Frame] | None = None
    still_seconds: float = 0.0
    still_recordings: int = 0
    still_samples: int = 0
    seen_recording_end: int = 0
    still_phase: str | None = None
    since_busy_seconds: float | None = None  # None: CPU time is not known
    dump: StallDump | None = None
    dumps_read: int = 0
    changes: int = 0  # of the stack, one look after the other
    was_at_work: bool | None = None  # between the last two looks
    same_stack_looks: int = 0
    collectives_enqueued: int | None = None
    communicators: Mapping[tuple[int, int], Communicator] = field(default_factory=dict)  # by number and position
    dumps: int = 0
    dumped_at: float | None = None


class StallWatch:
    """Call it with every rank's samples once a window. It fetches stacks of stalled ranks in a thread of its own."""

    def __init__(self, dump: Dump | None) -> None:
        self._dump = dump
        self._memories: dict[RankKey, _Memory] = {}
        self._stalled: list[RankProcess] = []
        self._worker: threading.Thread | None = None
        self._lock = threading.Lock()

    def observe(self, rank: RankProcess, samples: RankSamples, span: Span) -> Stall | None:
        memory = self._memories.setdefault(rank.key, _Memory())
        memory.since_step_seconds += span.seconds
        if samples.steps is not None:
            stall = _stall_by_steps(memory, samples.steps, span)
        else:
            stall = _stall_by_stacks(memory, samples.stacks, samples.process, span)
        _note_process(memory, samples.process, span)
        with self._lock:
            if stall is None:
                memory.dump = memory.was_at_work = None
                memory.same_stack_looks = memory.dumps = memory.dumps_read = memory.changes = 0
                return None
            self._stalled.append(rank)
            if stall.HasField("collectives_enqueued") and memory.collectives_enqueued != stall.collectives_enqueued:
                memory.collectives_enqueued = stall.collectives_enqueued
                memory.same_stack_looks = 0  # the same place, in another collective
            dump, looks, was_at_work = memory.dump, memory.same_stack_looks, memory.was_at_work
        is_busy = None if memory.since_busy_seconds is None else memory.since_busy_seconds < WORKING_SECONDS
        if is_busy is not None or was_at_work is not None:
            stall.is_working = bool(is_busy or was_at_work)
        if samples.process is not None and samples.process.stopped_seconds is not None:
            stall.is_stopped = samples.process.stopped_seconds >= STOPPED_RATIO * span.seconds
        if dump is not None:
            if not stall.HasField("same_stack_looks"):
                stall.same_stack_looks = looks
            stall.phase = printable(dump.phase, 32)
            stall.stack.extend(_line(frame) for frame in dump.stack[:STACK_LINES])
        return stall

    def fetch_stacks(self, now_seconds: float) -> None:
        """Call after all ranks were observed: fetches the stacks that are due, all at once, in the background."""
        stalled, self._stalled = self._stalled, []
        if self._dump is None or (self._worker is not None and self._worker.is_alive()):
            return
        due = [rank for rank in stalled if self._is_due(rank.key, now_seconds)]
        if not due:
            return
        for rank in due:
            self._memories[rank.key].dumped_at = now_seconds
            self._memories[rank.key].dumps += 1
        self._worker = threading.Thread(target=self._fetch, args=(due,), name="rankscope-dumps", daemon=True)
        self._worker.start()

    def keep_only(self, alive: Collection[RankKey]) -> None:
        for key in self._memories.keys() - set(alive):
            del self._memories[key]

    def join(self, timeout_seconds: float | None = None) -> None:
        if self._worker is not None:
            self._worker.join(timeout_seconds)

    def _is_due(self, key: RankKey, now_seconds: float) -> bool:
        memory = self._memories[key]
        every_seconds = FIRST_DUMPS_EVERY_SECONDS if memory.dumps < FIRST_DUMPS else DUMP_EVERY_SECONDS
        return memory.dumped_at is None or now_seconds - memory.dumped_at >= every_seconds

    def _fetch(self, ranks: Sequence[RankProcess]) -> None:
        assert self._dump is not None
        try:
            dumps = self._dump(ranks)
        except Exception:  # noqa: BLE001 - the stall is reported without a stack; the collector reports its own faults
            return
        with self._lock:
            for key, dump in dumps.items():
                memory = self._memories.get(key)
                if isinstance(dump, Problem) and dump.kind == "unreadable":
                    dump = StallDump(UNREADABLE, ())  # the stack of an earlier look is no longer where it stands
                if memory is not None and isinstance(dump, StallDump):
                    _note_dump(memory, dump)


def _note_process(memory: _Memory, process: ProcessSample | None, span: Span) -> None:
    cpu_seconds = None if process is None else process.cpu_seconds
    since_seconds = (memory.since_busy_seconds or 0.0) + span.seconds
    if cpu_seconds is not None:
        memory.since_busy_seconds = 0.0 if cpu_seconds >= WORKING_CPU_RATIO * span.seconds else since_seconds
    elif memory.since_busy_seconds is not None:
        # A window may lack a sample. Work that was seen still counts for as long as it would; idleness is not known.
        memory.since_busy_seconds = since_seconds if since_seconds < WORKING_SECONDS else None


def _note_dump(memory: _Memory, dump: StallDump) -> None:
    before, memory.dump = memory.dump, dump
    memory.dumps_read += 1
    if before is None:
        memory.same_stack_looks = 1
        return
    is_same = before.stack == dump.stack
    memory.same_stack_looks = memory.same_stack_looks + 1 if is_same else 1
    memory.changes = 0 if is_same else memory.changes + 1
    # A wait that polls is seen at another line now and then, but hardly twice in a row.
    is_moving = memory.changes >= min(2, memory.dumps_read - 1)
    memory.was_at_work = is_moving or _is_active(before.activity, dump.activity)


def _is_active(before: Activity | None, now: Activity | None) -> bool:
    if before is None or now is None or now.monotonic_seconds <= before.monotonic_seconds:
        return False
    seconds = now.monotonic_seconds - before.monotonic_seconds
    is_computing = now.cpu_seconds - before.cpu_seconds >= WORKING_CPU_RATIO * seconds
    return is_computing or now.moved_bytes - before.moved_bytes >= WORKING_BYTES_PER_SECOND * seconds


def _stall_by_steps(memory: _Memory, sample: StepSample, span: Span) -> Stall | None:
    known = ~np.isnan(sample.step_seconds)
    memory.step_seconds.extend(sample.step_seconds[known][-MAX_STEPS:].tolist())
    _note_communicators(memory, sample.communicators, span)
    if sample.steps_total < 1 or sample.last_step_unix_nanos is None:
        return None
    seconds_since_step = _since_step(memory, sample, span)
    patience_seconds = STALL_SECONDS_UNKNOWN_STEP
    if memory.step_seconds:
        patience_seconds = max(STALL_SECONDS, STALL_STEPS * median(memory.step_seconds))
    if seconds_since_step <= patience_seconds:
        return None
    return Stall(
        seconds_since_step=seconds_since_step,
        collectives_enqueued=sample.collectives_enqueued,
        collectives_completed=sample.collectives_completed,
        communicators=map(_communicator_message, memory.communicators.values()),
    )


def _note_communicators(memory: _Memory, now: Sequence[Communicator], span: Span) -> None:
    """Evaluations communicate as well. A rank that hangs is in the same operation all the time."""
    noted = {}
    for one in now:
        before = memory.communicators.get((one.number, one.position))
        if before is not None and _done(before) == _done(one):
            one = replace(one, unchanged_seconds=before.unchanged_seconds + span.seconds)
        noted[one.number, one.position] = one
    memory.communicators = noted


def _done(one: Communicator) -> tuple[object, ...]:
    return one.started, one.finished, one.last_started, one.last_finished


def _communicator_message(one: Communicator) -> NcclCommunicator:
    message = NcclCommunicator()
    for name, value in vars(one).items():
        if isinstance(value, tuple):
            getattr(message, name).CopyFrom(NcclOperation(function=value[0], sequence=value[1]))
        elif value is not None:
            setattr(message, name, value)
    return message


def _since_step(memory: _Memory, sample: StepSample, span: Span) -> float:
    """Windows are as long as they really were, even if the clock was set. So only a rank's first window relies on the
    time of its last step."""
    assert sample.last_step_unix_nanos is not None
    seconds = max(0.0, (span.end_unix_nanos - sample.last_step_unix_nanos) / 1e9)
    if memory.steps_total == sample.steps_total:
        seconds = memory.since_step_seconds
    elif memory.steps_total is not None:
        seconds = min(seconds, span.seconds)
    memory.steps_total, memory.since_step_seconds = sample.steps_total, seconds
    return seconds


def _stall_by_stacks(
    memory: _Memory, sample: StackSample | None, process: ProcessSample | None, span: Span
) -> Stall | None:
    """Without step records, a hang is a training thread that stays at one place in a process that uses no CPU."""
    cpu_seconds = None if process is None else process.cpu_seconds
    # One tick may be of the window before, and is 2 % of a window of half a second.
    idle_cpu_seconds = STILL_CPU_RATIO * span.seconds + 1.0 / CLOCK_TICKS_PER_SECOND
    if cpu_seconds is None or cpu_seconds > idle_cpu_seconds:
        memory.still_frames = None
    else:
        memory.still_seconds += span.seconds
        if sample is not None and sample.span.end_unix_nanos != memory.seen_recording_end:
            _note_recording(memory, sample, span)
    if sample is not None:
        memory.seen_recording_end = sample.span.end_unix_nanos
    enough = memory.still_recordings >= STILL_RECORDINGS and memory.still_samples >= STILL_SAMPLES
    if memory.still_frames is None or not enough:
        return None
    return Stall(
        seconds_since_step=memory.still_seconds, phase=memory.still_phase, same_stack_looks=memory.still_recordings
    )


def _note_recording(memory: _Memory, sample: StackSample, span: Span) -> None:
    frames = frozenset(counted.frame for counted in sample.frames)
    if sample.distinct_stacks != 1 or sample.samples < 1:
        memory.still_frames = None
    elif memory.still_frames == frames:
        memory.still_recordings += 1
        memory.still_samples += sample.samples
    else:
        memory.still_frames = frames
        began = (span.end_unix_nanos - sample.span.start_unix_nanos) / 1e9
        memory.still_seconds = min(max(0.0, began), RECORDING_SECONDS)
        memory.still_recordings = 1
        memory.still_samples = sample.samples
        memory.still_phase = max(sample.phase_counts, key=lambda name: sample.phase_counts[name], default=None)


def _line(frame: Frame) -> str:
    return printable(f"{frame.function} ({frame.file}:{frame.line})", NAME_CHARACTERS)


class PaceWatch:
    """Which jobs have become slower than in the windows before."""

    def __init__(self) -> None:
        self._recent: dict[RankKey, deque[float]] = {}

    def slower_jobs(self, windows: Mapping[RankKey, RankWindow]) -> set[str]:
        """Call after every window."""
        for key in self._recent.keys() - windows.keys():
            del self._recent[key]
        slower = set()
        for key, window in windows.items():
            step_seconds = window.step_seconds.mean
            if not step_seconds > 0:
                continue
            recent = self._recent.setdefault(key, deque(maxlen=WINDOWS_OF_A_PACE))
            if len(recent) >= 2 and step_seconds > SLOWER_RATIO * median(recent):
                slower.add(window.identity.job)
            recent.append(step_seconds)
        return slower
