"""Jobs without a fault on a machine with too few CPUs: no alarm, and hardly a warning.

Several jobs run side by side, and some beside processes that take a CPU each: that is the noise. The jobs and their
order are the same each time. RANKSCOPE_HEALTHY_RUNS plays only the first ones."""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from rankscope.analysis.verdicts.verdict import Kind, Severity, headline
from rankscope.cli.demo_job.environment import probe_environment
from rankscope.cli.standalone import Standalone, private_config
from rankscope.operator.correlation.correlator import JobState
from tests.support.measuring import Measured
from tools.jobs.launcher import start_ranks

RUNS = int(os.environ.get("RANKSCOPE_HEALTHY_RUNS", "200"))
TRAINING_SECONDS = 18
MAX_RUN_SECONDS = 300.0
MAX_EXIT_SECONDS = 10.0
# Torch takes seconds of CPU time to import: more ranks at once would hardly train together.
MAX_RANKS_AT_ONCE = 8

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(7200)]


@dataclass(frozen=True)
class HealthyRun:
    name: str
    ranks: int
    arguments: tuple[str, ...]
    threads: str  # of each rank; empty: torch's default


@dataclass(frozen=True)
class SideBySide:
    runs: tuple[HealthyRun, ...]
    busy_loops: int


def planned(count: int) -> Iterator[SideBySide]:
    choice = random.Random(20).choice
    made = 0
    while made < count:
        busy_loops, free_ranks, runs = choice((0, 0, 1, 2)), MAX_RANKS_AT_ONCE, []
        while free_ranks >= 2 and made < count:
            ranks = min(choice((2, 2, 2, 2, 2, 3, 3, 4, 4, 8)), free_ranks)
            free_ranks -= ranks
            kind, width = choice(("ddp", "ddp", "fsdp2")), choice((64, 128, 256, 512))
            flags = (kind, "--width", width, "--batch", choice((16, 32, 64)), "--workers", choice((0, 0, 2)))
            arguments = tuple(str(flag) for flag in (*flags, "--seconds", TRAINING_SECONDS))
            runs.append(HealthyRun(f"healthy-{made}-{kind}", ranks, arguments, choice(("1", "1", ""))))
            made += 1
        yield SideBySide(tuple(runs), busy_loops)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class Findings:
    """A listener: what was ever said of each job. A finding counts once for a job, and as an alarm if it became one."""

    def __init__(self) -> None:
        self.said: dict[str, dict[Kind, str]] = {}
        self.alarms: set[tuple[str, Kind]] = set()
        self.judged: set[str] = set()

    def __call__(self, states: tuple[JobState, ...]) -> None:
        for state in states:
            verdict = state.verdict
            if verdict.kind is not Kind.INSUFFICIENT_DATA:
                self.judged.add(state.job)
            if verdict.kind.is_finding:
                text = f"{verdict.severity.value}: {headline(verdict)} ({verdict.reason})"
                self.said.setdefault(state.job, {})[verdict.kind] = text
                if verdict.severity is Severity.ALARM:
                    self.alarms.add((state.job, verdict.kind))

    def count(self, kinds: Sequence[Kind], *, alarms: bool) -> int:
        found = ((job, kind) for job, said in self.said.items() for kind in said)
        return sum(((job, kind) in self.alarms) is alarms and kind in kinds for job, kind in found)

    def __str__(self) -> str:
        return "\n".join(f"{job}: {text}" for job, said in self.said.items() for text in said.values())


def play(together: SideBySide, folder: Path) -> None:
    """Raises JobError if a job does not run to its end."""
    with ExitStack() as stack:
        stack.enter_context(busy_loops(together.busy_loops))
        started = []
        for run in together.runs:
            (folder / run.name).mkdir()
            environment = probe_environment() | {"TORCHELASTIC_RUN_ID": run.name, "GROUP_RANK": "0"}
            environment |= {"LOCAL_WORLD_SIZE": str(run.ranks)}
            environment |= {"OMP_NUM_THREADS": run.threads} if run.threads else {}
            ranks = start_ranks("small_job.py", run.arguments, folder / run.name, run.ranks, environment)
            started.append(stack.enter_context(ranks))
        for job in started:
            trained = partial(job.have_written, "trained-{}")
            job.wait_for(trained, "the end of training", MAX_RUN_SECONDS, may_end=True)
            job.wait(MAX_EXIT_SECONDS)


def test_healthy_jobs_on_a_busy_machine_raise_nothing(measured: Measured) -> None:
    began, findings = time.monotonic(), Findings()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-noise-")))
        # The tests run in the same process; the daemon's budget is charged for the daemon's thread.
        standalone = stack.enter_context(Standalone(private_config(str(folder)), own_cpu_seconds=time.thread_time))
        stack.callback(standalone.correlator.listen(findings))
        sizes: Counter[int] = Counter()
        for together in planned(RUNS):
            play(together, folder)
            sizes.update(run.ranks for run in together.runs)
            seconds = time.monotonic() - began
            print(f"{sizes.total()} runs, {seconds:.0f} s, load {os.getloadavg()[0]:.1f}\n{findings}", flush=True)
    # Where workers of data loaders have no CPU, every rank does wait for its input.
    others = [kind for kind in Kind if kind.is_finding and kind not in (Kind.SLOW_RANK, Kind.INPUT_BOUND)]
    print("runs by ranks:", dict(sorted(sizes.items())))
    measured("noise: fault-free runs that were judged", len(findings.judged), "runs", at_least=0.9 * RUNS)
    measured("noise: alarms that name a rank", findings.count([Kind.SLOW_RANK], alarms=True), "runs", at_most=0)
    measured("noise: warnings that name a rank", findings.count([Kind.SLOW_RANK], alarms=False), "runs", at_most=1)
    measured("noise: other alarms", findings.count(others, alarms=True), "runs", at_most=0)
    measured("noise: other warnings", findings.count(others, alarms=False), "runs", at_most=1)
