from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from rankscope.common.run_names import run_labels
from rankscope.daemon.export.rank_metrics import MAX_COLLECTIVES, RankReport, RankTotals, add_window
from rankscope.daemon.samples import CollectiveRate, Problem
from rankscope.daemon.windows.window import RankSamples
from tests.unit.daemon import window_makers as make
from tools.daemon_samples import STATUS, full_gpu, full_rank, gpu_status, report, scrape

GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"


def series(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    keyed = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(keyed) == len(samples), "a series twice makes Prometheus refuse the scrape"
    return keyed


def names_of(text: str, rank: int) -> set[str]:
    return {name for name, labels in series(text) if ("rank", str(rank)) in labels}


def test_metrics_are_as_in_the_golden_file() -> None:
    """REGENERATE_GOLDEN=1 rewrites the file; look at the difference before committing it."""
    problem = Problem("steps", "missing", "no ring")
    level_zero = report(make.rank(1), RankSamples(None, make.process(), make.stacks(), (problem,)))
    text = scrape(full_rank(), level_zero)
    if os.environ.get("REGENERATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_rank_and_its_gpu_have_at_most_sixty_series() -> None:
    """With three problems and an XID error; the rest of the budget is for more of these."""
    problems = tuple(Problem(f"source{index}", "kind", "text") for index in range(50))
    everything = full_rank(without=("optimizer",))  # which only the host's clock can tell
    bare = replace(STATUS, metrics_detail="standard", gpu=gpu_status())
    # A GPU retires pages or remaps rows.
    status = replace(bare, gpu=gpu_status(replace(full_gpu(), retired_pages={})))
    measured = series(scrape(RankReport(everything.window, everything.totals, problems), status=status))
    assert 50 < len(measured) - len(series(scrape(status=bare))) <= 60


def test_the_default_keeps_what_alerts_need() -> None:
    status = replace(STATUS, metrics_detail="standard")
    names = {name for name, _ in series(scrape(full_rank(), status=status))}
    told = ("throttled_seconds_total", "xid_errors_total", "ecc_errors_total", "remapped_rows", "remapping_pending")
    told += ("remapping_failed", "memory_bytes", "power_watts", "temperature_celsius", "clock_hertz", "clock_max_hertz")
    told += ("tensor_active_ratio", "sm_active_ratio", "dram_active_ratio", "estimated_flops_per_second", "up", "info")
    assert {f"rankscope_gpu_{name}" for name in told} <= names
    assert "rankscope_rank_cause_seconds_total" in names
    assert not names & {
        "rankscope_rank_threads",
        "rankscope_gpu_sm_occupancy_ratio",
        "rankscope_gpu_pcie_bytes_per_second",
    }


def test_stack_phases_are_exported_when_nothing_else_splits_steps() -> None:
    status = replace(STATUS, metrics_detail="standard")
    level_zero = report(make.rank(1), RankSamples(None, make.process(), make.stacks()))
    told = [
        dict(labels)["rank"]
        for name, labels in series(scrape(full_rank(), level_zero, status=status))
        if "phase" in name
    ]
    assert set(told) == {"1"}


def test_what_was_not_measured_has_no_series() -> None:
    text = scrape(report(make.rank(3), RankSamples()))
    assert names_of(text, 3) == {"rankscope_rank_info", "rankscope_rank_up"}
    assert series(text)[("rankscope_rank_up", frozenset({*run_labels(make.rank().job).items(), ("rank", "3")}))] == 0


def test_counters_grow_from_window_to_window() -> None:
    sample = make.steps(1.0, 1.0, input=[0.25, 0.25])
    text = scrape(report(make.rank(), RankSamples(sample), windows=3))
    labels = frozenset({*run_labels(make.rank().job).items(), ("rank", "0"), ("cause", "input")})
    assert series(text)[("rankscope_rank_cause_seconds_total", labels)] == 1.5


def collective(number: int, bytes_per_step: float = 100.0, bus: float | None = 1e9) -> CollectiveRate:
    return CollectiveRate(number, 8, "all_reduce", "ring", "simple", 3, bytes_per_step, bus)


def values(text: str, name: str) -> dict[str, float]:
    return {dict(labels)["group"]: value for (found, labels), value in series(text).items() if found == name}


def test_only_the_busiest_group_has_a_bandwidth_by_default() -> None:
    sample = replace(make.steps(1.0), collectives=(collective(1, bus=None), collective(2), collective(3)))
    told = report(make.rank(), RankSamples(sample))
    name = "rankscope_rank_collective_bus_bandwidth_bytes_per_second"
    assert values(scrape(told), name) == {"2": 1e9, "3": 1e9}
    standard = scrape(told, status=replace(STATUS, metrics_detail="standard"))
    assert values(standard, name) == {"2": 1e9}
    assert not values(standard, "rankscope_rank_collective_bytes_total")


def test_collective_bytes_add_up_over_the_steps() -> None:
    sample = replace(make.steps(1.0, 1.0), collectives=(collective(1), collective(2, 7.0)))
    text = scrape(report(make.rank(), RankSamples(sample), windows=3))
    assert values(text, "rankscope_rank_collective_bytes_total") == {"1": 600.0, "2": 42.0}


def test_bytes_of_groups_long_gone_are_dropped() -> None:
    totals = RankTotals()
    for number in range(30):
        sample = replace(make.steps(1.0), collectives=(collective(number), collective(0xFFFF)))
        totals = add_window(totals, report(make.rank(), RankSamples(sample)).window)
    assert len(totals.collective_bytes) == MAX_COLLECTIVES
    assert totals.collective_bytes["ffff", "all_reduce"] == 3000.0
    assert totals.collective_bytes["1d", "all_reduce"] == 100.0


def test_a_rank_that_ended_is_gone() -> None:
    assert names_of(scrape(full_rank(0), full_rank(1)), 1)
    assert not names_of(scrape(full_rank(0)), 1)


def test_two_reports_of_one_rank_do_not_spoil_the_scrape() -> None:
    twin = report(make.rank(0, pid=99), RankSamples())
    assert ("pid", "4000") in next(
        labels for name, labels in series(scrape(full_rank(0), twin)) if name.endswith("rank_info")
    )


def test_hostile_names_stay_short_printable_labels() -> None:
    hostile = make.rank(0, job='evil"} 1\nfake_metric 7\x00' + "x" * 10_000)
    text = scrape(report(hostile, RankSamples()))
    assert "fake_metric" not in {name for name, _ in series(text)}
    assert max(len(line) for line in text.splitlines()) < 600


def test_an_unknown_phase_counts_as_other() -> None:
    text = scrape(report(make.rank(), RankSamples(stacks=make.stacks(phase="invented"))))
    shares = {dict(labels)["phase"]: value for (name, labels), value in series(text).items() if "phase_ratio" in name}
    assert shares["other"] == 0.75
    assert "invented" not in shares
    assert shares["checkpoint"] == 0
