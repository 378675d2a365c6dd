"""The pieces of `make bench` that can be wrong without a clock noticing."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import registration
from benchmarks.__main__ import BENCHMARKS
from benchmarks.fleet_layout import FleetLayout, ScriptedDaemon, pod_uid
from benchmarks.fleets import Fleet
from benchmarks.overhead import Block, _Compared, _orders
from benchmarks.repeated_traces import repeated
from benchmarks.reporting import Row, table
from benchmarks.statistics import paired_ratio, spread_of
from rankscope.v1.rank_service_pb2 import WatchRanksResponse


def test_there_is_a_benchmark_for_every_promise() -> None:
    assert set(BENCHMARKS) == {
        "probe", "verdicts", "windows", "traces", "timeline", "captures", "registration", "daemon", "gpu",
        "profiles", "console", "pages", "rules", "fleet", "overhead", "path",
    }  # fmt: skip


def test_the_spread_is_median_and_quartiles() -> None:
    spread = spread_of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)


def test_equal_conditions_have_a_ratio_and_interval_of_one() -> None:
    blocks = [1.0, 1.02, 0.99, 1.01, 1.0, 0.98]
    ratio = paired_ratio(blocks, blocks)
    assert ratio.ratio == ratio.low == ratio.high == 1.0


def test_a_drift_common_to_a_pair_leaves_the_ratio_unchanged() -> None:
    off = [1.0, 1.1, 1.2, 1.3, 1.4]
    ratio = paired_ratio([1.05 * value for value in off], off)
    assert ratio.ratio == pytest.approx(1.05)
    assert ratio.low == pytest.approx(1.05) and ratio.high == pytest.approx(1.05)


def test_blocks_that_cannot_be_paired_are_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks on, 1 off"):
        paired_ratio([1.0, 1.0], [1.0])


def test_on_and_off_take_turns_in_both_orders() -> None:
    assert list(_orders(3)) == [False, True, True, False, False, True]


def test_only_steps_that_lie_wholly_in_a_block_count() -> None:
    ends, lengths = np.array([10, 30, 40, 50, 80]), np.array([10, 20, 10, 10, 30])
    compared = _Compared.of([Block(False, 10, 45), Block(True, 40, 90)], ends, lengths)
    assert compared.off_medians == [15.0]  # 10–30 and 30–40; 40–50 is cut by the end
    assert compared.on_means == [20.0]  # 40–50 and 50–80


def test_registration_cost_is_a_paired_ratio_and_noise_is_reported() -> None:
    plain = [5e6, 5.2e6, 5.1e6]
    told = registration.row([1.001 * value for value in plain], plain)
    assert told.name.endswith("median step (5.1 ms)") and told.value == pytest.approx(1.001) and told.met
    assert registration.row([5e6, 6e6, 4e6], plain).noisy


def test_a_missed_target_is_shown_and_context_lines_have_none() -> None:
    shown = table([Row("a", 3.0, "µs", target=2.0), Row("b", 1.0, "µs", target=2.0), Row("c", 1.0, "µs")])
    assert [line.split()[-1] for line in shown.splitlines()[2:]] == ["NO", "yes", "µs"]


def test_a_made_up_fleet_has_its_declared_slow_ranks() -> None:
    fleet = Fleet(jobs=4, ranks_per_job=8, slow_ratio=0.5)
    windows = next(fleet.ticks())
    slow = [name for name, window in windows.items() if window.columns.self_seconds.argmax() == 0]
    assert {"job-0", "job-1"} <= set(slow)
    assert windows["job-0"].columns.step_seconds.std() == 0.0
    assert windows["job-0"].evidence()[0].stacks is not None


def test_a_repeated_trace_is_shifted_in_time_with_new_ids() -> None:
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1000.5, "dur": 10.25, "args": {"correlation": 7}}
    flow = {"ph": "s", "id": 3, "ts": 1001.0}
    made = repeated({"traceEvents": [{"ph": "M", "name": "process_name"}, kernel, flow], "schemaVersion": 1}, 3)
    assert [event["ts"] for event in made["traceEvents"] if event.get("cat")] == [1000.5, 2010.75, 3021.0]
    assert [event["args"]["correlation"] for event in made["traceEvents"] if event.get("cat")] == [7, 15, 23]
    assert [event["id"] for event in made["traceEvents"] if event["ph"] == "s"] == [3, 11, 19]
    assert sum(event["ph"] == "M" for event in made["traceEvents"]) == 1
    assert made["schemaVersion"] == 1


def test_a_simulated_fleet_has_each_rank_once_in_own_pods() -> None:
    layout = FleetLayout(daemons=100, ranks_per_node=8)
    seen: dict[str, list[int]] = {}
    for node in (*range(30), 99):
        message = WatchRanksResponse.FromString(ScriptedDaemon(layout, node).message(tick=900_000_000))
        assert {window.identity.pod for window in message.windows} == {pod_uid(node)}
        assert {window.end_unix_nanos for window in message.windows} == {1_800_000_000 * 10**9}
        assert {window.start_unix_nanos for window in message.windows} == {1_799_999_998 * 10**9}
        for window in message.windows:
            seen.setdefault(window.identity.job, []).append(window.identity.rank)
    assert next(iter(seen.values())) == list(range(25 * 8))  # a quarter of the nodes is one job
    assert [node for job in layout.jobs for node in job.nodes] == list(range(100))
    assert len(list(layout.pods())) == 100
