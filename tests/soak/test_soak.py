"""`rankscope up` for many windows and many jobs: nothing of an old job may stay."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.daemon_process import Serving, run_of, serving
from tests.integration.small_job import small_ddp_job
from tests.support.measuring import Measured
from tests.support.processes import children, cpu_seconds
from tests.support.waiting import wait_until

SECONDS = float(os.environ.get("RANKSCOPE_SOAK_SECONDS", "1200"))
JOB_SECONDS = 30.0
# Caches and the allocator are full after these; what grows from then on grows for good.
WARM_UP_JOBS = 5

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(SECONDS + 1200)]


class Size(NamedTuple):
    memory_mib: float
    descriptors: int
    threads: int
    processes: int
    series: int


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Serving]:
    flags = ("--console-listen", "127.0.0.1:0", "--profile-interval-seconds", "5")
    with serving(tmp_path, "up", *flags) as started:
        yield started


def test_a_daemon_does_not_grow_with_time_and_jobs(up: Serving, measured: Measured) -> None:
    began, cpu_began = time.monotonic(), cpu_seconds(up.process.pid)
    sizes: list[Size] = []
    while len(sizes) <= WARM_UP_JOBS or time.monotonic() < began + SECONDS:
        play_job(up, f"soak-{len(sizes)}")
        sizes.append(size(up))
    assert up.is_healthy()
    first, last = sizes[WARM_UP_JOBS], sizes[-1]
    jobs = len(sizes) - 1 - WARM_UP_JOBS
    cores = (cpu_seconds(up.process.pid) - cpu_began) / (time.monotonic() - began)
    measured(f"soak: memory that {jobs} more jobs add", last.memory_mib - first.memory_mib, "MiB", at_most=20)
    measured("soak: descriptors", last.descriptors - first.descriptors, "more", at_most=2)
    measured("soak: threads", last.threads - first.threads, "more", at_most=2)
    measured("soak: processes", last.processes - first.processes, "more", at_most=0)
    measured("soak: series after the last job", last.series - first.series, "more", at_most=5)
    measured("soak: CPU of `up`, windows of 0.5 s", cores, "cores", at_most=0.5)


def play_job(up: Serving, run_id: str) -> None:
    """Returns when its series are gone."""
    with small_ddp_job(run_id):
        wait_until(lambda: run_id in runs(up), lambda: up.log)
        time.sleep(JOB_SECONDS)
    wait_until(lambda: run_id not in runs(up), lambda: up.log)


def runs(up: Serving) -> str:
    return " ".join({run_of(labels) for _, labels, _ in up.scrape()})


def size(up: Serving) -> Size:
    pids = [up.process.pid, *children(up.process.pid)]

    def of_all(count: Callable[[Path], int]) -> int:
        return sum(count(Path(f"/proc/{pid}")) for pid in pids)

    return Size(
        of_all(resident_kib) / 1024,
        of_all(lambda process: len(list((process / "fd").iterdir()))),
        of_all(lambda process: len(list((process / "task").iterdir()))),
        len(pids),
        len(up.scrape()),
    )


def resident_kib(process: Path) -> int:
    lines = (process / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
