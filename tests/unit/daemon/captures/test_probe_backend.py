"""The daemon's side of captures by the probe; rings and answers here are made by the test, rightly and wrongly."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.daemon.captures import probe_backend
from rankscope.daemon.captures import probe_commands as commands
from rankscope.daemon.captures.orders import (
    CancelledError,
    CaptureError,
    NoStepsError,
    Options,
    Order,
    Recording,
    Stage,
    Workspace,
)
from rankscope.daemon.captures.probe_backend import ProbeBackend
from rankscope.daemon.captures.probe_commands import take_apart
from rankscope.daemon.procfs import read_stat
from rankscope.daemon.samples import RankProcess
from rankscope.probe import capture_commands, ring_layout
from rankscope.probe.capture_commands import Answer, Command
from tests.support.waiting import wait_until
from tests.unit.daemon.ring_writer import ME, Writer

RANK = replace(ME, start_ticks=read_stat("/proc/self").start_ticks)
ALL_SEALS = ring_layout.F_SEAL_SHRINK | ring_layout.F_SEAL_GROW | ring_layout.F_SEAL_WRITE | ring_layout.F_SEAL_SEAL


def order(patience_seconds: float = 180.0, **changes: object) -> Order:
    start = time.time()
    made = Order("c", RANK, 3, None, round(start * 1000), start + patience_seconds)
    return replace(made, **changes)  # type: ignore[arg-type]


@contextmanager
def sealed(content: bytes, name: str = ring_layout.TRACE_NAME, seals: int = ALL_SEALS) -> Iterator[int]:
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, content)
        fcntl.fcntl(fd, ring_layout.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


class Probe:
    """Plays the probe: waits for a command, and answers it as the test says."""

    def __init__(self, writer: Writer) -> None:
        self._ring = writer.ring
        self.commands: list[Command] = []
        self._mark = bytes(4)

    def next_command(self) -> Command:
        wait_until(lambda: self._ring.command_mark() != self._mark)
        self._mark = self._ring.command_mark()
        command = capture_commands.read_command(self._ring, self._mark)
        assert command is not None
        self.commands.append(command)
        return command

    def tell(self, phase: int, text: str = "", **fields: int) -> None:
        Answer(self._ring, self.commands[0].number).report(phase, text, **fields)


class Capture:
    """A record() under way."""

    def __init__(self, workspace: Path, asked: Order) -> None:
        self.cancelled = threading.Event()
        self.stages: list[Stage] = []
        self.result: Recording | CaptureError | None = None

        def record() -> None:
            try:
                self.result = ProbeBackend().record(asked, Workspace(workspace), self.stages.append, self.cancelled)
            except CaptureError as error:
                self.result = error

        self.thread = threading.Thread(target=record)
        self.thread.start()

    def end(self) -> Recording | CaptureError | None:
        self.thread.join(180)
        assert not self.thread.is_alive()
        return self.result


def test_a_trace_is_fetched_and_the_probe_drops_it(writer: Writer, tmp_path: Path) -> None:
    probe, capture = Probe(writer), Capture(tmp_path, order())
    command = probe.next_command()
    assert (command.verb, command.steps, command.start_step) == (ring_layout.VERB_CAPTURE, 3, 0)
    with sealed(b"the trace") as fd:
        # Short captures are over before the daemon looks; every stage is told all the same.
        probe.tell(ring_layout.PHASE_WRITTEN, steps=3, fd=fd, size=9, first_step=7, start_unix_ns=5_000_000)
        dropped = probe.next_command()
        result = capture.end()
    assert isinstance(result, Recording), result
    assert result.path.read_bytes() == b"the trace"
    assert (result.steps, result.start_unix_millis, result.is_trace) == (3, 5, True)
    assert capture.stages == [Stage.ARMED, Stage.RUNNING]
    assert (dropped.verb, dropped.start_step) == (ring_layout.VERB_DROP, command.number)


def packed(*windows: bytes, mark: bytes = ring_layout.WINDOWS_MARK, count: int | None = None) -> bytes:
    sizes = b"".join(ring_layout.WINDOW_BYTES.pack(len(window)) for window in windows)
    return b"".join(windows) + sizes + ring_layout.WINDOWS.pack(len(windows) if count is None else count, mark)


def test_a_schedule_is_passed_on_and_its_windows_split(writer: Writer, tmp_path: Path) -> None:
    options = Options(shapes=True, wait_steps=7, warmup_steps=2, repeat=3)
    probe, capture = Probe(writer), Capture(tmp_path, order(options=options))
    command = probe.next_command()
    assert (command.wait_steps, command.warmup_steps, command.windows, command.steps) == (7, 2, 3, 3)
    assert command.options == {"record_shapes": True}
    with sealed(packed(b"first", b"", b"the third")) as fd:
        probe.tell(ring_layout.PHASE_WRITTEN, steps=9, fd=fd)
        result = capture.end()
    assert isinstance(result, Recording), result
    assert [path.name for path in (result.path, *result.more_windows)] == [
        "rank3.json", "rank3.window2.json", "rank3.window3.json",
    ]  # fmt: skip
    assert [path.read_bytes() for path in (result.path, *result.more_windows)] == [b"first", b"", b"the third"]
    assert result.steps == 9 and not any("of 9" in note for note in result.notes)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b"a trace without sizes",
        packed(b"a", mark=b"ANOTHER!"),
        packed(b"a", count=2),
        packed(b"a", count=0),
        packed(b"a", count=(1 << 32) - 1),
        packed(b"a", b"b", b"c", b"d"),  # more than were asked for
        b"more" + packed(b"a"),
        packed(b"a")[1:],
    ],
)
def test_windows_that_the_probe_did_not_pack_are_not_kept(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rank3.json"
    path.write_bytes(content)
    with pytest.raises(CaptureError, match="rank 3: what the probe handed over is not a trace of several windows"):
        take_apart(path, 3, "rank 3")


@pytest.mark.parametrize(
    ("name", "seals", "words"),
    [
        ("somebody-elses", ALL_SEALS, "not a trace of the probe's"),
        (ring_layout.TRACE_NAME, ring_layout.F_SEAL_GROW, "not sealed"),
    ],
)
def test_what_is_not_a_sealed_trace_is_not_touched(
    name: str, seals: int, words: str, writer: Writer, tmp_path: Path
) -> None:
    probe, capture = Probe(writer), Capture(tmp_path, order())
    probe.next_command()
    with sealed(b"secret", name, seals) as fd:
        probe.tell(ring_layout.PHASE_WRITTEN, fd=fd)
        assert words in str(capture.end())
    assert not list(tmp_path.iterdir())


def test_a_file_on_disk_is_not_taken_as_a_trace(writer: Writer, tmp_path: Path) -> None:
    probe, capture = Probe(writer), Capture(tmp_path, order())
    probe.next_command()
    fd = os.open("/etc/passwd", os.O_RDONLY)
    try:
        probe.tell(ring_layout.PHASE_WRITTEN, fd=fd)
        assert "not a trace" in str(capture.end())
    finally:
        os.close(fd)


@pytest.mark.parametrize("fd", [-1, 1 << 30, 99_999])
def test_a_forged_descriptor_is_an_error_and_nothing_else(fd: int, writer: Writer, tmp_path: Path) -> None:
    probe, capture = Probe(writer), Capture(tmp_path, order())
    probe.next_command()
    probe.tell(ring_layout.PHASE_WRITTEN, fd=fd)
    assert isinstance(capture.end(), CaptureError)


def test_a_trace_beyond_the_limit_is_refused(writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_SIZE_BYTES", 4)
    probe, capture = Probe(writer), Capture(tmp_path, order())
    probe.next_command()
    with sealed(b"12345") as fd:
        probe.tell(ring_layout.PHASE_WRITTEN, fd=fd)
        assert "capture fewer steps" in str(capture.end())


def test_a_probes_error_is_reported_without_control_characters(writer: Writer, tmp_path: Path) -> None:
    probe, capture = Probe(writer), Capture(tmp_path, order())
    probe.next_command()
    probe.tell(ring_layout.PHASE_FAILED, "no \x1b[31mmemory")
    assert str(capture.end()) == f"rank 3 (pid {RANK.pid}): no �[31mmemory"


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (0, "no step has ended since the capture was asked for"),
        (ring_layout.PHASE_ARMED, "no step has ended since the capture was to begin"),
        (ring_layout.PHASE_HELD, "a profiler of the user's own is active"),
    ],
)
def test_a_rank_that_times_out_is_reported_and_dropped(
    phase: int, words: str, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[commands.Command] = []

    def write_command(ring: int, command: commands.Command) -> None:
        """The probe answers at once: the patience is short, and a test may be late."""
        written.append(command)
        if phase and command.verb == ring_layout.VERB_CAPTURE:
            Answer(writer.ring, command.number).report(phase)

    monkeypatch.setattr(commands, "write_command", write_command)
    capture = Capture(tmp_path, order(patience_seconds=0.5))
    error = capture.end()
    assert words in str(error)
    assert isinstance(error, NoStepsError) is words.startswith("no step"), "stacks are recorded instead"
    assert [command.verb for command in written] == [ring_layout.VERB_CAPTURE, ring_layout.VERB_DROP]


def test_a_rank_that_stands_still_in_mid_capture_is_told(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_backend, "STEP_SECONDS_ALLOWED", 0.2)
    probe, capture = Probe(writer), Capture(tmp_path, order(steps=None, seconds=0.1))
    probe.next_command()
    probe.tell(ring_layout.PHASE_RUNNING)
    assert "in the middle of the capture" in str(capture.end())


def test_cancelling_lets_the_process_go(writer: Writer, tmp_path: Path) -> None:
    probe, capture = Probe(writer), Capture(tmp_path, order())
    probe.next_command()
    probe.tell(ring_layout.PHASE_RUNNING)
    capture.cancelled.set()
    assert isinstance(capture.end(), CancelledError)
    assert probe.next_command().verb == ring_layout.VERB_DROP


def test_a_process_that_ends_is_told(writer: Writer, tmp_path: Path) -> None:
    gone = replace(RANK, start_ticks=RANK.start_ticks + 1)  # its pid is another's by now
    capture = Capture(tmp_path, order(rank=gone))
    assert "ended during the capture" in str(capture.end())


def test_fewer_steps_than_asked_for_are_noted_with_the_reason(writer: Writer, tmp_path: Path) -> None:
    probe, capture = Probe(writer), Capture(tmp_path, order())
    probe.next_command()
    with sealed(b"x") as fd:
        probe.tell(ring_layout.PHASE_WRITTEN, "memory would have become short", steps=2, fd=fd)
        result = capture.end()
    assert isinstance(result, Recording)
    assert any("2 steps were recorded, of 3; memory" in note for note in result.notes)


def test_ranks_are_objected_to_by_what_their_ring_says(writer: Writer) -> None:
    backend = ProbeBackend()
    assert backend.objection(RANK) is None
    assert "runs without the probe" in str(backend.objection(replace(RANK, pid=os.getppid())))
    assert "belongs to pid" in str(backend.objection(replace(RANK, namespace_pids=(1,))))
    Answer(writer.ring, 1).report(ring_layout.PHASE_OFF, "ValueError: broken")
    assert "ValueError: broken" in str(backend.objection(RANK))
    writer.ring.mark_disabled()
    assert "disabled itself" in str(backend.objection(RANK))


def test_a_ring_from_before_captures_is_reported_too_old(writer: Writer) -> None:
    ring_layout.ABILITIES.pack_into(writer.write, ring_layout.ABILITIES_OFFSET, 0)
    writer.step()
    assert "too old to capture" in str(ProbeBackend().objection(RANK))


@pytest.mark.parametrize(
    "place", range(ring_layout.ANSWER_OFFSET, ring_layout.ANSWER_OFFSET + ring_layout.ANSWER.size + 8, 4)
)
def test_a_damaged_answer_is_none(place: int, writer: Writer) -> None:
    Answer(writer.ring, 7).report(ring_layout.PHASE_FAILED, "text")
    assert commands.read_answer(writer.ring._fd) is not None
    writer.write[place : place + 4] = bytes(b ^ 0xFF for b in writer.write[place : place + 4])
    assert commands.read_answer(writer.ring._fd) is None


ANOTHER = """
import sys
from tests.unit.daemon.ring_writer import Writer
writer = Writer()
writer.end_ns = int(sys.argv[2])
writer.step(milliseconds=0, steps=int(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_rank(steps: int, end_ns: int) -> Iterator[RankProcess]:
    """A process of its own that has ended so many steps, the last at that time."""
    command = [sys.executable, "-c", ANOTHER, str(steps), str(end_ns)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield replace(RANK, pid=process.pid, namespace_pids=(process.pid,))
        finally:
            process.stdin.close()


def test_only_ranks_with_similar_counts_start_at_one_step(writer: Writer) -> None:
    backend, asked = ProbeBackend(), order()
    writer.step(milliseconds=10, steps=100)
    start_step = backend._agreed_step(asked, writer.ring._fd, 0.5)
    assert start_step > 100
    for counted, expected in ((101, start_step), (99, start_step), (103, 0), (57, 0)):
        with another_rank(counted, writer.end_ns) as rank, commands.opened(rank) as (ring, _):
            assert backend._agreed_step(replace(asked, rank=rank), ring, 0.5) == expected


def test_a_late_slow_rank_starts_at_the_agreed_step(writer: Writer) -> None:
    """A fault has just begun, and the machine is busy: the last steps took far longer than those before."""
    backend, asked = ProbeBackend(), order()
    writer.step(milliseconds=10, steps=100)
    start_step = backend._agreed_step(asked, writer.ring._fd, 0.001)
    with another_rank(101, writer.end_ns + 200_000_000) as rank, commands.opened(rank) as (ring, _):
        assert backend._agreed_step(replace(asked, rank=rank), ring, 0.001) == start_step


@pytest.mark.parametrize(("counted", "is_alike"), [(110, True), (140, False)])
def test_short_steps_between_two_records_do_not_count(writer: Writer, counted: int, is_alike: bool) -> None:
    """A rank writes a record in 10 ms, which are ten steps here."""
    backend, asked = ProbeBackend(), order()
    writer.step(milliseconds=10, steps=100)
    start_step = backend._agreed_step(asked, writer.ring._fd, 0.001)
    with another_rank(counted, writer.end_ns + 10_000_000) as rank, commands.opened(rank) as (ring, _):
        assert backend._agreed_step(replace(asked, rank=rank), ring, 0.001) == (start_step if is_alike else 0)


def test_ranks_start_by_time_after_the_agreeing_rank_ended() -> None:
    backend, asked = ProbeBackend(), order()
    end_ns = time.monotonic_ns()
    with another_rank(100, end_ns) as rank, commands.opened(rank) as (ring, _):
        assert backend._agreed_step(replace(asked, rank=rank), ring, 0.5) > 100
    with another_rank(100, end_ns) as rank, commands.opened(rank) as (ring, _):
        assert backend._agreed_step(replace(asked, rank=rank), ring, 0.5) == 0


@pytest.mark.parametrize(
    ("since_last", "left", "step_seconds", "expected"),
    [
        (0.1, 2.0, 0.5, 105),  # the first that ends at or after the start
        (0.0, 2.0, 0.5, 104),
        (0.1, 0.2, 0.5, 103),  # one that every rank can still see coming
        (0.05, 2.0, 0.1, 128),  # rounded up
        (3.0, 1.5, 10.0, 101),
        (9.5, 1.5, 10.0, 102),
    ],
)
def test_start_steps_follow_the_start_and_short_ones_round_up(
    since_last: float, left: float, step_seconds: float, expected: int
) -> None:
    assert probe_backend._start_step(100, since_last, left, step_seconds) == expected
