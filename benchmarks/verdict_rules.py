"""How fast a fleet is judged: 100,000 ranks' windows through the verdict rules, and messages into columns before."""

from __future__ import annotations

import time
from collections.abc import Mapping

from benchmarks.fleets import RANKS_PER_NODE, Fleet, rank_window, response
from benchmarks.reporting import Row, between
from benchmarks.statistics import spread_of
from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.correlation.columns import Tick, job_windows
from rankscope.operator.correlation.daemon_windows import DaemonMessage, HeldWindow, RankSeen
from rankscope.operator.runtime import tune_garbage_collection

FLEETS = tuple(Fleet(jobs, 100_000 // jobs, slow_ratio) for jobs in (1, 100, 12_500) for slow_ratio in (0.0, 0.01))
# More than any rule remembers, but for the baseline of communication, which is learned for minutes.
TICKS_BEFORE = 16
TICKS = 16
# A fleet that takes this long has missed the target anyway.
PATIENCE_SECONDS = 60.0
COLUMN_RANKS = 4_000
COLUMN_ROUNDS = 7


def measure() -> list[Row]:
    tune_garbage_collection()  # as the operator does
    return [*(_judge(fleet) for fleet in FLEETS), _make_columns()]


def _judge(fleet: Fleet) -> Row:
    judge = FleetDetector()
    seconds = []
    give_up_at = time.process_time() + PATIENCE_SECONDS
    for windows in fleet.ticks():
        started = time.process_time()
        verdicts = judge.evaluate(windows)
        seconds.append(time.process_time() - started)
        if len(seconds) == TICKS_BEFORE + TICKS or time.process_time() > give_up_at:
            break
    measured = seconds[TICKS_BEFORE:]
    if measured:
        _check(fleet, verdicts)
        spread = spread_of(measured)
        value, shown = spread.median, f"{spread.low:.3f} – {spread.high:.3f}, at most {max(measured):.3f}"
    else:
        value, shown = max(seconds), f"cut off after {len(seconds)} of {TICKS_BEFORE + TICKS} ticks"
    return Row(f"verdicts: {fleet.label}", value, "s", shown, 1.0, 3, raw={"cpu_seconds": seconds})


def _check(fleet: Fleet, verdicts: Mapping[str, Verdict]) -> None:
    """Rules that do not decide rightly have not been measured."""
    alarms = {job for job, v in verdicts.items() if v.kind is Kind.SLOW_RANK and v.severity is Severity.ALARM}
    causes = {v.cause.frames[0].function for v in verdicts.values() if v.cause.frames}
    healthy = sum(verdict.kind is Kind.HEALTHY for verdict in verdicts.values())
    slow = {f"job-{job}" for job in range(fleet.slow_jobs)}
    if alarms != slow or healthy != fleet.jobs - fleet.slow_jobs or (slow and causes != {"slow_line"}):
        raise RuntimeError(f"{fleet.label}: {len(alarms)} slow, {healthy} healthy, seen in {causes}: not what was made")


def _make_columns() -> Row:
    windows = [rank_window(rank, COLUMN_RANKS) for rank in range(COLUMN_RANKS)]
    nodes = [windows[first : first + RANKS_PER_NODE] for first in range(0, COLUMN_RANKS, RANKS_PER_NODE)]
    messages = [response("", node).SerializeToString() for node in nodes]
    members = iter([RankSeen(window.identity) for window in windows] * COLUMN_ROUNDS)
    microseconds = []
    for _ in range(COLUMN_ROUNDS):
        started = time.process_time()
        held: dict[int, HeldWindow] = {}
        for sent in messages:
            message = DaemonMessage("", sent)
            times = message.start_unix_nanos, message.end_unix_nanos
            for window, figures in zip(message.windows, message.figures(RANKS_PER_NODE), strict=True):
                held[len(held)] = HeldWindow(next(members), window, *times, figures)
        job_windows({"": Tick(held, COLUMN_RANKS)})
        microseconds.append(1e6 * (time.process_time() - started) / COLUMN_RANKS)
    spread = spread_of(microseconds)
    return Row(
        "verdicts: message to columns, per rank", spread.median, "µs", between(spread.low, spread.high, 1), None, 1
    )
