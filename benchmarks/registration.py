"""What it costs a job to be registered with a daemon that asks nothing of it: libkineto's thread polls every 5 s.

Runs with and without KINETO_USE_DAEMON=1 take turns, each a process of its own, since a process cannot change its mind.
The same daemon watches both, so that what watching costs is in neither or in both."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.overhead import INTERVAL_AT_MOST
from benchmarks.reporting import Row, between
from benchmarks.running import BenchmarkError, Control, RunningDaemon, await_ranks, daemon, job, wait_until
from benchmarks.statistics import paired_ratio

PAIRS = 8
SETTLING_SECONDS = 2.0
# Two polls or three of each run that polls.
BLOCK_SECONDS = 11.0


def measure(pairs: int = PAIRS, block_seconds: float = BLOCK_SECONDS) -> list[Row]:
    registered: list[float] = []
    plain: list[float] = []
    with daemon() as watching:
        for pair in range(pairs):
            for is_registered in (False, True) if pair % 2 == 0 else (True, False):
                median_ns = _median_step_ns(watching, is_registered, block_seconds)
                (registered if is_registered else plain).append(median_ns)
    return [row(registered, plain)]


def row(registered: Sequence[float], plain: Sequence[float]) -> Row:
    ratio = paired_ratio(registered, plain)
    return Row(
        f"captures: registered against not, median step ({np.median(plain) / 1e6:.1f} ms)",
        ratio.ratio,
        "×",
        between(ratio.low, ratio.high, 4),
        1.01,
        4,
        raw={"registered_median_ns": registered, "plain_median_ns": plain},
        noisy=ratio.high - ratio.low > INTERVAL_AT_MOST,
    )


def _median_step_ns(watching: RunningDaemon, is_registered: bool, block_seconds: float) -> float:
    """Of one run, once it is past its first steps and known to the daemon."""
    with job("heavy", 1, {"KINETO_USE_DAEMON": "1"} if is_registered else {}) as running:
        running.control.set(Control.PLAIN)
        await_ranks(watching, running)
        if is_registered:
            wait_until(lambda: watching.metrics()["rankscope_capture_clients"] > 0, "libkineto had called")
        time.sleep(SETTLING_SECONDS)
        start_ns = time.monotonic_ns()
        time.sleep(block_seconds)
        end_ns = time.monotonic_ns()
        running.ranks.check()
        times = np.load(running.times_path(0), mmap_mode="r")
        ends, lengths = (np.array(column) for column in times[times[:, 0] > 0].T)
    inside = lengths[(ends - lengths >= start_ns) & (ends <= end_ns)]
    if not inside.size:
        raise BenchmarkError("a block went by without a whole step; this machine is too busy to measure on")
    return float(np.median(inside))
