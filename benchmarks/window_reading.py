"""From the ring to a RankWindow: what one rank costs the daemon's own thread per window, without stacks."""

from __future__ import annotations

import os
import time

from benchmarks.reporting import Row, between
from benchmarks.statistics import spread_of
from rankscope.analysis.models.device_peaks import peak_flops_per_second
from rankscope.daemon.samples import RankProcess, Span, StepSample
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.probe import ring_layout
from rankscope.probe.ring import Ring

STEPS_PER_WINDOW = 20
STEP_NS = 100_000_000
WINDOWS = 400
SECONDS = {
    "input_seconds": 0.001,
    "blocking_seconds": 0.0,
    "optimizer_seconds": 0.01,
    "checkpoint_seconds": 0.0,
    **dict(zip(ring_layout.DDP_SECONDS, (0.02, 0.05, 0.03, 0.02), strict=True)),
}
ME = RankProcess("job", 0, 0, 1, os.getpid(), 1, (os.getpid(),))


def measure() -> list[Row]:
    ring = Ring()
    try:
        return _rows(ring)
    finally:
        ring.abandon()


def _rows(ring: Ring) -> list[Row]:
    collector = StepsCollector()
    reading, assembling = [], []
    end_ns = time.monotonic_ns() - WINDOWS * STEPS_PER_WINDOW * STEP_NS
    for number in range(WINDOWS):
        for _ in range(STEPS_PER_WINDOW):
            end_ns += STEP_NS
            ring.append(end_ns, STEP_NS, SECONDS, ring_layout.FLAG_DDP, 1)
        now = time.time_ns()
        span = Span(now - STEPS_PER_WINDOW * STEP_NS, now)
        started = time.process_time()
        sample = collector.collect([ME], span)[ME.key]
        read = time.process_time()
        if not isinstance(sample, StepSample):
            raise RuntimeError(sample.text)
        assemble(ME, "node", span, number, RankSamples(steps=sample), peak_flops_per_second)
        reading.append(1e6 * (read - started))
        assembling.append(1e6 * (time.process_time() - read))
    rows = []
    for name, values in (("ring read", reading), ("assembly", assembling)):
        spread = spread_of(values[1:])
        rows.append(
            Row(
                f"windows: {name}, per rank and window",
                spread.median,
                "µs",
                between(spread.low, spread.high, 0),
                digits=0,
            )
        )
    return rows
