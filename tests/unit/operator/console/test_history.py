"""The console's history: what is kept of a run, in how many bytes, and for how long."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fleets import hold, rank_window
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.console import history
from rankscope.operator.console.history import RunView
from rankscope.operator.console.run_views import heatmap, rank_history, run_detail, run_summary
from rankscope.operator.console.signals import RUN_SIGNALS, SIGNALS
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.daemon_windows import HeldWindow, HeldWindows
from tests.support.measuring import Measured
from tools.played_runs import MORNING, RUN, TICK_SECONDS, Played, usual

SLOW = Verdict(Kind.SLOW_RANK, "r", Severity.ALARM, culprits=(1,), impact_ratio=0.5, lost_gpu_seconds=100.0)
FLEET = 4096


def matrix(view: RunView, signal: str = "self_seconds", columns: int = 2000) -> np.ndarray:
    header, data = heatmap(view, signal, 0.0, columns)
    return np.frombuffer(data, "<f4").reshape(len(header.ranks), len(header.starts))


def test_signals_have_unit_and_definition_and_only_measured_are_kept() -> None:
    assert all(signal.unit and signal.definition.endswith(".") for signal in (*SIGNALS, *RUN_SIGNALS))
    played = Played()
    played.tick()
    assert played.view().signals == ("self_seconds", "wait_seconds", "step_seconds", "mfu_ratio")
    assert played.view().ticks[0].values.shape == (4, 4)
    assert matrix(played.view())[:, 0] == pytest.approx([0.09, 0.092, 0.091, 0.093], abs=1e-6)  # by stage
    assert np.isnan(matrix(played.view(), "gpu_power_watts")).all()


def test_device_self_time_and_wait_match_the_comparison_of_ranks() -> None:
    played = Played()
    played.tick(ranks=2)
    played.now += TICK_SECONDS
    played.compare({1: (0.5, 0.25), 7: (1, 1)})
    assert matrix(played.view())[1].tolist() == pytest.approx([0.091, 0.5])
    assert matrix(played.view(), "wait_seconds")[1].tolist() == pytest.approx([0.01, 0.25])


def test_silent_and_joining_ranks_are_unknown_while_absent() -> None:
    played = Played()
    played.tick(ranks=(0, 1))
    for _ in range(5):
        played.tick(ranks=(0, 2))
    silent, joined = matrix(played.view())[[2, 1]]
    assert [row.rank for row in played.view().members] == [0, 1, 2]
    assert np.isnan(silent).tolist() == [False, False, False, True, True, True]  # the last window stands for two more
    assert np.isnan(joined).tolist() == [True, False, False, False, False, False]


def test_a_runs_whole_life_fits_the_limit_newest_in_full() -> None:
    played = Played(limit_bytes=100_000)
    for number in range(1000):
        played.tick(lambda rank, n=number: {"steps": 1.0, "step_seconds": 1.0, "self_seconds": float(n)}, ranks=8)
        assert played.history.bytes <= 100_000
    ticks = played.view().ticks
    spans = np.array([tick.end - tick.start for tick in ticks])
    assert ticks[0].start == MORNING and ticks[-1].end == played.now and spans.sum() == pytest.approx(2000)
    assert (spans[-10:] == TICK_SECONDS).all() and spans[0] > 10 * TICK_SECONDS
    # The older, the coarser, but never more than a small part of its age.
    ages = played.now - np.array([tick.start for tick in ticks])
    assert (spans[:-10] / ages[:-10]).max() < 0.1
    # Means by time: that of all is still that of all.
    own = matrix(played.view())[0]
    assert (own * spans).sum() / spans.sum() == pytest.approx(499.5, rel=1e-3)
    assert (np.diff(own) > 0).all()


def test_a_small_run_has_no_more_ticks_than_the_limit() -> None:
    played = Played()
    for _ in range(history.TICKS_PER_RUN + 200):
        played.tick(ranks=1)
    assert len(played.view().ticks) <= history.TICKS_PER_RUN
    assert played.view().ticks[0].start == MORNING
    summary = run_summary(played.view())
    assert 50 < len(summary.recent_step_seconds) <= 60 and summary.recent_step_seconds[0] == pytest.approx(0.1)


def test_ended_runs_are_dropped_before_other_runs_lose_detail() -> None:
    played = Played(limit_bytes=60_000)
    for run in ("first", "second", "third"):
        for _ in range(10):
            played.tick(run=run, ranks=8)
    played.end("second")
    played.end("first")
    view = played.view("first")
    assert view.ended_unix_seconds == played.now and view.state.windows == () and view.marks[-1].kind == "end"
    assert rank_history(view, 3) is not None  # without its latest window
    version = played.history.version
    while played.history.run("second") is not None:
        played.tick(run="third", ranks=8)
    assert played.history.run("first") is not None and played.history.forgotten_version > version
    assert all(tick.end - tick.start <= TICK_SECONDS for tick in played.view("third").ticks)


def test_runs_are_bounded_and_those_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_RUNS", 2)
    played = Played()
    for run in "abc":
        played.tick(run=run)
    assert (played.history.run("c"), played.history.left_out) == (None, 1)
    played.end("a")
    played.tick(run="c")
    assert played.history.run("c") is not None and played.history.run("a") is None and played.history.left_out == 0


def test_changes_of_the_verdict_restarts_and_the_end_are_marks() -> None:
    played = Played()
    played.tick()
    played.tick()
    played.tick(verdict=SLOW)
    played.tick(verdict=SLOW, restarts=1)
    played.end()
    played.tick()
    marks = played.view().marks
    assert [(mark.kind, mark.verdict, mark.severity) for mark in marks] == [
        ("verdict", "healthy", "none"),
        ("verdict", "slow_rank", "alarm"),
        ("restart", "", ""),
        ("end", "", ""),
        ("restart", "", ""),
        ("verdict", "healthy", "none"),
    ]
    assert marks[1].text == "rank 1 is slow" and played.view().restarts == 2
    for number in range(1000):
        played.tick(verdict=SLOW if number % 2 else usual_verdict())
    assert len(played.view().marks) == history.MARKS_PER_RUN


def usual_verdict() -> Verdict:
    return Verdict(Kind.HEALTHY, "all is well")


def test_time_lost_today_resets_at_midnight_and_survives_a_restart() -> None:
    played = Played()
    played.tick()
    played.tick(verdict=replace(SLOW, lost_gpu_seconds=50.0))
    played.tick(verdict=SLOW)
    assert played.view().lost_today_gpu_seconds == 100.0
    played.end()
    assert played.view().lost_today_gpu_seconds == 100.0
    played.tick(verdict=replace(SLOW, lost_gpu_seconds=20.0))
    assert played.view().lost_today_gpu_seconds == 120.0
    played.now += 86_400
    played.tick(verdict=replace(SLOW, lost_gpu_seconds=30.0))
    assert played.view().lost_today_gpu_seconds == 10.0


def test_the_pace_of_a_hanging_run_is_not_known() -> None:
    played = Played()
    played.tick()
    played.tick(verdict=Verdict(Kind.HANG, "r", Severity.ALARM))
    assert run_summary(played.view()).recent_step_seconds[0] == pytest.approx(0.1)
    assert np.isnan(run_summary(played.view()).recent_step_seconds[1] or np.nan)


@pytest.mark.parametrize(("start_nanos", "end_nanos"), [(0, 2**62), (2**62, 0)])
def test_a_daemons_impossible_window_keeps_ticks_in_order(start_nanos: int, end_nanos: int) -> None:
    played = Played()
    played.tick()
    for window in played.held():
        window.start_unix_nanos, window.end_unix_nanos = start_nanos, end_nanos
    played.now += TICK_SECONDS
    played.evaluate(replace(played.view().state, evaluated_unix_seconds=played.now))
    first, second = played.view().ticks
    assert first.start < first.end <= second.start <= second.end == played.now


def test_a_clock_that_is_set_back_leaves_ticks_in_order() -> None:
    played = Played()
    for _ in range(10):
        played.tick()
    played.now -= 9.0
    played.tick()
    starts = [tick.start for tick in played.view().ticks]
    ends = [tick.end for tick in played.view().ticks]
    assert ends[-1] == played.now and starts == sorted(starts) and all(map(float.__le__, starts, ends))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sets(st.integers(0, 40), min_size=1), st.booleans()), max_size=60),
    st.integers(3_000, 60_000),
)
def test_history_stays_within_its_limit_and_ticks_never_overlap(
    moves: list[tuple[str, set[int], bool]], limit_bytes: int
) -> None:
    played = Played(limit_bytes)
    alive = set()
    for run, ranks, ends in moves:
        if ends and run in alive:
            played.end(run)
            alive.discard(run)
        else:
            played.tick(run=run, ranks=sorted(ranks))
            alive.add(run)
        views = played.history.changed_since(-1)
        assert played.history.bytes <= limit_bytes or not any(view.ticks for view in views)
        for view in views:
            times = [moment for tick in view.ticks for moment in (tick.start, tick.end)]
            assert times == sorted(times)
            shown = matrix(view, columns=7)
            assert shown.shape[0] == len(view.members) and shown.shape[1] <= 7
            run_detail(view)


def test_ranks_are_ordered_by_known_pipeline_data_and_tensor() -> None:
    played = Played()
    played.tick(ranks=(5, 3, 0, 4))
    detail = run_detail(played.view())
    layout = detail.layout
    assert layout.ranks == [0, 4, 3, 5] and layout.pipeline == [0, 0, 1, 1] and layout.data == [0, 2, 1, 2]
    assert layout.tensor == [-1] * 4 and layout.axes == {"pipeline": 2, "data": 3}
    assert [layout.nodes[number] for number in layout.node] == ["n0", "n1", "n0", "n1"]
    assert detail.phase_seconds == {"wait_seconds": [0.01] * 4}
    assert heatmap(played.view(), "self_seconds", 0.0, 10)[0].ranks == layout.ranks


def test_a_rank_is_shown_beside_the_median_of_its_stage() -> None:
    played = Played()
    for _ in range(3):
        played.tick(lambda rank: {**usual(rank), "self_seconds": 1.0 + rank}, ranks=8)
    found = rank_history(played.view(), 6)
    assert found is not None and rank_history(played.view(), 8) is None
    own = next(series for series in found.history.series if series.signal == "self_seconds")
    assert own.values == [7.0] * 3 and own.cohort_median == [4.0] * 3  # of ranks 0, 2, 4 and 6
    assert len(found.history.starts) == len(found.history.ends) == 3


def test_the_histograms_last_bin_has_the_outliers_of_all_steps() -> None:
    played = Played()
    for number in range(50):
        played.tick(
            lambda rank, n=number: {"steps": 1.0, "step_seconds": 100.0 if n == 25 else 1.0 + rank / 10}, ranks=4
        )
    histogram = run_detail(played.view()).step_histogram
    assert histogram is not None and sum(histogram.counts) == 200 and len(histogram.edges) == 33
    assert histogram.edges[0] == pytest.approx(1.0) and histogram.counts[-1] == 4


@pytest.fixture(scope="module")
def fleet() -> dict[int, HeldWindow]:
    """4,096 ranks with everything that a probe, the process counters and stacks give."""
    return hold(*(rank_window(rank, FLEET) for rank in range(FLEET)))


def fleet_tick(played: Played, fleet: dict[int, HeldWindow]) -> float:
    """The CPU time of taking it."""
    played.now += TICK_SECONDS
    for window in fleet.values():
        window.heard_monotonic = played.now
    windows = HeldWindows(fleet)
    state = JobState(RUN, FLEET, usual_verdict(), 1.0, played.now, FLEET, 0.1, 0.4, 0.1, windows)
    begun = time.thread_time()
    played.history((state,))
    return time.thread_time() - begun


def test_a_tick_of_4096_ranks_costs_a_fraction_of_parsing(fleet: dict[int, HeldWindow], measured: Measured) -> None:
    played = Played()
    ticks = [fleet_tick(played, fleet) for _ in range(8)]
    begun = time.thread_time()
    for window in fleet.values():
        window.message()
    share = min(ticks) / (time.thread_time() - begun)
    measured("a tick of the console with 4,096 ranks", share, "of parsing them", at_most=1 / 3)


def test_4096_ranks_stay_within_the_limit_in_memory_too(fleet: dict[int, HeldWindow]) -> None:
    limit = 8 << 20
    played = Played(limit)
    fleet_tick(played, fleet)
    tracemalloc.start()
    try:
        for _ in range(60):
            fleet_tick(played, fleet)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert played.history.bytes <= limit and used < 1.25 * limit
    assert len(played.view().ticks) > 15
    header, data = heatmap(played.view(), "self_seconds", 0.0, 10)
    assert len(header.starts) <= 10 and len(data) == 4 * FLEET * len(header.starts)
