"""Hosts that are ahead of their devices, in runs that were recorded on an H200: four ranks of local SGD, which meet in
every tenth step."""

from __future__ import annotations

import gzip
import json

import pytest
from google.protobuf.json_format import ParseDict

from rankscope.analysis.verdicts.exposed_communication import EXPOSED
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.operator.correlation.correlator import Correlator, JobState
from rankscope.v1.window_pb2 import RankWindow
from tests.daemon_messages import hold, job_window
from tests.shared_data import H200
from tests.unit.operator.correlation.test_columns_on_devices import STEP, on_device


def recorded(name: str) -> list[list[RankWindow]]:
    with gzip.open(H200 / f"windows_{name}.jsonl.gz", "rt") as file:
        return [[ParseDict(window, RankWindow()) for window in json.loads(line)] for line in file]


def verdicts(ticks: list[list[RankWindow]]) -> list[Verdict]:
    now = 0.0
    correlator = Correlator(clock=lambda: now, monotonic=lambda: now)
    states: list[JobState] = []
    correlator.listen(states.extend)
    for windows in ticks:
        now = windows[0].end_unix_nanos / 1e9 + 0.1
        correlator.take(map(hold, windows))
        correlator.tick()
    return [state.verdict for state in states]


@pytest.mark.parametrize("name", ["local_sgd", "local_sgd_varied"])
def test_hosts_that_drift_apart_leave_no_rank_slow(name: str) -> None:
    said = verdicts(recorded(name))
    assert {verdict.kind for verdict in said} == {Kind.INSUFFICIENT_DATA, Kind.HEALTHY}
    assert not any(verdict.cause.stalls for verdict in said)


def test_without_its_hosts_pace_the_last_rank_looks_slow() -> None:
    ticks = recorded("local_sgd")
    for window in (window for windows in ticks for window in windows):
        window.figures.pop("host_quick_seconds", None)
    assert any(verdict.kind.is_finding for verdict in verdicts(ticks))


def test_a_slow_host_costs_what_it_is_slower() -> None:
    """The step was 3.7 ms, and is 7.0 ms: 47 %."""
    last = verdicts(recorded("local_sgd_slow_host"))[-1]
    assert (last.kind, last.culprits, last.is_alarm) == (Kind.SLOW_RANK, (2,), True)
    assert last.impact_ratio == pytest.approx(0.47, abs=0.05)


def waiting(rank: int, gained_steps: float, host_seconds: float = STEP, ahead_seconds: float = 0.3) -> RankWindow:
    """Rank 2 is last. The hosts of the others need as long for a step as its own, and are ahead."""
    window = on_device(rank, (7, EXPOSED, 0.01 if rank == 2 else 0.07))
    last = {"run_ahead_seconds": 0.0, "host_gained_steps": 0.0}
    others = {"run_ahead_seconds": ahead_seconds, "host_gained_steps": gained_steps}
    pace = {"host_seconds": host_seconds, "host_quick_seconds": 0.08}
    window.figures.update(pace | (last if rank == 2 else others))
    return window


def own_seconds(*windows: RankWindow) -> list[float]:
    columns = job_window(list(windows), len(windows)).columns
    assert columns.self_seconds + columns.wait_seconds == pytest.approx([STEP] * len(windows))
    own: list[float] = columns.self_seconds.tolist()
    return own


def test_a_hosts_pace_is_own_work_while_its_device_waits() -> None:
    assert own_seconds(*(waiting(rank, gained_steps=4.0) for rank in range(4))) == pytest.approx([0.09] * 4)


def test_a_host_that_gains_no_step_has_no_pace() -> None:
    windows = (waiting(rank, gained_steps=0.9) for rank in range(4))
    assert own_seconds(*windows) == pytest.approx([0.03, 0.03, 0.09, 0.03])


def test_a_host_without_quick_steps_has_no_pace() -> None:
    """It waits in all of them: the gain is that of a queue which was empty at the beginning."""
    windows = [waiting(rank, gained_steps=4.0) for rank in range(4)]
    for window in windows:
        window.figures["host_quick_seconds"] = 0.95 * STEP
    assert own_seconds(*windows) == pytest.approx([0.03, 0.03, 0.09, 0.03])


def test_a_fault_in_some_steps_keeps_quick_hosts_quick() -> None:
    """The mean of rank 2's host is twice its quickest steps; that of the others need not be."""
    windows = [waiting(rank, gained_steps=4.0, host_seconds=2 * 0.02) for rank in range(4)]
    for window in windows:
        window.figures["host_quick_seconds"] = 0.02
    assert own_seconds(*windows) == pytest.approx([0.03, 0.03, 0.09, 0.03])


def test_waiting_of_few_long_steps_is_waiting_for_others() -> None:
    windows = [waiting(rank, gained_steps=4.0) for rank in range(4)]
    for window in windows[:2]:
        window.long_steps.steps, window.long_steps.seconds, window.long_steps.waited_seconds = 2, 1.2, 1.2
    columns = job_window(windows, 4).columns
    assert columns.self_seconds[:2] == pytest.approx([0.09] * 2)
    assert columns.usual_step_seconds == pytest.approx([STEP] * 4)
