"""How fast a fleet is judged: 100,000 ranks' windows through the verdict rules, and messages into columns before."""

from __future__ import annotations

import time

from benchmarks.fleets import Fleet, rank_window
from benchmarks.reporting import Row, between
from benchmarks.statistics import spread_of
from rankscope.analysis.fleet import FleetJudge
from rankscope.analysis.verdict import Kind, Severity
from rankscope.operator.correlation.columns import job_window

FLEETS = tuple(Fleet(jobs, 100_000 // jobs, slow_ratio) for jobs in (1, 100, 12_500) for slow_ratio in (0.0, 0.01))
# More than any rule remembers.
TICKS_BEFORE = 11
TICKS = 7
COLUMN_RANKS = 4_000
COLUMN_ROUNDS = 7


def measure() -> list[Row]:
    return [*(_judge(fleet) for fleet in FLEETS), _make_columns()]


def _judge(fleet: Fleet, ticks_before: int = TICKS_BEFORE, ticks: int = TICKS) -> Row:
    judge = FleetJudge()
    seconds = []
    for number, windows in enumerate(fleet.ticks()):
        started = time.process_time()
        verdicts = judge.evaluate(windows)
        if number >= ticks_before:
            seconds.append(time.process_time() - started)
        if len(seconds) == ticks:
            break
    alarms = [job for job, v in verdicts.items() if v.kind is Kind.SLOW_RANK and v.severity is Severity.ALARM]
    healthy = sum(verdict.kind is Kind.HEALTHY for verdict in verdicts.values())
    # A rule that does not decide rightly has not been measured.
    expected = {f"job-{job}" for job in range(fleet.slow_jobs)}
    if set(alarms) != expected or healthy != fleet.jobs - fleet.slow_jobs:
        raise RuntimeError(f"{fleet.label}: {len(alarms)} slow and {healthy} healthy jobs were found")
    spread = spread_of(seconds)
    return Row(
        f"verdicts: {fleet.label}",
        spread.median,
        "s",
        between(spread.low, spread.high, 3),
        1.0,
        3,
        raw={"cpu_seconds": seconds},
    )


def _make_columns() -> Row:
    serialized = [rank_window(rank, COLUMN_RANKS).SerializeToString() for rank in range(COLUMN_RANKS)]
    windows = [type(rank_window(0, 1)).FromString(data) for data in serialized]
    microseconds = []
    for _ in range(COLUMN_ROUNDS):
        started = time.process_time()
        job_window(windows, COLUMN_RANKS)
        microseconds.append(1e6 * (time.process_time() - started) / COLUMN_RANKS)
    spread = spread_of(microseconds)
    return Row(
        "verdicts: message to columns, per rank", spread.median, "µs", between(spread.low, spread.high, 1), None, 1
    )
