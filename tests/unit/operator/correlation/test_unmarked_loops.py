"""Verdicts on loops without an optimizer, from the records of NCCL's plugin to the correlator: four ranks, on a clock
that the test owns."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest

from rankscope.analysis.verdicts.verdict import DEVICE, HOST, Kind, Verdict
from rankscope.daemon.samples import RankProcess, Span
from rankscope.daemon.steps.step_operations import Role
from rankscope.daemon.steps.unmarked_steps import PeriodProgress, read_unmarked_steps
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.operator.correlation.correlator import Correlator, JobState
from tests.daemon_messages import hold
from tests.unit.daemon.nccl_memory import MS, SECOND, WORLD, Memory, Row

RANKS, OPERATIONS = 4, 20
WORK_NS, TRANSFER_NS, LAUNCH_NS = 30 * MS, 60_000, 8_000
WINDOW_NS = 2 * SECOND
NO_NUMBERS = np.zeros(0, dtype=np.int64)


@dataclass
class Fault:
    after_seconds: float = np.inf
    host_ns: int = 0  # by which rank 2's host is late before each step
    device_ns: int = 0  # by which its device is


class Job:
    """Ranks whose hosts wait for their devices after each step. All leave an operation together."""

    def __init__(self, fault: Fault) -> None:
        self._random = np.random.default_rng(0)
        self._fault = fault
        self.memories = [Memory(has_halves=False) for _ in range(RANKS)]
        self.began_ns = self.now_ns = 1_000 * SECOND
        self._sequence = 0

    def close(self) -> None:
        for memory in self.memories:
            memory.close()

    def run_until(self, end_ns: int) -> None:
        rows: list[list[Row]] = [[] for _ in range(RANKS)]
        while self.now_ns < end_ns:
            is_late = self.now_ns - self.began_ns >= self._fault.after_seconds * 1e9
            late = np.arange(RANKS) == 2 if is_late else np.zeros(RANKS, dtype=bool)
            host = self.now_ns + self._random.uniform(50_000, 150_000, RANKS) + late * self._fault.host_ns
            free = host + WORK_NS * self._random.uniform(0.97, 1.03, RANKS) + late * self._fault.device_ns
            for number in range(OPERATIONS):
                issued = host + LAUNCH_NS * (number + 1)
                start = np.maximum(issued + 5_000, free + 3_000)
                stop = start.max() + TRANSFER_NS
                free = np.full(RANKS, stop)
                for rank in range(RANKS):
                    times = (int(start[rank]), int(stop), int(issued[rank]))
                    rows[rank].append((*times, 4096, WORLD, self._sequence, 1))
                self._sequence += 1
            self.now_ns = int(free[0])
        for memory, of_rank in zip(self.memories, rows, strict=True):
            memory.write(of_rank)


def verdicts(fault: Fault, windows: int = 32) -> list[Verdict]:
    now = 0.0
    correlator = Correlator(clock=lambda: now, monotonic=lambda: now)
    states: list[JobState] = []
    correlator.listen(states.extend)
    progress = [PeriodProgress() for _ in range(RANKS)]
    with closing(Job(fault)) as job:
        for window in range(windows):
            span = Span(job.began_ns + window * WINDOW_NS, job.began_ns + (window + 1) * WINDOW_NS)
            job.run_until(span.end_unix_nanos)
            made = []
            for rank, memory in enumerate(job.memories):
                role, link = Role(rank, RANKS, NO_NUMBERS, 0), f"/proc/self/fd/{memory.descriptor}"
                sample, progress[rank] = read_unmarked_steps(
                    link, os.getpid(), progress[rank], role, span.start_unix_nanos
                )
                process = RankProcess("loop", rank, rank, RANKS, 100 + rank, 1, (100 + rank,))
                made.append(assemble(process, "node", span, window + 1, RankSamples(steps=sample), lambda _: None))
            now = span.end_unix_nanos / 1e9 + 0.1
            correlator.take(map(hold, made))
            correlator.tick()
    return [state.verdict for state in states]


def test_a_healthy_loop_is_healthy_once_its_steps_are_known() -> None:
    kinds = [verdict.kind for verdict in verdicts(Fault())]
    assert {*kinds[:10]} == {Kind.INSUFFICIENT_DATA}
    assert {*kinds[20:]} == {Kind.HEALTHY}
    assert {*kinds} == {Kind.INSUFFICIENT_DATA, Kind.HEALTHY}


@pytest.mark.parametrize(
    ("fault", "bound"),
    [(Fault(40, host_ns=15 * MS), HOST), (Fault(40, device_ns=15 * MS), DEVICE)],
    ids=["host", "device"],
)
def test_a_rank_that_becomes_slow_is_named(fault: Fault, bound: str) -> None:
    found = verdicts(fault)
    assert not any(verdict.kind.is_finding for verdict in found[:20])
    last = found[-1]
    assert (last.kind, last.culprits, last.is_alarm) == (Kind.SLOW_RANK, (2,), True)
    assert last.cause.bound == bound
    step_ns = WORK_NS + OPERATIONS * (TRANSFER_NS + 3_000)
    assert last.impact_ratio == pytest.approx(15 * MS / (step_ns + 15 * MS), abs=0.05)
