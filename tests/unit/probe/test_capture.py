"""Captures, driven boundary by boundary with a profiler that only takes notes."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.daemon.captures import probe_commands as commands
from rankscope.daemon.captures.orders import Options
from rankscope.daemon.captures.probe_commands import Answer, Command
from rankscope.probe import capture, ring_layout
from rankscope.probe.capture import Captures
from rankscope.probe.ring import Ring
from tests.support.waiting import wait_until

SECOND = 1_000_000_000


class Notes:
    """Stands for torch: what its profiler was made to do, and at which step."""

    def __init__(self) -> None:
        self.step = 0
        self.events: list[str] = []
        self.fails = False
        self.capturing_a_graph = False
        self.profiler_enabled = False
        notes = self

        class Profile:
            def __init__(self, activities: list[str], **options: bool) -> None:
                notes.note("made", *activities, *options)

            def prepare_trace(self) -> None:
                notes.profiler._prepare_profiler()
                notes.note("prepare")

            def start_trace(self) -> None:
                notes.profiler._enable_profiler()
                notes.note("start")

            def stop_trace(self) -> None:
                if notes.fails:
                    raise ValueError("no\nprofiler")
                notes.profiler._disable_profiler()
                notes.note("stop")

            def export_chrome_trace(self, path: str) -> None:
                Path(path + ".tmp").write_text("{}")
                Path(path + ".tmp").rename(path)

        class RecordFunction:
            def __init__(self, name: str) -> None:
                self.name = name

            def __enter__(self) -> None:
                notes.note("enter", self.name)

            def __exit__(self, *args: object) -> None:
                notes.note("leave", self.name)

        self.record_function = RecordFunction
        self.profiler = SimpleNamespace(
            _prepare_profiler=lambda: None,
            _enable_profiler=lambda: setattr(self, "profiler_enabled", True),
            _disable_profiler=lambda: setattr(self, "profiler_enabled", False),
            record_function=RecordFunction,
        )
        autograd = SimpleNamespace(
            profiler=self.profiler,
            _profiler_enabled=lambda: self.profiler_enabled,
            _disable_profiler=lambda: self.profiler._disable_profiler(),
        )
        self.torch = SimpleNamespace(
            autograd=autograd,
            cuda=SimpleNamespace(
                is_initialized=lambda: True, is_current_stream_capturing=lambda: self.capturing_a_graph
            ),
            profiler=SimpleNamespace(_KinetoProfile=Profile, ProfilerActivity=SimpleNamespace(CPU="cpu", CUDA="cuda")),
        )
        self.profiler.torch = self.torch

    def note(self, *words: str) -> None:
        self.events.append(" ".join((str(self.step), *words)))


class Loop:
    """A training process of one optimizer, and the daemon that asks it."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.ring = Ring()
        self.captures = Captures(notes.torch)
        self.number = 0

    def ask(self, **changes: Any) -> None:
        self.number = commands.new_number()
        now = time.time_ns()
        fields: dict[str, Any] = {
            "number": self.number,
            "start_unix_nanos": now,
            "start_step": 0,
            "warmup_steps": 0,
            "steps": 2,
            "length_nanos": 60 * SECOND,
            "give_up_unix_nanos": now + 60 * SECOND,
            "options": Options(),
        }
        self.command = Command(**(fields | changes))
        commands.write_command(self.ring._fd, self.command)

    def drop(self) -> None:
        commands.drop(self.ring._fd, self.command)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.notes.step += 1
            with self.notes.record_function("Optimizer.step"):
                self.captures.at_boundary(self.ring, self.notes.step, is_inside_step=True)

    @property
    def answer(self) -> Answer | None:
        answer = commands.read_answer(self.ring._fd)
        return answer if answer is not None and answer.number == self.number else None

    @property
    def phase(self) -> int:
        assert self.answer is not None
        return self.answer.phase

    def wait_for(self, phase: int) -> Answer:
        wait_until(lambda: self.answer is not None and self.answer.phase == phase, lambda: self.answer)
        assert self.answer is not None
        return self.answer

    @property
    def profiled(self) -> list[str]:
        return [event for event in self.notes.events if "Optimizer" not in event]


class Clock:
    """The time of the process, which passes when a test says so."""

    def __init__(self) -> None:
        self._unix_ns, self._monotonic_ns, self.passed_ns = time.time_ns(), time.monotonic_ns(), 0

    def time_ns(self) -> int:
        return self._unix_ns + self.passed_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns + self.passed_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(capture, "time", clock)
    return clock


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    notes = Notes()
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", notes.profiler)  # type: ignore[arg-type]
    monkeypatch.setattr(capture.atexit, "register", lambda action: None)
    loop = Loop(notes)
    yield loop
    if loop.number:
        # What is left running would complain on stderr about a ring that is gone, in another test.
        loop.drop()
        loop.steps(1)
    loop.captures._handover.wait(180.0)
    loop.ring.abandon()


def test_the_requested_steps_are_recorded_from_the_agreed_step(loop: Loop) -> None:
    loop.ask(start_step=4, steps=2, options=Options(shapes=True, flops=True))
    loop.steps(3)
    assert loop.phase == ring_layout.PHASE_ARMED
    loop.steps(2)
    assert loop.phase == ring_layout.PHASE_RUNNING
    loop.steps(4)
    assert loop.profiled == [
        "4 made cpu cuda record_shapes with_flops",
        "4 prepare",
        "4 start",
        "4 enter ProfilerStep#5",
        "5 leave ProfilerStep#5",
        "5 enter ProfilerStep#6",
        "6 leave ProfilerStep#6",
        "6 stop",
    ]
    answer = loop.wait_for(ring_layout.PHASE_WRITTEN)
    assert (answer.first_step, answer.steps, answer.trace_bytes) == (5, 2, 2)
    assert os.pread(answer.fd, 10, 0) == b"{}"
    loop.drop()
    loop.captures._handover.wait(180.0)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(answer.fd)


def test_profiling_starts_and_stops_outside_of_the_optimizers_annotation(loop: Loop) -> None:
    loop.ask(start_step=3, steps=1)
    loop.steps(5)
    events = loop.notes.events
    assert events.index("3 leave Optimizer.step") < events.index("3 start")
    assert events.index("4 leave Optimizer.step") < events.index("4 stop")
    assert loop.notes.record_function.__exit__.__qualname__.endswith("RecordFunction.__exit__"), "still patched"


def test_where_steps_have_no_annotation_the_boundary_itself_will_do(loop: Loop) -> None:
    loop.ask(start_step=3, steps=2)
    for _ in range(6):
        loop.notes.step += 1
        loop.captures.at_boundary(loop.ring, loop.notes.step, is_inside_step=True)
    assert "3 start" in loop.profiled
    assert "5 stop" in loop.profiled


def test_windows_repeat_after_equal_steps_and_are_delivered_together(loop: Loop) -> None:
    loop.ask(start_step=4, wait_steps=2, warmup_steps=1, steps=2, windows=3)
    loop.steps(17)
    assert [event for event in loop.profiled if event.endswith(("prepare", "start", "stop"))] == [
        "5 prepare", "6 start", "8 stop",
        "10 prepare", "11 start", "13 stop",
        "15 prepare", "16 start",
    ]  # fmt: skip
    loop.steps(1)
    answer = loop.wait_for(ring_layout.PHASE_WRITTEN)
    assert (answer.first_step, answer.steps) == (7, 6)
    packed = os.pread(answer.fd, 100, 0)
    assert packed.startswith(b"{}{}{}") and packed.endswith(ring_layout.WINDOWS_MARK)
    assert not loop.captures.active


def test_windows_without_a_pause_begin_where_the_one_before_ended(loop: Loop) -> None:
    loop.ask(start_step=2, steps=1, windows=2)
    loop.steps(5)
    assert [event for event in loop.profiled if event.endswith(("start", "stop"))] == [
        "2 start", "3 stop", "3 start", "4 stop",
    ]  # fmt: skip


def test_a_users_profiler_between_windows_ends_the_capture_early(loop: Loop) -> None:
    loop.ask(start_step=2, wait_steps=3, steps=1, windows=2)
    loop.steps(7)
    loop.notes.profiler._prepare_profiler()
    loop.steps(4)
    answer = loop.wait_for(ring_layout.PHASE_WRITTEN)
    assert answer.steps == 1 and "stopped early: a profiler of the user's own began" in answer.text
    assert [event for event in loop.profiled if event.endswith("start")] == ["5 start"]


def test_a_thread_that_ends_between_windows_ends_the_capture(loop: Loop) -> None:
    loop.ask(start_step=2, wait_steps=5, steps=1, windows=2)
    loop.steps(9)
    loop.captures._thread_ends()
    assert loop.phase == ring_layout.PHASE_FAILED
    assert not loop.captures.active


def test_waiting_and_warming_up_come_before_recording(loop: Loop) -> None:
    loop.ask(start_step=4, wait_steps=3, warmup_steps=2, steps=1)
    loop.steps(9)
    assert [event for event in loop.profiled if "Step" not in event] == [
        "5 made cpu cuda",
        "5 prepare",
        "7 start",
        "8 stop",
    ]


def test_recording_by_time_ends_at_the_first_boundary_after_it(loop: Loop, clock: Clock) -> None:
    loop.ask(start_unix_nanos=clock.time_ns(), steps=0, length_nanos=SECOND)
    loop.steps(3)
    assert loop.phase == ring_layout.PHASE_RUNNING
    clock.passed_ns += SECOND
    loop.steps(1)
    assert loop.wait_for(ring_layout.PHASE_WRITTEN).steps == 3


def test_a_start_in_the_future_is_waited_for(loop: Loop, clock: Clock) -> None:
    loop.ask(start_unix_nanos=clock.time_ns() + SECOND)
    loop.steps(3)
    assert loop.profiled == []
    clock.passed_ns += SECOND
    loop.steps(1)
    assert loop.phase == ring_layout.PHASE_RUNNING


@pytest.mark.parametrize("prepared_only", [True, False])
def test_a_profiler_of_the_users_is_waited_for(prepared_only: bool, loop: Loop) -> None:
    loop.notes.profiler._prepare_profiler()
    if not prepared_only:
        loop.notes.profiler._enable_profiler()
    loop.ask()
    loop.steps(3)
    assert loop.phase == ring_layout.PHASE_HELD
    assert loop.profiled == []
    loop.notes.profiler._disable_profiler()
    loop.steps(1)
    assert loop.phase == ring_layout.PHASE_RUNNING


def test_a_profiler_of_the_users_that_begins_goes_first(loop: Loop) -> None:
    loop.ask(steps=100)
    loop.steps(2)
    assert loop.notes.profiler_enabled
    loop.notes.profiler._prepare_profiler()
    assert not loop.notes.profiler_enabled
    assert loop.phase == ring_layout.PHASE_FAILED
    assert not loop.captures.active


def test_a_deadline_that_passes_ends_it(loop: Loop, clock: Clock) -> None:
    loop.notes.profiler._prepare_profiler()
    loop.ask(give_up_unix_nanos=clock.time_ns() + SECOND)
    loop.steps(2)
    clock.passed_ns += SECOND + 1
    loop.steps(1)
    assert loop.answer is not None and "profiler of the user's own" in loop.answer.text
    assert not loop.captures.active


def test_a_capture_that_is_dropped_leaves_nothing_running(loop: Loop) -> None:
    loop.ask(steps=100)
    loop.steps(3)
    loop.drop()
    loop.steps(1)
    assert loop.profiled[-1].endswith("stop")
    assert not loop.captures.active


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 1_000_000},
        {"length_nanos": 3600 * SECOND},
        {"length_nanos": -1},
        {"start_step": -5},
        {"warmup_steps": 100_000},
        {"windows": 21},
        {"give_up_unix_nanos": 1},
        {"give_up_unix_nanos": 1 << 62},
    ],
    ids=str,
)
def test_a_request_beyond_bounds_is_refused_with_the_reason(changes: dict[str, int], loop: Loop) -> None:
    loop.ask(**changes)
    loop.steps(3)
    assert loop.phase == ring_layout.PHASE_FAILED
    assert loop.answer is not None and loop.answer.text.startswith("the probe refused: ")
    assert loop.profiled == []


@pytest.mark.parametrize("place", [ring_layout.COMMAND_BODY_OFFSET + 3, ring_layout.COMMAND_BODY_OFFSET + 20])
def test_a_damaged_command_is_ignored(place: int, loop: Loop) -> None:
    loop.ask()
    loop.ring._memory[place] ^= 1
    loop.steps(3)
    assert loop.answer is None
    assert loop.profiled == []


def test_steps_on_a_thread_of_autograds_own_are_refused(loop: Loop) -> None:
    import _thread

    loop.ask()
    done = threading.Event()
    _thread.start_new_thread(lambda: (loop.steps(1), done.set()), ())
    assert done.wait(180)
    assert loop.answer is not None and "thread of autograd" in loop.answer.text


def test_nothing_starts_or_stops_during_cuda_graph_capture(loop: Loop) -> None:
    loop.ask(start_step=3, steps=1)
    loop.steps(2)
    loop.notes.capturing_a_graph = True
    loop.steps(3)
    assert loop.profiled == []
    loop.notes.capturing_a_graph = False
    loop.steps(1)
    assert loop.phase == ring_layout.PHASE_RUNNING


def test_a_failure_ends_captures_and_leaves_no_profiler_running(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    loop.ask(steps=1)
    loop.notes.fails = True
    loop.steps(3)
    assert loop.phase == ring_layout.PHASE_OFF
    assert not loop.notes.profiler_enabled
    assert capsys.readouterr().err == (
        "rankscope: captures disabled: ValueError: no profiler; training is not affected\n"
    )
    loop.ask()
    loop.steps(3)
    assert loop.answer is None


def test_scarce_memory_refuses_a_capture_and_ends_one_early(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "memory_left_bytes", lambda: 10 << 20)
    loop.ask()
    loop.steps(2)
    assert loop.answer is not None and "only 10 MB" in loop.answer.text
    monkeypatch.setattr(capture, "memory_left_bytes", lambda: 800 << 20)
    monkeypatch.setattr(capture, "resident_bytes", lambda: loop.notes.step * (40 << 20))
    loop.ask(steps=50)
    loop.steps(6)
    answer = loop.wait_for(ring_layout.PHASE_WRITTEN)
    assert "memory would have become short" in answer.text
    assert answer.steps == 3


def test_a_fork_ends_the_capture_and_children_take_no_commands(loop: Loop) -> None:
    loop.ask(steps=100)
    loop.steps(2)
    loop.captures.before_fork()
    assert not loop.notes.profiler_enabled
    assert loop.answer is not None and "forked" in loop.answer.text
    loop.captures.after_fork_in_child()
    loop.ask()
    loop.steps(3)
    assert loop.answer is None


def dumping(loop: Loop, **dumps: bytes) -> list[dict[str, bool]]:
    """Gives torch flight recorders by name; returns with which arguments they are dumped."""
    asked: list[dict[str, bool]] = []

    def recorder(content: bytes, **arguments: bool) -> bytes:
        asked.append(arguments)
        return pickle.dumps({"pg_status": {"0": {}} if content else {}}) if len(asked) % 2 else content

    made = {name: partial(recorder, content) for name, content in dumps.items()}
    loop.notes.torch._C = SimpleNamespace(_distributed_c10d=SimpleNamespace(**made))
    return asked


def test_the_flight_recorder_is_delivered_without_stacks_until_dropped(loop: Loop) -> None:
    asked = dumping(loop, _dump_fr_trace=b"records")
    loop.ask(verb=ring_layout.VERB_RECORDER)
    loop.steps(2)
    assert loop.answer is None and not asked, "steps end, so nothing is dumped"
    loop.captures.hand_over_recorder(loop.ring)
    answer = loop.wait_for(ring_layout.PHASE_WRITTEN)
    assert os.pread(answer.fd, 99, 0) == b"records"
    assert asked == [{"includeCollectives": False}, {"includeStackTraces": False}]
    loop.captures.hand_over_recorder(loop.ring)
    assert len(asked) == 2, "a command is answered once"
    loop.drop()
    loop.captures._handover.wait(180.0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(answer.fd)


def test_an_undumpable_recorder_gives_a_reason_and_captures_continue(loop: Loop) -> None:
    for dump, words in ((b"", "TORCH_FR_BUFFER_SIZE=2000"), (bytes(ring_layout.MAX_RECORDER_BYTES + 1), "bytes")):
        dumping(loop, _dump_fr_trace=dump)
        loop.ask(verb=ring_layout.VERB_RECORDER)
        loop.captures.hand_over_recorder(loop.ring)
        assert loop.phase == ring_layout.PHASE_FAILED and loop.answer is not None and words in loop.answer.text
    loop.ask()
    loop.steps(4)
    loop.wait_for(ring_layout.PHASE_WRITTEN)


def test_commands_that_are_late_or_for_captures_dump_nothing(loop: Loop) -> None:
    asked = dumping(loop, _dump_fr_trace=b"records")
    for changes in ({"verb": ring_layout.VERB_RECORDER, "give_up_unix_nanos": time.time_ns() - 1}, {}):
        loop.ask(**changes)
        loop.captures.hand_over_recorder(loop.ring)
    assert not asked and loop.answer is None
