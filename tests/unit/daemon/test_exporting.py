from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rankscope.daemon.captures.duty_cycle import REASONS
from rankscope.daemon.captures.service import CaptureStatus
from rankscope.daemon.collector import CollectorStatus
from rankscope.daemon.export.metrics import Exporter
from rankscope.daemon.export.rank_metrics import GROUP_KINDS
from rankscope.daemon.export.status import DaemonStatus, Snapshot
from rankscope.daemon.samples import GroupSpan, ProbeFacts, Problem, RankProcess
from rankscope.daemon.windows.totals import RankReport, RankTotals, add_window
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.v1.window_pb2 import Stall
from tests.unit.daemon import gpu_makers
from tests.unit.daemon import window_makers as make

GOLDEN = Path(__file__).parent / "golden" / "metrics.txt"
STATUS = DaemonStatus(
    version="0.1.0",
    node="node-a",
    collectors={"steps": CollectorStatus(0.25, True), "stacks": CollectorStatus(0.5, False)},
    own_cpu_seconds=1.5,
    sampling_cpu_seconds=0.75,
    resident_bytes=60_000_000,
    budget_used_ratio=0.4,
    stack_rate_hertz=10.0,
    stack_recorded_ratio=0.95,
    ranks=2,
    windows_total=6,
    watch_readers=1,
    captures=CaptureStatus(
        {"delivered": 8, "failed": 1, "cancelled": 0},
        {"job-a": 1.01},
        clients=8,
        malformed_total=2,
        unanswered={"late": 4, "hushed": 0, "unsent": 0},
        unvouched_total=1,
        duty_results={"done": 3, "failed": 0, "skipped": 1},
        duty_skips={**dict.fromkeys(REASONS, 0), "young": 1},
    ),
    gpu=gpu_makers.status(gpu_makers.full_gpu()),
)


def report(rank: RankProcess, samples: RankSamples, stall: Stall | None = None, windows: int = 2) -> RankReport:
    window = assemble(rank, "node-a", make.span(), 1, samples, lambda _: None, stall)
    totals = RankTotals()
    for _ in range(windows):
        totals = add_window(totals, window)
    return RankReport(window, totals, samples.problems)


def full_rank(number: int = 0, without: tuple[str, ...] = ()) -> RankReport:
    """A rank of which every source measured everything, more than any real one: a step is timed on a device or not."""
    facts = ProbeFacts(pipeline=1, tensor=0, data=1, model_flops_per_step=5e14, peak_flops_per_second=1e15)
    names = ("wait", "communication", "input", "forward", "backward", "optimizer", "checkpoint")
    columns = {name: [0.125, 0.125] for name in (*names, "host", "run_ahead") if name not in without}
    sample = make.steps(1.0, 1.0, steps_total=40, facts=facts, allocated_bytes=1_000, **columns)
    groups = tuple(GroupSpan(0xABC, 4, number, kind, 2, 0.25, 1.0) for kind in sorted(GROUP_KINDS))
    sample = replace(sample, groups=groups)
    sample = replace(sample, reserved_bytes=2_000, peak_allocated_bytes=1_500, device_total_bytes=4_000)
    return report(make.rank(number), RankSamples(sample, make.process(), make.stacks()), Stall(seconds_since_step=9))


def scrape(*ranks: RankReport, status: DaemonStatus = STATUS) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exporter(lambda: Snapshot(status, ranks)))
    return generate_latest(registry).decode()


def series(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    keyed = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(keyed) == len(samples), "a series twice makes Prometheus refuse the scrape"
    return keyed


def names_of(text: str, rank: int) -> set[str]:
    return {name for name, labels in series(text) if ("rank", str(rank)) in labels}


def test_metrics_are_as_in_the_golden_file() -> None:
    """REGENERATE_GOLDEN=1 writes the file anew; look at the difference before committing it."""
    problem = Problem("steps", "missing", "no ring")
    level_zero = report(make.rank(1), RankSamples(None, make.process(), make.stacks(), (problem,)))
    text = scrape(full_rank(), level_zero)
    if os.environ.get("REGENERATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_rank_and_its_gpu_cost_at_most_sixty_series_by_default() -> None:
    """With three problems and an XID error; the rest of the budget is for more of these."""
    problems = tuple(Problem(f"source{index}", "kind", "text") for index in range(50))
    everything = full_rank(without=("optimizer",))  # which only the host's clock can tell
    bare = replace(STATUS, metrics_detail="standard", gpu=gpu_makers.status())
    status = replace(bare, gpu=gpu_makers.status(gpu_makers.full_gpu()))
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


def test_phases_of_stacks_are_told_by_default_where_nothing_else_splits_the_step() -> None:
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
    assert series(text)[("rankscope_rank_up", frozenset({("job", make.rank().job), ("rank", "3")}))] == 0


def test_counters_grow_from_window_to_window() -> None:
    sample = make.steps(1.0, 1.0, input=[0.25, 0.25])
    text = scrape(report(make.rank(), RankSamples(sample), windows=3))
    labels = frozenset({("job", make.rank().job), ("rank", "0"), ("cause", "input")})
    assert series(text)[("rankscope_rank_cause_seconds_total", labels)] == 1.5


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
