"""Captures by the probe: real training processes, without libkineto's thread."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.steps import Steps, find_steps
from rankscope.analysis.traces.trace import Category, Trace
from rankscope.daemon.captures.orders import CaptureError, Options, Recording
from rankscope.daemon.steps import ring_reader
from rankscope.probe import ring_layout
from tests.integration.captured_job import CapturedJob, captured_job, holds_a_trace
from tests.support.measuring import Measured

EXPLICIT = """
import os, queue, sys, threading, torch
import rankscope.probe
orders = queue.SimpleQueue()
threading.Thread(target=lambda: [orders.put(line) for line in sys.stdin], daemon=True).start()
while True:
    torch.ones(64, 64) @ torch.ones(64, 64)
    rankscope.probe.step()
    if not orders.empty():
        print("did", orders.get(), end="", flush=True)
        break
"""

IN_A_THREAD = """
import os, queue, sys, threading, torch
orders = queue.SimpleQueue()
threading.Thread(target=lambda: [orders.put(line) for line in sys.stdin], daemon=True).start()
def train():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while orders.empty():
        model(torch.ones(8, 8)).sum().backward()
        optimizer.step()
training = threading.Thread(target=train)
training.start()
training.join()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CapturedJob]:
    """One process that several tests share, and that the last of them ends: it must bear them all."""
    with captured_job(tmp_path_factory.mktemp("job")) as started:
        yield started


def recorded(result: Recording | CaptureError) -> tuple[Recording, Trace, Steps]:
    assert isinstance(result, Recording), result
    trace = read_trace([result.path.read_bytes()], salvage=False)
    return result, trace, find_steps(trace)


def failed(result: Recording | CaptureError) -> str:
    assert isinstance(result, CaptureError), result
    return str(result)


def annotations(trace: Trace, beginning: str) -> list[int]:
    return [row for row in range(len(trace)) if trace.named(trace.name[row]).startswith(beginning)]


def steps_so_far(job: CapturedJob) -> int:
    with ring_reader.opened(Path("/proc"), job.ranks[0].pid) as ring:
        assert ring is not None
        return ring_reader.read_header(ring).steps


def trains_on(job: CapturedJob) -> None:
    before = steps_so_far(job)
    job.wait_until(lambda: steps_so_far(job) > before + 3)


def test_all_ranks_record_the_same_steps_and_train_on(tmp_path: Path, measured: Measured) -> None:
    with captured_job(tmp_path, ranks=2) as job:
        # The step to begin with is reckoned by the latest ones, of which the very first are no measure.
        job.wait_until(lambda: steps_so_far(job) > 200)
        first, second = (recorded(result) for result in job.capture(steps=3))
        for recording, trace, steps in (first, second):
            assert recording.steps == len(steps) == 3
            optimizers = annotations(trace, "Optimizer.step#")
            assert len(optimizers) == 3
            # Each lies wholly in its own step: the trace ends where the last step does.
            assert (steps.at(trace.start_ns[optimizers]) == [0, 1, 2]).all()
            assert (trace.end_ns[optimizers] <= steps.end_ns).all()
            assert annotations(trace, "gloo:all_reduce") or annotations(trace, "gloo:broadcast")
        assert (first[2].number == second[2].number).all()
        assert not list(job.temporary.glob("rankscope*"))
        job.wait_until(lambda: not any(holds_a_trace(rank.pid) for rank in job.ranks))

        by_time = job.capture(steps=None, seconds=0.5, options=Options(shapes=True, stacks=True))
        for recording, trace, steps in map(recorded, by_time):
            assert recording.steps == len(steps) > 0
            missing_ns = 0.5e9 - float(steps.end_ns[-1] - steps.start_ns[0])
            measured("captures: time missing of half a second", max(missing_ns / 1e9, 0.0), "s", at_most=0.05)
            assert trace.of(Category.PYTHON).any()
        trains_on(job)
        assert job.end() == [(0, ""), (0, "")]


@pytest.mark.acceptance
def test_a_users_own_profiler_is_awaited_and_never_disturbed(job: CapturedJob) -> None:
    job.tell("p = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]); p.start()")
    assert "a profiler of the user's own is active" in failed(job.capture(patience_seconds=0.5)[0])
    job.tell("p.stop(); assert p.key_averages(), 'nothing was recorded'")
    # In its warm-up nothing is recorded yet, but it is the user's turn all the same.
    job.tell("p = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=9, active=1)); p.start()")
    assert "a profiler of the user's own is active" in failed(job.capture(patience_seconds=0.5)[0])
    job.tell("p.stop()")
    assert recorded(job.capture()[0])[0].steps == 3

    begin = "p = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]); p.start()"
    interrupted = job.capture(steps=None, seconds=60.0, when_running=lambda: job.tell(begin))
    assert "the user's own profiler began" in failed(interrupted[0])
    trains_on(job)
    job.tell("p.stop(); assert any('Optimizer.step' in e.key for e in p.key_averages())")
    trains_on(job)


@pytest.mark.acceptance
def test_garbage_in_the_command_area_is_ignored(job: CapturedJob) -> None:
    (link,) = [
        link for link in Path(f"/proc/{job.ranks[0].pid}/fd").iterdir() if "rankscope-ring" in str(link.readlink())
    ][:1]
    ring = os.open(link, os.O_WRONLY)
    try:
        for _ in range(20):
            os.pwrite(ring, os.urandom(256), ring_layout.COMMAND_OFFSET)
            time.sleep(0.01)
    finally:
        os.close(ring)
    trains_on(job)
    assert recorded(job.capture()[0])[0].steps == 3
    trains_on(job)


@pytest.mark.acceptance
def test_a_hung_process_is_reported_at_the_deadline_and_unharmed(job: CapturedJob, tmp_path: Path) -> None:
    release = tmp_path / "release"
    job.tell(f"hang = {str(release)!r}")
    process = job.processes[0]
    assert process.stdin is not None
    process.stdin.write(
        "open(hang + 's', 'w').close() or [time.sleep(0.05) for _ in iter(lambda: os.path.exists(hang), True)]\n"
    )
    process.stdin.flush()
    job.wait_until((tmp_path / "releases").exists)
    assert "no step has ended" in failed(job.capture(patience_seconds=1.0)[0])
    release.touch()
    assert process.stdout is not None
    process.stdout.readline()
    # What was asked for in vain does not come later.
    trains_on(job)
    assert not holds_a_trace(job.ranks[0].pid)
    assert recorded(job.capture()[0])[0].steps == 3
    trains_on(job)


@pytest.mark.acceptance
def test_a_fork_ends_the_capture_and_leaves_both_processes_alone(job: CapturedJob) -> None:
    fork = (
        "c = os.fork(); c or (optimizer.step(), os._exit(bool(torch.autograd._profiler_enabled())));"
        " assert os.waitpid(c, 0)[1] == 0, 'the child records'"
    )
    (result,) = job.capture(steps=None, seconds=60.0, when_running=lambda: job.tell(fork))
    assert "forked" in failed(result)
    assert recorded(job.capture()[0])[0].steps == 3
    trains_on(job)


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("how", "code"), [("end", 0), ("sys.exit(3)", 3), ("os.execv(sys.executable, [sys.executable, '-c', ''])", 0)]
)
def test_a_process_that_exits_mid_capture_exits_as_usual(how: str, code: int, tmp_path: Path) -> None:
    with captured_job(tmp_path) as job:
        process = job.processes[0]

        def leave() -> None:
            assert process.stdin is not None
            process.stdin.write(how + "\n")
            process.stdin.flush()

        (result,) = job.capture(steps=None, seconds=60.0, when_running=leave)
        assert "ended during the capture" in failed(result)
        assert job.finish() == [(code, "")]
        assert not list(job.temporary.glob("rankscope*"))


@pytest.mark.acceptance
def test_a_training_thread_that_ends_mid_capture_harms_nothing(tmp_path: Path) -> None:
    with captured_job(tmp_path, script=IN_A_THREAD) as job:
        assert recorded(job.capture()[0])[0].steps == 3

        def leave() -> None:
            assert job.processes[0].stdin is not None
            job.processes[0].stdin.write("end\n")
            job.processes[0].stdin.flush()

        assert "ended during the capture" in failed(job.capture(steps=None, seconds=60.0, when_running=leave)[0])
        assert job.finish() == [(0, "")]


@pytest.mark.acceptance
def test_steps_that_a_script_marks_itself_are_recorded_as_well(tmp_path: Path) -> None:
    with captured_job(tmp_path, script=EXPLICIT) as job:
        recording, trace, steps = recorded(job.capture(steps=5)[0])
        assert recording.steps == len(steps) == 5
        assert len(annotations(trace, "aten::matmul")) == 5
        job.tell("end")
        assert job.finish() == [(0, "")]


@pytest.mark.acceptance
def test_a_failure_disables_captures_with_one_line_and_training_continues(tmp_path: Path) -> None:
    with captured_job(tmp_path) as job:
        job.tell("torch.profiler._KinetoProfile.stop_trace = lambda self: 1 / 0")
        assert "ZeroDivisionError" in failed(job.capture()[0])
        trains_on(job)
        objection = job.backend.objection(job.ranks[0])
        assert objection is not None and "ZeroDivisionError" in objection
        disabled = "rankscope: captures disabled: ZeroDivisionError: division by zero; training is not affected\n"
        assert job.end() == [(0, disabled)]


@pytest.mark.acceptance
def test_no_record_of_the_ring_is_lost_by_a_capture(job: CapturedJob) -> None:
    recorded(job.capture()[0])
    with ring_reader.opened(Path("/proc"), job.ranks[0].pid) as ring:
        assert ring is not None
        header = ring_reader.read_header(ring)
        # Not the oldest, which are being written over.
        first = max(1, header.records - ring_layout.CAPACITY // 2)
        records, whole = ring_reader.read_records(ring, first, header.records)
    assert whole.all()
    assert int(np.sum(records["steps"])) <= header.steps
    trains_on(job)


@pytest.mark.acceptance
def test_several_windows_are_recorded_with_steps_between_them(job: CapturedJob) -> None:
    (result,) = job.capture(steps=2, options=Options(wait_steps=4, warmup_steps=1, repeat=3))
    assert isinstance(result, Recording), result
    assert result.steps == 6
    steps = [find_steps(read_trace([path.read_bytes()], salvage=False)) for path in (result.path, *result.more_windows)]
    first = int(steps[0].number[0])
    assert [list(window.number) for window in steps] == [[first + n, first + n + 1] for n in (0, 7, 14)]
    trains_on(job)


@pytest.mark.acceptance
def test_the_captured_process_exits_cleanly_and_leaves_no_files(job: CapturedJob) -> None:
    assert job.end() == [(0, "")]
    assert not list(job.temporary.glob("rankscope*"))
