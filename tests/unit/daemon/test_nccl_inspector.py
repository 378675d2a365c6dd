"""NCCL Inspector's file as a source of collectives: what is believed of it, and what is not."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.daemon.steps import nccl_inspector
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.steps.nccl_inspector import InspectorLog
from rankscope.daemon.steps.nccl_times import NcclTimes
from rankscope.daemon.steps.ring_reader import RECORD_DTYPE
from rankscope.daemon.windows.window import INSPECTOR, OTHER_PLUGIN, RankSamples, assemble
from rankscope.probe import nccl_plugin, ring_layout
from tests.unit.daemon.inspector_writer import CHOSEN, MS, PID, US, InspectorWriter, make_process, operation, text_of
from tests.unit.daemon.ring_writer import ME, Writer, sample_of, window

CLOCK_NS = 1_790_000_000_000_000_000  # the wall clock less the process' own
FIRST_US = (CLOCK_NS + 5_000 * MS) // US  # the first step begins
STEP_US = 100_000


class Job:
    """A process with the file, at steps of 100 ms."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.now_us = FIRST_US
        self.writer = InspectorWriter(folder)
        self.log = InspectorLog(make_process(folder / "proc", CHOSEN | environment), PID, lambda: self.now_us * US)

    def read(self, steps: int) -> NcclTimes:
        """After so many steps since the last time."""
        made = np.zeros(steps, RECORD_DTYPE)
        ends_us = self.now_us + STEP_US * np.arange(1, steps + 1)
        made["end_ns"], made["span_ns"], made["steps"] = ends_us * US - CLOCK_NS, STEP_US * US, 1
        self.now_us += steps * STEP_US
        return self.log.read(CLOCK_NS, made)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    made.read(0)
    yield made
    made.writer.file.close()


def after(milliseconds: float) -> int:
    return FIRST_US + int(milliseconds * 1000)


@pytest.mark.parametrize("is_verbose", [True, False])
def test_waits_of_steps_are_those_of_the_lines(job: Job, is_verbose: bool) -> None:
    lasted_ms = [8, 20, 8]
    job.writer.write(
        *(operation(after(100 * n + 60), ms * 1000, n, is_verbose=is_verbose) for n, ms in enumerate(lasted_ms))
    )
    found = job.read(3)
    assert found.seconds == pytest.approx([0.008, 0.020, 0.008])
    assert found.wait_seconds == pytest.approx([0.008, 0.020, 0.008])
    (group,) = found.groups
    assert (group.number, group.size, group.position) == (0xF9AA123456789A & (1 << 53) - 1, 8, 2)
    assert (group.kind, group.samples, group.seconds) == (ring_layout.GROUP_NCCL, 3, pytest.approx(0.012))


@pytest.mark.parametrize(
    ("function", "array", "factor"), [("AllReduce", 1, 2), ("AllGather", 8, 1), ("ReduceScatter", 8, 1)]
)
def test_bus_bandwidth_is_that_of_inspector(job: Job, function: str, array: int, factor: int) -> None:
    job.writer.write(operation(after(50), 1000, 0, function=function))
    (rate,) = job.read(1).collectives
    assert rate.bytes_per_step == array << 20
    assert rate.bus_bytes_per_second == pytest.approx((array << 20) / 1e-3 * factor * 7 / 8)


def test_messages_are_apart_from_collectives(job: Job) -> None:
    message = operation(after(50), 5000, 1, function="Send", kind="p2p")
    job.writer.write(operation(after(30), 8000, 0), message)
    found = job.read(1)
    assert found.seconds == pytest.approx([0.008]) and found.wait_seconds == pytest.approx([0.013])
    assert {group.kind for group in found.groups} == {ring_layout.GROUP_NCCL, ring_layout.GROUP_POINT_TO_POINT}


def test_steps_with_a_missing_line_are_unknown(job: Job) -> None:
    stops = {0: 50, 1: 150, 3: 350, 4: 450}  # in milliseconds; the third was not written
    job.writer.write(*(operation(after(stop), 8000, sequence) for sequence, stop in stops.items()))
    found = job.read(5)
    assert found.seconds == pytest.approx([0.008, np.nan, np.nan, np.nan, 0.008], nan_ok=True)
    job.writer.write(operation(after(550), 8000, 6), operation(after(650), 8000, 7))
    assert job.read(2).seconds == pytest.approx([np.nan, 0.008], nan_ok=True)


def test_the_step_of_the_first_look_is_unknown(job: Job) -> None:
    job.log._since_ns += 1
    job.writer.write(operation(after(50), 8000, 0), operation(after(150), 8000, 1))
    assert job.read(2).seconds == pytest.approx([np.nan, 0.008], nan_ok=True)


def test_late_lines_give_bandwidth_only(job: Job) -> None:
    job.writer.write(*(operation(after(100 * n + 50), 8000, n, lag_us=50_000) for n in range(3)))
    found = job.read(4)
    assert found.seconds is None and found.wait_seconds is None and found.groups == ()
    assert found.collectives[0].operations == 3


def test_lines_that_seem_to_overlap_give_no_bandwidth(tmp_path: Path) -> None:
    job = Job(tmp_path, NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS="1000000")
    job.read(0)
    apart = [operation(after(100 * n + 50), 1000, n, is_verbose=False) for n in range(3)]
    together = [operation(after(370) + n, 1000, 3 + n, is_verbose=False) for n in range(5)]
    job.writer.write(*apart, *together)
    found = job.read(4)
    job.writer.file.close()
    assert found.seconds is None and found.groups == ()
    (rate,) = found.collectives
    assert rate.operations == 3 and rate.bytes_per_step == pytest.approx((8 << 20) / 4)
    assert rate.bus_bytes_per_second == pytest.approx((1 << 20) / 1e-3 * 2 * 7 / 8)


def test_a_half_written_line_is_read_once_complete(job: Job) -> None:
    whole = text_of(operation(after(150), 8000, 1))
    job.writer.write(operation(after(50), 8000, 0))
    job.writer.file.write(whole[:200])
    assert job.read(1).seconds == pytest.approx([0.008])
    job.writer.file.write(whole[200:])
    assert job.read(1).seconds == pytest.approx([0.008])


def test_what_ends_after_the_last_step_belongs_to_the_next(job: Job) -> None:
    job.writer.write(operation(after(50), 8000, 0), operation(after(101), 3000, 1))
    job.now_us = after(102)  # the daemon reads a little after the step
    found = job.log.read(CLOCK_NS, _step_ending(after(100)))
    assert found.seconds == pytest.approx([0.008])
    job.now_us = after(200)
    assert job.log.read(CLOCK_NS, _step_ending(after(200))).seconds == pytest.approx([0.003])


def _step_ending(end_us: int) -> Any:
    made = np.zeros(1, RECORD_DTYPE)
    made["end_ns"], made["span_ns"], made["steps"] = end_us * US - CLOCK_NS, STEP_US * US, 1
    return made


def test_a_truncated_file_is_read_from_its_end(job: Job) -> None:
    job.writer.write(*(operation(after(50), 8000, 0),) * 3)
    job.read(1)
    os.ftruncate(job.writer.file.fileno(), 0)
    job.writer.file.seek(0)
    assert job.read(1) == NcclTimes()
    job.writer.write(operation(after(250), 8000, 1))
    assert job.read(1).seconds == pytest.approx([0.008])


def test_another_file_is_read_from_its_end(job: Job, tmp_path: Path) -> None:
    job.writer.write(operation(after(50), 8000, 0))
    job.read(1)
    job.writer.file.close()
    job.writer.path.rename(tmp_path / "before.log")
    job.writer = InspectorWriter(tmp_path)
    job.writer.write(operation(after(150), 8000, 1), operation(after(150), 8000, 2))
    assert job.read(1) == NcclTimes()
    job.writer.write(operation(after(250), 8000, 3))
    assert job.read(1).seconds == pytest.approx([0.008])


def test_reads_are_bounded_and_take_the_newest(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.writer.write(*(operation(after(n / 110), 5, n, channels=16) for n in range(10_000)))
    sizes: list[int] = []
    pread = os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(nccl_inspector.os, "pread", counted)
    found = job.read(1)
    assert sizes == [nccl_inspector.MAX_READ_BYTES]
    assert found.seconds is None and found.groups[0].seconds == pytest.approx(10_000 * 5e-6, rel=0.01)
    assert job.read(1) == NcclTimes()


def test_lines_are_bounded_in_number(job: Job) -> None:
    good = text_of(operation(after(50), 8000, 0))
    start = time.process_time()
    lines = nccl_inspector.parse_lines(good + b"\n" * (1 << 21) + good, 10, PID, CLOCK_NS, after(90) * US - CLOCK_NS)
    assert len(lines.table) == 1 and lines.skipped and time.process_time() - start < 1
    assert lines.end == 10 + 2 * len(good) + (1 << 21)


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    line = operation(after(70), 500, 99, communicator="0xbad")
    change(line)
    return text_of(line)


def _ends(line: dict[str, Any], stop_us: int) -> None:
    for event in line["coll_perf"]["event_trace_ts"]["kernel_events"]:
        event["kernel_stop_ts"] = stop_us


HOSTILE = {
    "garbage": b"\xff\xfe{}\n",
    "not an object": b"[1, 2]\n",
    "deep": b'{"header":' + b"[" * 50_000 + b"\n",
    "deep and unknown": changed(lambda line: None)[:-2] + b',"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}\n",
    "a huge line": changed(lambda line: line.update(x="y" * nccl_inspector.MAX_LINE_BYTES)),
    "another process": changed(lambda line: line["metadata"].update(pid=1)),
    "a pid that is none": changed(lambda line: line["metadata"].update(pid="1")),
    "the future": changed(lambda line: line["metadata"].update(dump_timestamp_us=1 << 52)),
    "ended in the future": changed(lambda line: _ends(line, after(60_000))),
    "a time out of range": changed(lambda line: line["metadata"].update(dump_timestamp_us=1 << 70)),
    "a negative time": changed(lambda line: line["metadata"].update(dump_timestamp_us=-5)),
    "before the clock began": changed(lambda line: (_ends(line, 5), line["metadata"].update(dump_timestamp_us=5))),
    "a length out of range": changed(lambda line: line["coll_perf"].update(coll_exec_time_us=1 << 62)),
    "a length that is NaN": changed(lambda line: line["coll_perf"].update(coll_exec_time_us=float("nan"))),
    "a fraction": changed(lambda line: line["coll_perf"].update(coll_exec_time_us=0.5)),
    "a rank beyond": changed(lambda line: line["header"].update(rank=8)),
    "too many ranks": changed(lambda line: line["header"].update(n_ranks=1 << 40)),
    "no communicator": changed(lambda line: line["header"].update(id="0x0")),
    "a communicator that is none": changed(lambda line: line["header"].update(id="0x" + "f" * 5000)),
    "a huge integer": changed(lambda line: None).replace(b'"rank":2', b'"rank":' + b"9" * 5000),
    "a huge sequence": changed(lambda line: line["coll_perf"].update(coll_sn=1 << 60)),
    "nothing told": changed(lambda line: line.pop("coll_perf")),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_line_is_not_believed(job: Job, name: str) -> None:
    job.writer.write(operation(after(40), 8000, 0))
    job.writer.file.write(HOSTILE[name])
    job.writer.write(operation(after(90), 4000, 1))
    found = job.read(1)
    assert found.seconds == pytest.approx([0.012])
    assert [group.number for group in found.groups] == [0xF9AA123456789A & (1 << 53) - 1]


def test_bytes_that_inspector_cannot_count_are_unknown(job: Job) -> None:
    """Of a data type that it does not know, it writes the count times -1."""
    job.writer.write(operation(after(50), 8000, 0, size_bytes=(1 << 64) - 4096))
    found = job.read(1)
    assert found.seconds == pytest.approx([0.008]) and found.collectives == ()


def test_communicators_are_bounded_in_number(job: Job) -> None:
    job.writer.write(*(operation(after(n / 20), 10, 0, communicator=f"{n + 1:#x}") for n in range(1000)))
    assert len(job.read(1).groups) == ring_layout.MAX_GROUPS


def test_a_sparse_file_is_read_within_the_bounds(job: Job) -> None:
    os.ftruncate(job.writer.file.fileno(), 1 << 40)
    start = time.process_time()
    for _ in range(3):
        assert job.read(1) == NcclTimes()
    assert time.process_time() - start < 1


def test_a_pipe_in_its_place_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / f"node-pid{PID}.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    try:
        assert not InspectorLog(make_process(tmp_path / "proc"), PID).look()
    finally:
        os.close(reader)
        os.close(writer)


def test_a_file_of_another_user_is_not_read(tmp_path: Path) -> None:
    writer = InspectorWriter(tmp_path)
    process = make_process(tmp_path / "proc")
    Path(process, "status").write_text("Uid:\t4242\t4242\t4242\t4242\n")
    for mode, is_read in ((0o600, False), (0o666, True)):
        writer.path.chmod(mode)
        assert InspectorLog(process, PID).look() is is_read
    writer.file.close()


@pytest.mark.parametrize(
    "environment",
    [
        {"NCCL_PROFILER_PLUGIN": "/opt/libother.so"},
        {"NCCL_PROFILER_PLUGIN": "/opt/inspector/libother.so"},
        {"NCCL_INSPECTOR_ENABLE": "0"},
        {"NCCL_INSPECTOR_ENABLE": ""},
    ],
)
def test_nothing_is_read_unless_inspector_was_chosen(tmp_path: Path, environment: dict[str, str]) -> None:
    job = Job(tmp_path, **environment)
    assert not job.log.look()
    job.writer.file.close()


def test_other_files_of_the_process_are_not_read(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.log.look()
    job.writer.file.close()
    for name, mode in ((f"node-pid{PID}1.log", "wb"), (f"node-pid{PID}.log", "rb")):
        (tmp_path / name).touch()
        with (tmp_path / name).open(mode):
            assert not job.log.look()


@pytest.fixture
def ring() -> Iterator[Writer]:
    made = Writer()
    made.ring.write_facts({"nccl_reason": nccl_plugin.OTHER})
    yield made
    made.ring.abandon()


def step(ring: Writer, milliseconds: float = 20) -> None:
    ring.step(milliseconds, flags=ring_layout.FLAG_DEVICE, device=(0.02, 0.0, float("nan")))


def test_the_windows_wait_is_inspectors(ring: Writer, tmp_path: Path) -> None:
    make_process(tmp_path / "proc")
    writer = InspectorWriter(tmp_path)
    collector = StepsCollector(tmp_path / "proc")
    step(ring)
    assert sample_of(collector).is_inspected
    ring.end_ns = time.monotonic_ns()
    for sequence in range(3):
        step(ring)
        ended_us = (ring.end_ns - 5 * MS + time.time_ns() - time.monotonic_ns()) // US
        writer.write(operation(ended_us, 8000, sequence))
    ring.ring.write_groups([(7, 4, 2, ring_layout.GROUP_POINT_TO_POINT, 10, 0.2, 0.5)])
    time.sleep(0.08)
    sample = sample_of(collector)
    writer.file.close()
    assert sample.communication_seconds == pytest.approx([0.008] * 3)
    # This Inspector tells no messages: those that the probe timed stay, and waiting is not known in whole.
    kinds = {group.kind for group in sample.groups}
    assert kinds == {ring_layout.GROUP_NCCL, ring_layout.GROUP_POINT_TO_POINT}
    assert sample.long_steps is None
    made = assemble(ME, "node", window(), 1, RankSamples(steps=sample), lambda _: None)
    assert made.wait_source == INSPECTOR and not made.problems and made.collectives


def test_another_plugin_without_files_is_a_problem(ring: Writer, tmp_path: Path) -> None:
    make_process(tmp_path / "proc", {"NCCL_PROFILER_PLUGIN": "/opt/libother.so"})
    step(ring)
    sample = sample_of(StepsCollector(tmp_path / "proc"))
    made = assemble(ME, "node", window(), 1, RankSamples(steps=sample), lambda _: None)
    assert not sample.is_inspected and list(made.problems) == [OTHER_PLUGIN]


def test_lines_of_a_newer_format_are_read() -> None:
    line = operation(after(50), 8000, 3)
    line["header"]["comm_name"] = "DP Group 0"
    now_ns = after(90) * US - CLOCK_NS
    lines = nccl_inspector.parse_lines(json.dumps(line).encode() + b"\n", 0, PID, CLOCK_NS, now_ns)
    assert lines.sequence.tolist() == [3] and lines.lag_us.tolist() == [80]
