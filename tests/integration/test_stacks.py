"""A real py-spy on real processes, healthy and not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from rankscope.daemon.discovery.ranks import RankDiscovery
from rankscope.daemon.process_collector import ProcessCollector
from rankscope.daemon.samples import (
    FrameCount,
    Problem,
    ProcessSample,
    RankKey,
    RankProcess,
    Span,
    StackSample,
    StallDump,
)
from rankscope.daemon.stacks.collector import StacksCollector
from rankscope.daemon.stacks.pyspy import find_py_spy
from rankscope.daemon.stacks.sampling_budget import MIN_RATE_HERTZ, MIN_RECORDING_SECONDS, Budget
from tests.support.measuring import Measured
from tests.support.waiting import wait_until

from .small_job import as_rank, slow_line, small_ddp_job

SPAN = Span(0, 2_000_000_000)
MEASURING_RATIO = 1.0  # a budget that no sampling exceeds
SLOW_BACKWARD = Path(__file__).parent / "jobs" / "slow_backward.py"

RECORD_AS_NOBODY = """
import os, sys, time
from rankscope.daemon.stacks.collector import StacksCollector
from rankscope.daemon.samples import RankProcess, Span
from rankscope.daemon.procfs import read_stat
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
pid = int(sys.argv[1])
rank = RankProcess("job", 3, 3, 4, pid, read_stat(f"/proc/{pid}").start_ticks, (pid,))
source = StacksCollector(sys.argv[2])
found = {}
def is_late():
    return all(problem.kind == "timeout" for problem in found.values())
while is_late():
    found = source.collect([rank], Span(0, 1))
    source.poll(time.monotonic())
    time.sleep(0.1)
print(found[rank.key].kind, "|", found[rank.key].text)
found = {}
while is_late():
    found = source.dump_all([rank])
print(found[rank.key].kind)
source.close()
"""


# As many threads as a CUDA process has: most of them native, some that Python started.
MANY_THREADS = """
import ctypes, threading, time
libc = ctypes.CDLL(None)
for _ in range(60):
    libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)
for _ in range(6):
    threading.Thread(target=time.sleep, args=(900,), daemon=True).start()
print("ready", flush=True)
def deep(frames):
    time.sleep(900) if frames == 0 else deep(frames - 1)
deep(30)
"""


@contextmanager
def sleeper(
    program: str = "import time; print('ready', flush=True); time.sleep(900)",
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def slow_backwards(kinds: list[str]) -> Iterator[list[RankProcess]]:
    """A process for each kind of Python code inside backward."""
    jobs = [
        subprocess.Popen([sys.executable, str(SLOW_BACKWARD), kind], stdout=subprocess.PIPE, text=True)
        for kind in kinds
    ]
    try:
        for job in jobs:
            assert job.stdout is not None
            assert job.stdout.readline() == "step 3\n"
        yield [as_rank(job.pid, number) for number, job in enumerate(jobs)]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


def marked_line(kind: str) -> int:
    mark = f"# SLOW: {kind}"
    return 1 + next(n for n, line in enumerate(SLOW_BACKWARD.read_text().splitlines()) if line.endswith(mark))


@pytest.fixture
def source() -> Iterator[StacksCollector]:
    collector = StacksCollector()
    yield collector
    collector.close()


def is_late(found: object) -> bool:
    """py-spy took too long on this machine: it is tried again."""
    return isinstance(found, Problem) and found.kind == "timeout"


def dumped(source: StacksCollector, ranks: list[RankProcess]) -> Mapping[RankKey, StallDump | Problem]:
    dumps: dict[RankKey, StallDump | Problem] = {}

    def all_in_time() -> bool:
        dumps.update(source.dump_all(ranks))
        return not any(map(is_late, dumps.values()))

    wait_until(all_in_time)
    return dumps


def recorded(source: StacksCollector, ranks: list[RankProcess]) -> dict[int, StackSample | Problem]:
    """The first thing that each rank has to say, once py-spy has come to its turn on a busy machine."""
    found: dict[int, StackSample | Problem] = {}

    def all_spoke() -> bool:
        source.poll(time.monotonic())
        for key, sample in source.collect(ranks, SPAN).items():
            if not is_late(sample):
                found.setdefault(key[1], sample)
        return len(found) == len(ranks)

    wait_until(all_spoke)
    return found


@pytest.mark.acceptance
def test_a_real_job_shows_its_phases_and_sleeping_line(source: StacksCollector) -> None:
    with small_ddp_job("stacked"):
        ranks = [rank for rank in RankDiscovery().scan().ranks if rank.job == "stacked"]
        phases: Counter[str] = Counter()
        places: list[FrameCount] = []

        def seen_enough() -> bool:
            for sample in recorded(source, ranks).values():
                assert isinstance(sample, StackSample), sample
                phases.update(sample.phase_counts)
                places.extend(count for count in sample.frames if count.frame.line == slow_line())
            return {"forward", "backward"} <= phases.keys() and len(places) >= 2

        wait_until(seen_enough)
        forward = next(place for place in places if place.frame.file.endswith("plain_ddp.py"))
        assert forward.frame.function.endswith("forward")
        assert forward.phase == "forward"
        assert forward.own > 0
        assert source.child_cpu_seconds > 0
        dumps = dumped(source, ranks)
        assert all(isinstance(dump, StallDump) and dump.stack for dump in dumps.values()), dumps


def test_python_time_inside_backward_is_shown_on_its_line(source: StacksCollector, measured: Measured) -> None:
    """On the pretended device as on a GPU, autograd runs that code on a thread of its own."""
    slow_function = {"function": "Scale.backward", "tensor_hook": "slow_tensor_hook", "module_hook": "slow_module_hook"}
    slow_function["device"] = "Scale.backward"
    with slow_backwards(list(slow_function)) as ranks:
        found = recorded(source, ranks)
        dumps = dumped(source, ranks)
        for rank, (kind, function) in zip(ranks, slow_function.items(), strict=True):
            sample, dump = found[rank.rank], dumps[rank.key]
            assert isinstance(sample, StackSample), (kind, sample)
            line = marked_line("function" if kind == "device" else kind)
            slowest = next(c for c in sample.frames if (c.frame.function, c.frame.line) == (function, line) and c.own)
            assert slowest.phase == "backward_code", kind
            share = sample.phase_counts["backward_code"] / sample.samples
            measured(f"samples in backward code ({kind})", share, "of all", at_least=0.5)
            loop = next(count for count in sample.frames if count.frame.function == "main" and count.phase != "other")
            assert loop.inclusive >= slowest.inclusive, f"{kind}: the stack goes on to the line that called backward"
            assert isinstance(dump, StallDump), (kind, dump)
            assert dump.stack[-1].function == "<module>", kind


def test_a_forward_recomputed_in_backward_counts_as_backward(source: StacksCollector, measured: Measured) -> None:
    with slow_backwards(["recompute"]) as ranks:
        sample = recorded(source, ranks)[0]
    assert isinstance(sample, StackSample), sample
    places = {(count.frame.function, count.frame.line) for count in sample.frames if count.own}
    assert ("Block.forward", marked_line("recompute")) in places, sample.frames
    assert sample.phase_counts["backward_code"] and sample.phase_counts["forward"], sample.phase_counts
    for phase in ("backward_code", "forward"):
        measured(f"samples in {phase}", sample.phase_counts[phase] / sample.samples, "of all", at_least=0.25)


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_many_threaded_processes_get_at_least_five_hertz_within_budget(
    source: StacksCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.daemon.stacks.sampling_budget.OBSERVED_SECONDS", 10.0)
    with sleeper(MANY_THREADS) as one, sleeper(MANY_THREADS) as other:
        ranks = [as_rank(one.pid, 0), as_rank(other.pid, 1)]
        recorded(source, ranks)
        budget = Budget(MEASURING_RATIO, 10.0)
        is_measuring = True
        rates: list[float] = []
        samples: list[StackSample | Problem] = []

        def has_settled() -> bool:
            nonlocal budget, is_measuring
            now = time.monotonic()
            source.poll(now)
            rates.append(budget.observe(now, 0.0, source.charged_cpu_seconds, len(ranks)))
            source.set_rate(rates[-1])
            samples.extend(source.collect(ranks, SPAN).values())
            # The time that is needed to measure, and twice the time that is needed to decide, at the same rate.
            polls = 110 if is_measuring else 200
            is_steady = len(set(rates[-polls:])) == 1 and len(rates) > polls
            if not is_steady or budget.used_ratio is None:
                return False
            if is_measuring:
                # 10 Hz take 1.5 times the budget, whatever a sample costs on this machine.
                budget, is_measuring = Budget(MEASURING_RATIO * budget.used_ratio / 1.5, 10.0), False
                rates.clear()
                samples.clear()
                return False
            if not 2.5 <= rates[-1] < 10.0:
                # By now a sample costs another time: the machine is more or less busy than it was.
                budget, is_measuring = Budget(MEASURING_RATIO, 10.0), True
                rates.clear()
                return False
            return budget.used_ratio <= 1.0

        wait_until(has_settled, seconds=600.0)
    assert 2.5 <= rates[-1] < 10.0, rates
    in_time = [sample for sample in samples if not is_late(sample)]
    assert all(isinstance(sample, StackSample) for sample in in_time), in_time
    # A machine that pauses takes samples from some.
    counts = [sample.samples for sample in in_time if isinstance(sample, StackSample)]
    assert median(counts) >= 0.8 * MIN_RECORDING_SECONDS * MIN_RATE_HERTZ, counts
    assert source.recorded_ratio is not None
    assert source.recorded_ratio > 0.25


def test_a_process_dying_while_recorded_leaves_samples_or_a_reason(source: StacksCollector) -> None:
    with sleeper() as doomed, sleeper() as neighbour:
        ranks = [as_rank(doomed.pid, 0), as_rank(neighbour.pid, 1)]
        source.collect(ranks, SPAN)
        source.poll(time.monotonic())
        assert source.running >= 1
        doomed.kill()
        doomed.wait()
        found = recorded(source, ranks)
        assert isinstance(found[0], StackSample) or found[0].kind == "died"
        assert isinstance(found[1], StackSample)
        dump = dumped(source, [ranks[0]])[ranks[0].key]
        assert isinstance(dump, Problem)
        assert dump.kind == "died"


def test_a_stopped_process_is_read_as_stopped_without_resuming(source: StacksCollector) -> None:
    with sleeper() as process:
        rank = as_rank(process.pid)
        usage = ProcessCollector()
        usage.collect([rank], SPAN)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        usage.poll()
        sample = usage.collect([rank], SPAN)[rank.key]
        assert isinstance(sample, ProcessSample)
        assert sample.stopped_seconds == SPAN.seconds
        assert isinstance(recorded(source, [rank])[0], StackSample)
        assert isinstance(dumped(source, [rank])[rank.key], StallDump)


def test_a_non_python_process_is_unreadable_in_py_spys_words(source: StacksCollector) -> None:
    with subprocess.Popen(["sleep", "900"]) as process:
        try:
            problem = recorded(source, [as_rank(process.pid)])[0]
        finally:
            process.kill()
    assert isinstance(problem, Problem)
    assert problem.kind == "unreadable"
    assert "python version" in problem.text


def test_another_users_process_is_a_permission_problem_with_advice() -> None:
    py_spy = find_py_spy()
    assert py_spy is not None
    with sleeper() as process, tempfile.TemporaryDirectory() as folder:
        target = process.pid if os.getuid() == 0 else 1
        Path(folder).chmod(0o755)  # the other user may not be let into this checkout
        command = [sys.executable, "-c", RECORD_AS_NOBODY, str(target), shutil.copy(py_spy, folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == [
        f"permission | rank 3 (pid {target}): py-spy could not read memory: EPERM; "
        "the daemon needs CAP_SYS_PTRACE (see docs/troubleshooting.md)",
        "permission",
    ], done.stderr


def test_recordings_die_with_the_daemon() -> None:
    program = (
        "import os, sys, time\n"
        "from rankscope.daemon.stacks.pyspy import Child, find_py_spy, record_command\n"
        "from pathlib import Path\n"
        "child = Child(record_command(find_py_spy(), int(sys.argv[1]), 60, 10))\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    assert find_py_spy() is not None
    with sleeper() as process:
        command = [sys.executable, "-c", program, str(process.pid)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            child = int(daemon.stdout.readline())

            def is_recording() -> bool:
                return Path(f"/proc/{child}/comm").read_text() == "py-spy\n"

            wait_until(is_recording)
            daemon.kill()
        wait_until(lambda: not Path(f"/proc/{child}").exists())
