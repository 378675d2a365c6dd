"""What the critical path of a large job costs the operator in a window: messages, the choice of replicas, their path
and the verdict. A job may use a tenth of a CPU, so that one window of several is judged.

python -m benchmarks path"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.reporting import Row, between
from benchmarks.statistics import spread_of
from rankscope.analysis.step_graph.window_operations import RankOperations
from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.verdict import Kind, Severity
from rankscope.analysis.verdicts.windows import RankColumns
from rankscope.operator.correlation.daemon_windows import HeldWindow, RankSeen
from rankscope.operator.runtime import tune_garbage_collection
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import GroupSeat, OperationsWindow, StepOperations
from tools.made_layouts import (
    DATA,
    WINDOW_SECONDS,
    MadeJob,
    MadeLayout,
    SlowLink,
    SlowRank,
    SlowStage,
    job_window,
    rank_columns,
)

# Judged windows. The first ones also look at what groups are for.
WINDOWS = 9
FIRST_WINDOWS = 5
LARGE = MadeLayout(tensor=8, pipeline=8, data=64)


@dataclass(frozen=True)
class Case:
    name: str
    layout: MadeLayout
    kind: Kind = Kind.HEALTHY
    culprits: tuple[int, ...] = ()


CASES = (
    Case("256 ranks, all of them, healthy", MadeLayout(tensor=8, pipeline=8, data=4)),
    Case("1,024 ranks, healthy", MadeLayout(tensor=8, pipeline=8, data=16)),
    Case("4,096 ranks, healthy", LARGE),
    Case("4,096 ranks, a late host", replace(LARGE, faults=(SlowRank(1234, 10_000_000),)), Kind.SLOW_RANK, (1234,)),
    Case(
        "4,096 ranks, a slow GPU",
        replace(LARGE, faults=(SlowRank(3000, 10_000_000, on_device=True),)),
        Kind.SLOW_RANK,
        (3000,),
    ),
    Case("4,096 ranks, a stage slow since step 32", replace(LARGE, faults=(SlowStage(3, 1.5, 32),)), Kind.SLOW_STAGE),
    Case(
        "4,096 ranks, a slow data group",
        replace(LARGE, faults=(SlowLink(DATA, 1234, 20.0),)),
        Kind.SLOW_COMMUNICATION,
    ),
    # Each step waits for another of 64 replicas: three of them show little of it. No rank may be accused.
    Case("4,096 ranks, uneven data", replace(LARGE, uneven=0.3)),
)


def measure() -> list[Row]:
    tune_garbage_collection()
    return [_row(case) for case in CASES]


def _row(case: Case) -> Row:
    detector, world = FleetDetector(), case.layout.world
    seen = [RankSeen(RankIdentity(job="job", rank=rank, world_size=world)) for rank in range(world)]
    seconds, judged, accused, rows, traffic = list[float](), list[int](), set[int](), 0, None
    alarm_after: float | None = None
    for number, (columns, messages) in enumerate(_windows(case.layout)):
        held = [HeldWindow(who, message, 0, 0, b"") for who, message in zip(seen, messages, strict=True)]
        began = time.process_time()
        parts = [part for window in held if (part := window.operations()) is not None]
        window = replace(job_window(number, columns, parts), end_unix_seconds=1e9 + WINDOW_SECONDS * number)
        verdict = detector.evaluate({"job": window})["job"]
        seconds.append(time.process_time() - began)
        accused |= set(verdict.culprits) if verdict.kind is Kind.SLOW_RANK else set()
        rows = max(rows, parts[0].size)
        if verdict.severity is Severity.ALARM and alarm_after is None:
            alarm_after = WINDOW_SECONDS * (number + 1)
        breakdown = detector.breakdown("job")
        if breakdown is not None and breakdown.totals != traffic:
            traffic = breakdown.totals
            judged.append(number)
        if len(judged) == WINDOWS:
            break
    if (verdict.kind, accused) != (case.kind, set(case.culprits)):
        raise RuntimeError(f"{case.name}: {verdict.kind.value}, slow {sorted(accused)}: not what was made")
    settled, first = [seconds[place] for place in judged[FIRST_WINDOWS:]], seconds[judged[0]]
    spread, mean = spread_of(settled), sum(seconds) / len(seconds)
    alarm = "" if alarm_after is None else f", alarm after {alarm_after:.0f} s"
    shown = f"{between(spread.low, spread.high)}, first {first:.2f}, mean of all windows {mean:.2f}{alarm}"
    raw = {
        "cpu_seconds": seconds,
        "judged": judged,
        "rows_of_rank": rows,
        "bytes_of_rank": 28 * rows,
        "alarm_after_seconds": alarm_after,
    }
    return Row(f"path: {case.name}", spread.median, "s", shown, 1.0, raw=raw)


def _windows(layout: MadeLayout) -> Iterator[tuple[RankColumns, list[bytes]]]:
    job, columns = MadeJob(layout), None
    for parts in job.windows(1 << 20):
        if columns is None:
            columns = rank_columns(layout.world, 5, job.now_ns / 1e9 / job.step)
        yield columns, [_message(part) for part in parts]


def _message(part: RankOperations) -> bytes:
    seats = [GroupSeat(number=seat.number, size=seat.size, position=seat.position) for seat in part.seats]
    sent = StepOperations(
        first_step=part.first_step,
        start_nanos=part.start_ns,
        tick_nanos=part.tick_ns,
        unix_less_gpu_nanos=part.unix_less_gpu_ns,
        seats=seats,
        rows=part.rows,
    )
    return OperationsWindow(operations=sent).SerializeToString()
