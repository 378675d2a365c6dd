"""The kernel's own accounting of a real process that burns a CPU and then starves beside another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from rankscope.daemon.process_collector import ProcessCollector
from rankscope.daemon.samples import ProcessSample, RankProcess, Span
from tests.support.waiting import wait_until

from .small_job import as_rank


def measured_until(rank: RankProcess, good: Callable[[ProcessSample], bool]) -> None:
    collector = ProcessCollector()
    last_nanos = time.time_ns()
    collector.collect([rank], Span(last_nanos, last_nanos + 1))

    def is_good() -> bool:
        nonlocal last_nanos
        span = Span(last_nanos, time.time_ns())
        last_nanos = span.end_unix_nanos
        sample = collector.collect([rank], span)[rank.key]
        assert isinstance(sample, ProcessSample)
        assert sample.resident_bytes is not None
        # Right after the fork it is still small.
        return sample.resident_bytes > 1_000_000 and good(sample)

    wait_until(is_good)


def test_a_core_sharing_rank_shows_cpu_time_and_run_delay() -> None:
    """Both burners on one CPU: each is ready to run about half of the time and does not."""
    cpu = min(os.sched_getaffinity(0))
    program = f"import os\nos.sched_setaffinity(0, [{cpu}])\nwhile True: pass"
    burners = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    try:
        measured_until(
            as_rank(burners[0].pid),
            lambda sample: (
                bool(sample.cpu_seconds) and bool(sample.run_delay_seconds) and bool(sample.involuntary_switches)
            ),
        )
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
