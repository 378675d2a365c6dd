"""Somebody sets a clock by an hour: NTP, a suspended laptop, a migrated machine. It is neither a stall nor a straggler,
and no window is lost."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from rankscope.analysis.verdicts.verdict import Kind, Severity
from rankscope.daemon.sampler import Ticker
from rankscope.daemon.samples import Problem, RankProcess, Span, StackSample, StepSample
from rankscope.daemon.stacks.pyspy import KilledChildren
from rankscope.daemon.stacks.recording import RankRecorder
from rankscope.daemon.stacks.sampling_budget import Plan
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.windows.stalls import StallWatch
from rankscope.daemon.windows.window import RankSamples
from rankscope.operator.correlation.correlator import Correlator, JobState
from rankscope.v1 import identity_pb2, window_pb2
from rankscope.v1.rank_service_pb2 import WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.daemon_messages import hold
from tests.integration.daemon_process import MAIN, PATIENCE_SECONDS, serving
from tests.integration.test_bad_input import claims, keeper
from tests.machine_pauses import MachinePauses
from tests.support.processes import children
from tests.support.waiting import wait_until
from tests.unit.daemon import window_makers as make
from tests.unit.daemon.ring_writer import ME, Writer

HOUR = 3600.0
JUMPS = [HOUR, -HOUR, HOUR + 0.7, -HOUR - 0.7, 5.3, -5.3]
SECOND = 1_000_000_000
STEP_SECONDS = 0.1


# The daemon.


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("into_window", [0.0, 0.3, 1.0, 1.9])
def test_windows_keep_their_length_and_align_to_the_new_time(jump: float, into_window: float) -> None:
    clock = make.FakeClock(seconds=1000.0)
    ticker = Ticker(clock, 2.0)
    began = clock.monotonic_seconds()
    spans: list[Span] = []

    def play(count: int) -> None:
        for _ in range(count):
            span = ticker.next_span(lambda: None)
            assert span is not None
            spans.append(span)

    play(5)
    clock.sleep(into_window)
    clock.set_back(-jump)
    play(5)
    assert all(span.end_unix_nanos % (2 * SECOND) == 0 for span in spans)
    assert all(1.0 <= span.seconds < 3.0 for span in spans), [span.seconds for span in spans]
    # Nothing is lost: the lengths add up to the time that passed.
    assert sum(span.seconds for span in spans) == pytest.approx(clock.monotonic_seconds() - began, abs=0.01)
    assert ticker.skipped_total == 0
    assert spans[-1].end_unix_nanos <= clock.unix_nanos()


def test_a_daemon_that_was_late_still_has_one_long_window() -> None:
    clock = make.FakeClock(seconds=1000.0)
    ticker = Ticker(clock, 2.0)
    ticker.next_span(lambda: None)
    clock.sleep(7.0)
    span = ticker.next_span(lambda: None)
    assert span is not None
    assert span.seconds == 6.0
    assert ticker.skipped_total == 2


class Ring:
    """A rank of this process, looked at by a daemon whose wall clock is `offset` seconds from this machine's."""

    def __init__(self) -> None:
        self.writer = Writer()
        self.offset = 0.0
        self.collector = StepsCollector(
            wall_minus_monotonic_ns=lambda: time.time_ns() - time.monotonic_ns() + int(self.offset * 1e9)
        )
        self.watch = StallWatch(None)

    def look(self, window_seconds: float = 2.0) -> tuple[StepSample, Span, object]:
        """In a window that ends a second after the last step, however late this is."""
        end = self.writer.end_ns + SECOND + time.time_ns() - time.monotonic_ns() + int(self.offset * 1e9)
        span = Span(end - int(window_seconds * SECOND), end)
        found = self.collector.collect([ME], span)[ME.key]
        assert not isinstance(found, Problem), found
        return found, span, self.watch.observe(ME, RankSamples(steps=found), span)


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    made.writer.ring.abandon()


@pytest.mark.parametrize("jump", JUMPS)
def test_steps_around_a_jump_are_read_and_nobody_is_stalled(ring: Ring, jump: float) -> None:
    # The ring's own clock is the one from before the jump: the training process has not refreshed it yet.
    for number in range(6):
        if number == 3:
            ring.offset = jump
        ring.writer.step(10)
        sample, span, stall = ring.look()
        assert stall is None
        assert sample.last_step_unix_nanos is not None
        assert 0.9 * SECOND < span.end_unix_nanos - sample.last_step_unix_nanos < 1.1 * SECOND
    # Without a new step as well: a long step is in progress.
    ring.offset = 0.0
    _, _, stall = ring.look(window_seconds=0.05)
    assert stall is None


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_steps_of_a_window_before_the_jump_are_read(ring: Ring, jump: float) -> None:
    ring.writer.step(10)
    ended = time.time_ns()
    ring.offset = jump
    sample = ring.collector.collect([ME], Span(ended - 2 * SECOND, ended))[ME.key]
    assert isinstance(sample, StepSample) and sample.last_step_unix_nanos is not None, sample
    assert abs(sample.last_step_unix_nanos - ended) < 60 * SECOND


PY_SPY = f"""#!/bin/sh
while [ "$1" != --output ]; do shift; done
echo "thread ({ME.pid}): MainThread;train (train.py:1) 5" >"$2"
"""


@pytest.mark.parametrize("jump", JUMPS)
def test_a_stack_recording_keeps_its_length_across_a_jump(jump: float, tmp_path: Path) -> None:
    py_spy = tmp_path / "py-spy"
    py_spy.write_text(PY_SPY)
    py_spy.chmod(0o755)
    unix_seconds, monotonic_seconds = 1000.0, 10.0
    recorder = RankRecorder(ME, py_spy, KilledChildren(), unix_nanos=lambda: round(unix_seconds * 1e9))
    recorder.start(Plan(4, 10, 4.0), monotonic_seconds, 0.0)
    unix_seconds += 4.0 + jump
    wait_until(lambda: recorder.poll(monotonic_seconds + 4.0) or not recorder.is_running, recorder.take)
    sample = recorder.take()
    assert isinstance(sample, StackSample), sample
    assert sample.span == Span(round((1000.0 + jump) * SECOND), round((1004.0 + jump) * SECOND))


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_hang_across_a_jump_is_found_without_delay(jump: float) -> None:
    watch = StallWatch(None)
    rank = make.rank(0)
    done = RankSamples(steps=make.steps(0.1, 0.1, steps_total=40, last_step_unix_nanos=make.START + 2 * SECOND))
    assert watch.observe(rank, done, make.span(0)) is None
    moved = round(jump * 1e9)
    seconds = []
    for index in range(1, 5):
        still = make.steps(steps_total=40, last_step_unix_nanos=make.START + 2 * SECOND)  # on the clock from before
        span = make.span(index)
        if index >= 2:
            span = Span(span.start_unix_nanos + moved, span.end_unix_nanos + moved)
        stall = watch.observe(rank, RankSamples(steps=still), span)
        seconds.append(None if stall is None else stall.seconds_since_step)
    assert seconds == [None, 4.0, 6.0, 8.0]


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_stall_seen_in_stacks_keeps_its_length_across_jumps(jump: float) -> None:
    watch = StallWatch(None)
    rank = make.rank(0)
    moved = round(jump * 1e9)
    for index in range(4):
        recording = make.stacks(index, distinct_stacks=1, samples=20, function="recv", phase="communication")
        span = make.span(index)
        if index >= 2:
            span = Span(span.start_unix_nanos + moved, span.end_unix_nanos + moved)
        stall = watch.observe(rank, RankSamples(process=make.process(0.001), stacks=recording), span)
    assert stall is not None
    assert 4.0 <= stall.seconds_since_step <= 10.0


IN_ANOTHER_TIME = """
import sys, time
from rankscope.probe.ring import Ring
from rankscope.probe.ring_layout import SECONDS
ring = Ring()
print("ready", flush=True)
for _ in sys.stdin:
    ring.append(time.monotonic_ns(), 10_000_000, dict.fromkeys(SECONDS, 0.0), 0, 1)
    print("stepped", flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/timens_offsets").exists(), reason="the kernel has no time namespaces")
@pytest.mark.parametrize("offset", [100_000, -5])
def test_a_rank_in_a_time_namespace_uses_its_monotonic_clock(offset: int) -> None:
    unshare = shutil.which("unshare")
    assert unshare is not None
    process = subprocess.Popen(
        [unshare, "--time", f"--monotonic={offset}", "--fork", "--", sys.executable, "-c", IN_ANOTHER_TIME],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            pytest.skip("time namespaces may not be made here")
        (pid,) = children(process.pid)
        rank = RankProcess(job="j", rank=0, local_rank=0, world_size=1, pid=pid, start_ticks=1, namespace_pids=(pid,))
        collector, watch = StepsCollector(), StallWatch(None)
        for _ in range(3):
            now = time.time_ns()
            process.stdin.write("step\n")
            process.stdin.flush()
            assert process.stdout.readline() == "stepped\n"
            span = Span(now - 2 * SECOND, now)
            sample = collector.collect([rank], span)[rank.key]
            assert isinstance(sample, StepSample), sample
            assert len(sample.step_seconds) == 1
            assert sample.last_step_unix_nanos is not None
            assert abs(sample.last_step_unix_nanos - now) < 10 * SECOND
            assert watch.observe(rank, RankSamples(steps=sample), span) is None
    finally:
        process.kill()
        process.communicate()


# The operator.


class Fleet:
    """Daemons of several nodes, each with a clock of its own, and an operator with another."""

    def __init__(self, *nodes: str) -> None:
        self.ahead = dict.fromkeys(nodes, 0.0)
        self.operator_ahead = 0.0
        self.now = 1_000_002.0
        self.states: list[JobState] = []
        self.correlator = Correlator(clock=lambda: 1.7e9 + self.now + self.operator_ahead, monotonic=lambda: self.now)
        self.correlator.listen(self.states.extend)

    def play(self, windows: int, slow: str = "") -> list[JobState]:
        """Each node sends when its own clock reaches a border."""
        seen = len(self.states)
        for _ in range(round(windows * 2.0 / STEP_SECONDS)):
            self.now = round(self.now + STEP_SECONDS, 3)
            for node, ahead in self.ahead.items():
                if (self.now + ahead) % 2.0 < STEP_SECONDS - 1e-6:
                    self.correlator.take(list(map(hold, self.windows(node, slow))))
            self.correlator.tick()
        return self.states[seen:]

    def windows(self, node: str, slow: str = "") -> Iterator[window_pb2.RankWindow]:
        nodes = sorted(self.ahead)
        own_time = self.now + self.ahead[node]
        end = int(own_time // 2.0) * 2 * SECOND
        for local in range(2):
            rank = 2 * nodes.index(node) + local
            own = 0.09 if node == slow and local == 0 else 0.05
            yield window_pb2.RankWindow(
                identity=identity_pb2.RankIdentity(
                    job="j", rank=rank, world_size=2 * len(nodes), node=node, pid=100 + rank, incarnation=1
                ),
                start_unix_nanos=end - 2 * SECOND,
                end_unix_nanos=end,
                steps=20,
                steps_total=int(self.now * 10),
                last_step_unix_nanos=int((int(self.now * 10) / 10 + self.ahead[node]) * SECOND),
                step_seconds=window_pb2.StepStatistics(mean=0.1, p50=0.1),
                self_seconds=window_pb2.StepStatistics(mean=own),
                wait_seconds=window_pb2.StepStatistics(mean=0.1 - own),
            )


def lost_windows(jump: float) -> int:
    """At the jump itself; and a clock that is set back by a few seconds counts them twice."""
    return 2 if abs(jump) > 60 else 4


def _everybody(fleet: Fleet, jump: float) -> None:
    fleet.ahead = dict.fromkeys(fleet.ahead, jump)
    fleet.operator_ahead = jump


def _one_node(fleet: Fleet, jump: float) -> None:
    fleet.ahead["b"] = jump


def _operator(fleet: Fleet, jump: float) -> None:
    fleet.operator_ahead = jump


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("move", [_everybody, _one_node, _operator], ids=lambda move: move.__name__.strip("_"))
@pytest.mark.parametrize("nodes", ["ab", "abc", "abcd"])
def test_a_jump_loses_no_verdict_and_accuses_nobody(
    move: Callable[[Fleet, float], None], jump: float, nodes: str
) -> None:
    fleet = Fleet(*nodes)
    assert fleet.play(6)[-1].verdict.kind is Kind.HEALTHY
    move(fleet, jump)
    states = fleet.play(20)
    assert len(states) >= 20 - lost_windows(jump)
    assert all(state.verdict.severity is Severity.NONE for state in states), [state.verdict for state in states]
    assert states[-1].verdict.kind is Kind.HEALTHY, states[-1].verdict
    assert sum(state.ranks_seen < 2 * len(nodes) for state in states) <= lost_windows(jump)
    slow = fleet.play(8, slow="b")[-1].verdict
    assert (slow.kind, slow.culprits) == (Kind.SLOW_RANK, (2,))


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_nodes_that_are_set_one_after_the_other_stay_together(jump: float) -> None:
    fleet = Fleet("a", "b", "c")
    fleet.play(6, slow="b")
    for node in "abc":
        fleet.ahead[node] = jump
        fleet.play(2, slow="b")
    states = fleet.play(10, slow="b")
    assert (states[-1].verdict.kind, states[-1].verdict.culprits) == (Kind.SLOW_RANK, (2,))
    assert all(state.ranks_seen == 6 for state in states)


@pytest.mark.parametrize("jump", JUMPS)
def test_a_standing_finding_survives_a_jump_on_one_machine(jump: float) -> None:
    fleet = Fleet("a")
    before = fleet.play(8, slow="a")[-1]
    assert (before.verdict.kind, before.verdict.culprits) == (Kind.SLOW_RANK, (0,))
    _everybody(fleet, jump)
    states = fleet.play(8, slow="a")
    assert len(states) >= 8 - lost_windows(jump)
    assert all(state.verdict.kind is Kind.SLOW_RANK for state in states)
    lost = [state.verdict.lost_gpu_seconds or 0.0 for state in states]
    assert max(later - earlier for earlier, later in pairwise(lost)) < 10.0


def test_a_busy_operators_delay_is_not_taken_for_a_jump() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.play(6)
    delayed = []
    for _ in range(5):
        fleet.now += 2.0
        delayed.append([list(map(hold, fleet.windows(node))) for node in fleet.ahead])
    for message in (windows for tick in delayed for windows in tick):
        fleet.correlator.take(message)
    fleet.correlator.tick()
    states = fleet.play(5)
    assert all(state.ranks_seen == 6 for state in states)
    assert states[-1].verdict.kind is Kind.HEALTHY


# Both, as a real process whose wall clock is set while it runs.

# Put before the daemon's own command.
SET_CLOCK = """
import sys, time, types
from pathlib import Path
from grpc import _channel, _common, _server, _utilities
for module in (_channel, _common, _server, _utilities):  # they give times to the kernel, whose clock is not set
    module.time = types.SimpleNamespace(**vars(time))
offset = Path(sys.argv[1])
sys.argv[:] = sys.argv[4:]
unix_seconds, unix_nanos = time.time, time.time_ns
time.time = lambda: unix_seconds() + float(offset.read_text())
time.time_ns = lambda: unix_nanos() + int(float(offset.read_text()) * 1e9)
from rankscope.cli.main import main
sys.exit(main())
"""


def set_clock(file: Path, seconds: float) -> None:
    part = file.with_name("part")
    part.write_text(str(seconds))
    part.replace(file)


def test_a_real_daemon_goes_on_when_its_clock_is_set(tmp_path: Path) -> None:
    offset = tmp_path / "offset"
    set_clock(offset, 0.0)
    launcher = (sys.executable, "-c", SET_CLOCK, str(offset), *MAIN)
    job = "clocks"
    pauses = MachinePauses()
    with contextlib.ExitStack() as stack:
        pauses.start()
        stack.callback(pauses.stop)
        for rank in "01":
            stack.enter_context(keeper("honest", claims(rank, 2, "10.7.7.7", run_id="clocks")))
        daemon = stack.enter_context(serving(tmp_path / "daemon", "up", launcher=launcher))
        channel = stack.enter_context(grpc.insecure_channel(daemon.grpc_target))
        stream = RankServiceStub(channel).WatchRanks(WatchRanksRequest(), timeout=4 * PATIENCE_SECONDS)
        windows = (window for message in stream for window in message.windows if window.identity.job == job)

        def watched(count: int) -> list[window_pb2.RankWindow]:
            return list(itertools.islice(windows, 2 * count))

        watched(4)
        for jump in (HOUR, -HOUR, 0.0):
            set_at = time.monotonic()
            set_clock(offset, jump)
            seen = watched(8)
            # A machine that stands still stalls everybody.
            assert not any(window.HasField("stall") for window in seen) or pauses.since(set_at), seen
            assert [problem for window in seen for problem in window.problems] == []
            lengths = [(window.end_unix_nanos - window.start_unix_nanos) / 1e9 for window in seen]
            # 0.5 s, except where a busy machine misses a border.
            assert max(lengths) < 30.0
            assert sum(window.steps for window in seen) > len(seen)
            newest = max(window.end_unix_nanos for window in seen[-2:]) / 1e9
            assert abs(newest - (time.time() + jump)) < 60.0
        daemon.wait_until(lambda: daemon.is_healthy())
        assert daemon.log.count("the clock was set by") == 3
        assert "hang" not in daemon.output.lower()
