"""Is the step that a page shows the one that was replayed, in rectangles that it can hold?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.replay.changes import CHANGES
from rankscope.analysis.replay.prediction import Forecast, forecast
from rankscope.analysis.replay.step_timeline import (
    MAX_RANKS,
    MAX_RECTANGLES,
    MAX_STREAMS,
    Activity,
    StepTimelines,
    Timeline,
)
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import Trace
from tests.shared_data import H200
from tests.unit.analysis.replay.made_steps import Machine, device_bound, launch_bound

BY_NAME = {change.name: change for change in CHANGES}


def drawn(traces: dict[int, Trace], *names: str, step_ms: float | None = None) -> tuple[Forecast, StepTimelines]:
    timelines = StepTimelines()
    changes = [[BY_NAME[name]] for name in names] or None
    return forecast(traces, changes, None if step_ms is None else step_ms * 1e6, timelines), timelines


def before(traces: dict[int, Trace]) -> Timeline:
    timeline = drawn(traces, "input")[1].replayed
    assert timeline is not None
    return timeline


def busy_ns(timeline: Timeline, activity: Activity, rank: int = 0) -> int:
    of_rank = np.array([lane.rank == rank for lane in timeline.lanes])[timeline.drawn.lane]
    return int(timeline.drawn.busy_ns[of_rank & (timeline.drawn.activity == activity)].sum())


def assert_sound(timeline: Timeline) -> None:
    assert len(timeline.drawn.lane) <= MAX_RECTANGLES
    assert (timeline.drawn.start_ns >= 0).all() and (timeline.drawn.end_ns <= timeline.duration_ns).all()
    assert (timeline.drawn.end_ns > timeline.drawn.start_ns).all()
    assert (timeline.drawn.bottom_ratio >= 0).all() and (
        timeline.drawn.bottom_ratio + timeline.drawn.height_ratio < 1 + 1e-6
    ).all()
    area = (timeline.drawn.end_ns - timeline.drawn.start_ns) * timeline.drawn.height_ratio
    assert area == pytest.approx(timeline.drawn.busy_ns, rel=1e-6, abs=1.0)


def test_a_step_holds_the_time_of_its_host_and_kernels() -> None:
    timeline = before({0: launch_bound()})
    assert_sound(timeline)
    assert [lane.name for lane in timeline.lanes] == ["host", "stream 7"]
    assert timeline.duration_ns == pytest.approx(2.5e6, rel=0.001)
    assert busy_ns(timeline, Activity.COMPUTE) == pytest.approx(50 * 10e3, rel=0.01)
    assert busy_ns(timeline, Activity.HOST) == pytest.approx(50 * 46e3, rel=0.01)
    assert busy_ns(timeline, Activity.CALL) == pytest.approx(50 * 4e3, rel=0.01)
    # In 50 launches of 50 µs each, nothing is too short to be drawn by itself.
    assert {name for name, events in zip(timeline.names, timeline.drawn.events, strict=True) if events == 1} == {
        "",
        "cudaLaunchKernel",
        "gemm",
    }


def test_what_is_short_is_joined_without_losing_its_time() -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        for number in range(4000):
            machine.launch("long" if number % 1000 == 500 else "short", 900.0 if number % 1000 == 500 else 1.0)
        machine.annotate(f"ProfilerStep#{step}", began)
    timeline = before({0: machine.trace()})
    assert_sound(timeline)
    assert busy_ns(timeline, Activity.COMPUTE) == pytest.approx(4 * 900e3 + 3996 * 1e3, rel=0.02)
    on_device = timeline.drawn.activity == Activity.COMPUTE
    assert int(timeline.drawn.events[on_device].sum()) == pytest.approx(4000, rel=0.02)
    long = [int(timeline.drawn.busy_ns[row]) for row, name in enumerate(timeline.names) if name == "long"]
    assert long == [900_000] * 4


def test_a_prediction_is_drawn_as_it_was_replayed() -> None:
    found, timelines = drawn({0: launch_bound()}, "graph")
    after = timelines.of_changes["graph"]
    assert_sound(after)
    assert after.duration_ns == pytest.approx(found.predictions[0].step_ns, rel=0.02)
    assert busy_ns(after, Activity.COMPUTE) == pytest.approx(50 * 10e3, rel=0.02)
    assert busy_ns(after, Activity.HOST) == 0


def test_the_step_without_the_profiler_is_drawn_if_known() -> None:
    _, timelines = drawn({0: launch_bound()}, "graph", step_ms=1.25)
    assert timelines.replayed is not None
    assert timelines.replayed.duration_ns == pytest.approx(1.25e6, rel=0.01)


def test_a_host_that_waits_is_shown_waiting() -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        machine.wait_for_input(300.0)
        machine.work(20.0)
        machine.launch("gemm", 1000.0)
        machine.synchronize()
        machine.annotate(f"ProfilerStep#{step}", began)
    timeline = before({0: machine.trace()})
    assert busy_ns(timeline, Activity.INPUT_WAIT) == pytest.approx(300e3, rel=0.01)
    assert busy_ns(timeline, Activity.DEVICE_WAIT) == pytest.approx(1000e3, rel=0.01)
    assert busy_ns(before({0: device_bound(queue_limit=20)}), Activity.COMPUTE) > 0


def test_ranks_are_shown_waiting_for_the_slow_one() -> None:
    traces = {rank: read_trace((H200 / f"ddp_straggler_rank{rank}.json.gz").read_bytes()) for rank in range(4)}
    _, timelines = drawn(traces, "even")
    timeline = timelines.replayed
    assert timeline is not None and timelines.least_waiting == 2
    assert_sound(timeline)
    waits = [busy_ns(timeline, Activity.RANK_WAIT, rank) for rank in range(4)]
    assert waits.index(min(waits)) == 2 and min(waits) < 0.2 * max(waits)
    even = timelines.of_changes["even"]
    assert busy_ns(even, Activity.RANK_WAIT, 0) < 0.2 * busy_ns(timeline, Activity.RANK_WAIT, 0)


def test_ranks_without_a_common_clock_begin_together() -> None:
    timeline = before({0: launch_bound(), 1: replace(launch_bound(), base_ns=5 * 3600 * 10**9)})
    assert busy_ns(timeline, Activity.COMPUTE, 1) == pytest.approx(busy_ns(timeline, Activity.COMPUTE, 0), rel=0.01)


def test_only_some_ranks_and_streams_are_drawn() -> None:
    machine = Machine()
    for step in range(3):
        began = machine.now
        for stream in range(20):
            machine.launch("gemm", 10.0 + stream, stream=stream)
        machine.annotate(f"ProfilerStep#{step}", began)
    _, timelines = drawn(dict.fromkeys(range(12), machine.trace()), "input")
    timeline = timelines.replayed
    assert timeline is not None
    assert (len(timelines.ranks), timelines.ranks_left_out) == (MAX_RANKS, 4)
    assert len(timeline.lanes) == MAX_RANKS * (1 + MAX_STREAMS)
    assert timeline.lanes[1].name == "stream 14" and timeline.streams_left_out == MAX_RANKS * 14


def test_nothing_is_kept_of_long_names() -> None:
    machine = Machine()
    for step in range(3):
        began = machine.now
        machine.launch("void at::native::" + "x" * 100_000, 100.0)
        machine.annotate(f"ProfilerStep#{step}", began)
    assert max(map(len, before({0: machine.trace()}).names)) <= 76
