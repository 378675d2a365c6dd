"""What one process or one caller may cost the daemon is bounded, and others do not pay for it."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankscope.common.run_names import run_labels
from tests.security.bystander import Bystander
from tests.security.metrics_reading import value
from tests.security.rank_processes import PORT, rank_variables
from tests.support.waiting import wait_until

RANKS, DESCRIPTORS = 12, 16_000
CALLERS = 4
# The budget looks at the last 20 s, and decides again after each change.
AFTERWARDS_SECONDS = 45.0
JOB = f"10.6.6.7:{PORT}"
# A rank is known by the torch it has loaded.
LOAD = """
import mmap, sys
with open(sys.argv[1], "rb") as library:
    loaded = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
"""
MANY_DESCRIPTORS = f"""{LOAD}
import os, time
for _ in range(int(sys.argv[2])):
    os.dup(0)
print("ready", flush=True)
time.sleep(600)
"""
MANY_THREADS = f"""{LOAD}
import threading, time
threading.stack_size(256 << 10)
for _ in range(int(sys.argv[2])):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def ranks(bystander: Bystander, folder: Path, program: str, argument: int, count: int) -> Iterator[None]:
    library = folder / "libtorch_cpu.so"
    library.write_bytes(b"torch")
    command = [sys.executable, "-I", "-c", program, str(library), str(argument)]
    with bystander.node():
        started = [
            subprocess.Popen(command, env=rank_variables(rank, count, "10.6.6.7"), stdout=subprocess.PIPE, text=True)
            for rank in range(count)
        ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


@contextmanager
def callers(urls: Sequence[str]) -> Iterator[None]:
    """Each asks for its page again and again, as fast as it is answered."""
    stopped = threading.Event()

    def ask(url: str) -> None:
        while not stopped.is_set():
            try:
                with urllib.request.urlopen(url, timeout=60) as answer:
                    answer.read()
            except OSError:
                continue

    threads = [threading.Thread(target=ask, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def watched_ranks(bystander: Bystander) -> float:
    return value(bystander, "rankscope_rank_up", **run_labels(JOB)) or 0.0


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= DESCRIPTORS, reason="too few descriptors allowed")
def test_ranks_with_many_descriptors_cost_no_more_than_others(bystander: Bystander, tmp_path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with bystander.under_attack() as watch, ranks(bystander, tmp_path, MANY_DESCRIPTORS, DESCRIPTORS, RANKS):
        wait_until(lambda: watched_ranks(bystander) == RANKS, lambda: bystander.log)
        watch.observe()


@pytest.mark.parametrize("query", ["", "?name[]=rankscope_rank_up"])
def test_callers_that_ask_without_pause_cost_no_rank_its_stacks(bystander: Bystander, query: str) -> None:
    with bystander.under_attack() as watch, callers([f"{bystander.metrics_url}{query}"] * CALLERS):
        watch.observe()


def test_a_rank_with_too_many_threads_is_given_up(bystander: Bystander, tmp_path: Path) -> None:
    with bystander.under_attack() as watch:
        with ranks(bystander, tmp_path, MANY_THREADS, 2000, 1):
            wait_until(lambda: value(bystander, "rankscope_rank_problem", kind="threads"), lambda: bystander.log)
            # It may be read before it has all of them. A window's metrics are out before its problems are logged.
            wait_until(lambda: re.search(r"it has \d{4} threads", bystander.log), lambda: bystander.log)
            watch.observe()
            watch.check()
        watch.observe(AFTERWARDS_SECONDS)  # what it has cost is not taken from the others


def test_a_rank_with_a_cuda_jobs_threads_is_sampled(bystander: Bystander, tmp_path: Path) -> None:
    with ranks(bystander, tmp_path, MANY_THREADS, 300, 1):
        wait_until(
            lambda: value(bystander, "rankscope_rank_stack_samples_total", **run_labels(JOB)), lambda: bystander.log
        )
