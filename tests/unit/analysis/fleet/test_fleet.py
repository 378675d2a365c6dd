"""Reports on fleets that are made here, a fact at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rankscope.analysis.fleet.facts import (
    CULPRIT_LABELS,
    LOST_LABELS,
    USED_LABELS,
    Figures,
    FleetFacts,
    Program,
    RunFacts,
    RunKey,
)
from rankscope.analysis.fleet.hardware import binomial_tail
from rankscope.analysis.fleet.report import FleetReport, make_report
from rankscope.analysis.verdicts.thresholds import FLEET_THRESHOLDS

H100 = "NVIDIA H100 80GB HBM3"
TOTAL_BYTES = 8e10
Row = tuple[tuple[str, ...], float]


def key(name: str, team: str = "t") -> RunKey:
    return ("", team, name)


def lone(count: int, prefix: str = "sweep", **changes: Any) -> dict[RunKey, RunFacts]:
    facts: dict[str, Any] = {
        "program": Program("t", "kim", "image", "python sweep.py", 1),
        "utilization_ratio": 0.15,
        "memory_bytes": 9e9,
        "memory_total_bytes": TOTAL_BYTES,
        "device": H100,
        **changes,
    }
    return {key(f"{prefix}-{number}"): RunFacts(**facts) for number in range(count)}


def facts_of(
    used: Mapping[tuple[str, ...], float],
    culprits: Mapping[tuple[str, ...], float] | None = None,
    lost: Mapping[tuple[str, ...], float] | None = None,
    runs: Mapping[RunKey, RunFacts] | None = None,
) -> FleetFacts:
    return FleetFacts(
        0.0,
        604800.0,
        used=Figures.of(USED_LABELS, used),
        culprits=Figures.of(CULPRIT_LABELS, culprits or {}),
        lost=Figures.of(LOST_LABELS, lost or {}),
        runs=runs or {},
    )


def spread(runs: int, nodes: int, hours: float = 80.0) -> dict[tuple[str, ...], float]:
    """Every run on three nodes."""
    return {(*key(f"r{run}"), f"n{(run * 7 + place * 5) % nodes}"): hours for run in range(runs) for place in range(3)}


def runs_on(used: Mapping[tuple[str, ...], float], node: str) -> list[str]:
    return [row[2] for row in used if row[3] == node]


def named(run: str, node: str, hours: float, gpu: str = "g", phase: str = "forward", bound: str = "device") -> Row:
    return (*key(run), node, gpu, phase, bound, "slow_rank"), hours


def test_figures_add_up_by_any_labels() -> None:
    figures = Figures.of(("a", "b"), {("x", "1"): 1.0, ("x", "2"): 2.0, ("y", "1"): 4.0})
    assert figures.sums("a") == {("x",): 3.0, ("y",): 4.0}
    assert figures.sums("b", "a") == {("1", "x"): 1.0, ("2", "x"): 2.0, ("1", "y"): 4.0}
    assert figures.most("a") == {("x",): 2.0, ("y",): 4.0}
    assert figures.where("a", {"y": True}).total == 4.0
    assert Figures.of(("a",), {}).sums("a") == {} and Figures.of(("a",), {}).where("a", {}).total == 0.0


def test_usage_is_added_up_by_team_run_and_node() -> None:
    runs = {key("r0"): RunFacts(Program(team="vision")), key("r1", ""): RunFacts()}
    used = {(*key("r0"), "n0"): 10.0, (*key("r0"), "n1"): 30.0, (*key("r1", ""), "n1"): 5.0}
    lost = {(*key("r0"), "slow_rank", "n1"): 4.0, (*key("r1", ""), "jitter", ""): 1.0}
    report = make_report(facts_of(used, lost=lost, runs=runs))
    assert (report.used_gpu_hours, report.lost_gpu_hours, report.runs, report.nodes) == (45.0, 5.0, 2, 2)
    assert [(loss.verdict, loss.lost_gpu_hours, loss.runs) for loss in report.verdicts] == [
        ("slow_rank", 4.0, 1),
        ("jitter", 1.0, 1),
    ]
    assert [(row.name, row.used_gpu_hours, row.lost_gpu_hours) for row in report.teams] == [
        ("vision", 40.0, 4.0),
        ("(unknown)", 5.0, 1.0),
    ]
    assert [row.name for row in report.by_run] == ["t/r0", "r1"]
    assert [(row.name, row.used_gpu_hours, row.runs) for row in report.by_node] == [
        ("n1", 35.0, 2),
        ("(no node is named)", 0.0, 0),
        ("n0", 10.0, 1),
    ]
    assert report.by_node[1].lost_ratio is None


def test_an_empty_fleet_has_an_empty_report() -> None:
    report = make_report(FleetFacts(0.0, 1.0))
    assert report.used_gpu_hours == 0.0 and report.lost_ratio is None
    assert not (report.hardware or report.packing or report.low_runs or report.by_node or report.verdicts)


def test_the_culprit_of_most_of_its_runs_is_listed() -> None:
    used = spread(100, 30)
    ours = runs_on(used, "n4")
    culprits = dict(named(run, "n4", 6.0, phase="throttled") for run in ours[:6])
    lost = {(*key(run), "slow_rank", "n4"): 2.0 for run in ours[:6]}
    (one,) = make_report(facts_of(used, culprits, lost)).hardware
    assert (one.node, one.gpu, one.runs, one.named_gpu_hours, one.lost_gpu_hours) == ("n4", "g", len(ours), 36.0, 12.0)
    assert one.culprit_of == tuple(sorted(f"t/{run}" for run in ours[:6]))
    assert [(e.verdict, e.phase, e.bound, e.gpu_hours) for e in one.evidence] == [
        ("slow_rank", "throttled", "device", 36.0)
    ]
    assert len(one.culprit_of) / one.runs > 0.5 > 0.01 > one.peers_ratio
    assert one.chance_ratio < FLEET_THRESHOLDS.culprit_chance


@pytest.mark.parametrize(
    ("runs", "hours", "cause"),
    [
        (2, 6.0, {}),  # few runs
        (6, 0.25, {}),  # for minutes
        (6, 6.0, {"phase": "input", "bound": "host"}),
        (6, 6.0, {"phase": "forward", "bound": "host"}),  # a line of code
        (6, 6.0, {"phase": "starved", "bound": ""}),
        (6, 6.0, {"phase": "unknown", "bound": ""}),
    ],
)
def test_nodes_without_proof_against_their_device_are_not_listed(
    runs: int, hours: float, cause: dict[str, str]
) -> None:
    used = spread(100, 30)
    rows = [named(run, "n4", hours, **cause) for run in runs_on(used, "n4")[:runs]]
    assert not make_report(facts_of(used, dict(rows))).hardware


def test_a_node_like_all_others_is_not_listed() -> None:
    used = spread(100, 30)
    rows = [named(run, f"n{node}", 6.0) for node in range(30) for run in runs_on(used, f"n{node}")[:3]]
    assert not make_report(facts_of(used, dict(rows))).hardware


def test_a_busy_node_with_few_culprit_runs_is_innocent() -> None:
    used = {(*key(f"s{number}"), "n0"): 1.0 for number in range(300)} | spread(100, 30)
    rows = [named(run, f"n{node}", 6.0) for node in range(1, 30, 3) for run in runs_on(used, f"n{node}")[:1]]
    rows += [named(f"s{number}", "n0", 6.0) for number in range(6)]
    assert not make_report(facts_of(used, dict(rows))).hardware


def test_several_gpus_of_a_node_are_not_one() -> None:
    used = spread(100, 30)
    rows = [named(run, "n4", 6.0, gpu) for run in runs_on(used, "n4")[:5] for gpu in ("g0", "g1")]
    (one,) = make_report(facts_of(used, dict(rows))).hardware
    assert one.gpu == "" and len(one.culprit_of) == 5


def test_nodes_of_the_same_name_in_two_clusters_are_two() -> None:
    used = {(cluster, *row[1:]): hours for row, hours in spread(60, 20).items() for cluster in ("east", "west")}
    ours = runs_on(spread(60, 20), "n4")
    culprits = {("west", "t", run, "n4", "g", "throttled", "device", "slow_rank"): 5.0 for run in ours}
    (one,) = make_report(facts_of(used, culprits)).hardware
    assert (one.cluster, one.node, len(one.culprit_of)) == ("west", "n4", one.runs)


@pytest.mark.parametrize(("count", "trials", "probability"), [(3, 10, 0.1), (1, 5, 0.5), (6, 6, 0.3), (40, 1000, 0.02)])
def test_the_binomial_tail_is_that_of_its_sum(count: int, trials: int, probability: float) -> None:
    exact = sum(
        math.comb(trials, k) * probability**k * (1 - probability) ** (trials - k) for k in range(count, trials + 1)
    )
    assert binomial_tail(count, trials, probability) == pytest.approx(exact, rel=1e-9)
    assert binomial_tail(0, trials, probability) == 1.0 and binomial_tail(trials + 1, trials, probability) == 0.0


def mfu(ratio: float, team: str = "t", target: float | None = 0.4) -> RunFacts:
    return RunFacts(Program(team=team), mfu_ratio=ratio, mfu_target_ratio=target)


def test_runs_and_teams_below_their_target_are_listed() -> None:
    runs = {
        key("low"): mfu(0.2, "speech"),
        key("large"): mfu(0.42, "speech"),
        key("above"): mfu(0.401, "maps"),
        key("nearly"): mfu(0.395, "maps"),
        key("short"): mfu(0.1, "ads"),
        key("aimless"): mfu(0.1, "ads", None),
    }
    hours = {"low": 100.0, "large": 50.0, "above": 10.0, "nearly": 10.0, "short": 0.5, "aimless": 100.0}
    report = make_report(facts_of({(*key(name), "n"): value for name, value in hours.items()}, runs=runs))
    (run,) = report.low_runs
    assert (run.name, run.team, run.shortfall_gpu_hours) == ("t/low", "speech", 50.0)
    (team,) = report.low_teams
    assert (team.name, team.runs, team.gpu_hours) == ("speech", 2, 150.0)
    assert team.mfu_ratio == pytest.approx((0.2 * 100 + 0.42 * 50) / 150)


def packed(runs: Mapping[RunKey, RunFacts], hours: float = 8.0) -> FleetReport:
    return make_report(facts_of({(*run, "n"): hours for run in runs}, runs=runs))


def test_repetitive_runs_are_packed_with_saving_and_assumption() -> None:
    (group,) = packed(lone(40)).packing
    assert (group.runs, group.gpu_hours, group.command, group.user) == (40, 320.0, "python sweep.py", "kim")
    ways = {option.way: option for option in group.options}
    # 5 × 15 % is at most 80 %; 8 × 9 GB would fit, too.
    assert ways["MPS"].runs_per_gpu == ways["fuse"].runs_per_gpu == 5
    assert ways["MPS"].saved_gpu_hours == pytest.approx(320.0 * 4 / 5)
    # An instance of one slice is too slow, and too small: 2 of 7 slices, of which a GPU has three.
    assert (ways["MIG"].detail, ways["MIG"].saved_gpu_hours) == ("3 instances of 2g", pytest.approx(320.0 * 2 / 3))
    assert not ways["smaller GPU"].detail.startswith("MI")
    assert all(option.assumption for option in group.options)
    saved = [option.saved_gpu_hours for option in group.options]
    assert saved == sorted(saved, reverse=True) and group.saved_gpu_hours == saved[0] < group.gpu_hours


def test_memory_limits_how_many_runs_share_a_gpu() -> None:
    (group,) = packed(lone(10, memory_bytes=3e10)).packing
    assert {option.way: option.runs_per_gpu for option in group.options}["MPS"] == 2
    (group,) = packed(lone(10, memory_bytes=5e10)).packing
    assert {option.way for option in group.options} == {"smaller GPU"}


@pytest.mark.parametrize(
    "runs",
    [
        lone(4),  # not repetitive
        lone(10, utilization_ratio=0.8),  # busy
        lone(10, utilization_ratio=None),
        lone(10, memory_bytes=None),
        lone(10, program=Program("t", "kim", "image", "python sweep.py", 8)),
        lone(10, program=Program("t", "kim", "image", "", 1)),  # of what, is not known
        {**lone(4), **lone(4, "other", program=Program("t", "ann", "image", "python sweep.py", 1))},
    ],
)
def test_other_runs_are_not_packed(runs: dict[RunKey, RunFacts]) -> None:
    assert not packed(runs).packing


def test_few_hours_are_not_worth_packing() -> None:
    assert not packed(lone(10), hours=0.5).packing


def test_an_unknown_device_is_shared_but_not_divided() -> None:
    (group,) = packed(lone(10, device="Some GPU")).packing
    assert {option.way for option in group.options} == {"MPS", "fuse"}


def test_what_is_missing_is_said() -> None:
    facts = replace(FleetFacts(0.0, 1.0), problems=("MFU: nothing from Monday",))
    assert make_report(facts).problems == ("MFU: nothing from Monday",)
