"""A loop without an optimizer: the period of its operations is the step. Records are made here, in this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import pytest

from rankscope.analysis.step_graph.window_operations import join
from rankscope.daemon.samples import Span, StepSample
from rankscope.daemon.steps import unmarked_steps
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.steps.nccl_reader import RECORD_DTYPE
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.probe import nccl_layout, ring_layout
from tests.unit.daemon.nccl_memory import HALF, MS, SECOND, WORLD, Memory, Row
from tests.unit.daemon.ring_writer import ME, Writer

ALL_REDUCE, ALL_GATHER = 1, 2
RANK = replace(ME, job="loop")
WINDOW_NS = 2 * SECOND
KNOWN = 13  # windows after which steps are known


@dataclass
class Loop:
    """The rank's operations, one after another on its GPU."""

    now_ns: int
    rows: list[Row] = field(default_factory=list)
    counts: dict[tuple[int, int], int] = field(default_factory=dict)

    def operate(
        self,
        count: int = 1,
        *,
        moved: int = 4096,
        function: int = ALL_REDUCE,
        group: int = WORLD,
        lasts_ns: int = 100_000,
        gap_ns: int = 10_000,
        ahead_ns: int = 20_000,
    ) -> None:
        for _ in range(count):
            sequence = self.counts.get((group, function), 0)
            self.counts[group, function] = sequence + 1
            start = self.now_ns + gap_ns
            self.now_ns = start + lasts_ns
            self.rows.append((start, self.now_ns, start - ahead_ns, moved, group, sequence, function))

    def work(self, nanoseconds: int) -> None:
        self.now_ns += nanoseconds


class Watched:
    """A loop and the collector that looks at its rank at the end of each window."""

    def __init__(self, step: Callable[[Loop], None]) -> None:
        self.memory, self._step = Memory(), step
        # No more than a minute from now: the collector compares its clock with the windows'.
        self.loop = Loop(time.monotonic_ns() - 55 * SECOND)
        self._end_ns = self.loop.now_ns
        self._collector = StepsCollector(wall_minus_monotonic_ns=lambda: 0)

    def look(self) -> StepSample | None:
        begin, self._end_ns = self._end_ns, self._end_ns + WINDOW_NS
        while self.loop.now_ns < self._end_ns:
            self._step(self.loop)
        self.memory.write(self.loop.rows)
        self.loop.rows.clear()
        found = self._collector.collect([RANK], Span(begin, self._end_ns)).get(RANK.key)
        assert found is None or isinstance(found, StepSample), found
        return found

    def after(self, windows: int) -> StepSample | None:
        return [self.look() for _ in range(windows)][-1]

    def becomes(self, step: Callable[[Loop], None]) -> None:
        self._step = step


Watch: TypeAlias = Callable[[Callable[[Loop], None]], Watched]


@pytest.fixture
def watched() -> Iterator[Watch]:
    made: list[Watched] = []

    def watch(step: Callable[[Loop], None]) -> Watched:
        for before in made:
            before.memory.close()
        made.append(Watched(step))
        return made[-1]

    yield watch
    made[-1].memory.close()


def bursts(loop: Loop) -> None:
    """20 ms of work, then 100 equal all_reduces, of which the rank waits in the first."""
    loop.work(20 * MS)
    loop.operate(lasts_ns=5 * MS)
    loop.operate(99)


STEP_SECONDS = (20 * MS + 5 * MS + 99 * 100_000 + 100 * 10_000) / SECOND
WAIT_SECONDS = (5 * MS + 99 * 100_000) / SECOND


def test_a_burst_of_equal_operations_is_a_step(watched: Watch) -> None:
    job = watched(bursts)
    assert [job.look() for _ in range(10)] == [None] * 10, "a start-up repeats itself too"
    sample = job.after(4)
    assert sample is not None
    assert sample.step_seconds == pytest.approx(STEP_SECONDS)
    assert sample.steps_lost == 0 and 50 <= len(sample.step_seconds) <= 60
    (group,) = sample.groups
    assert (group.number, group.size, group.kind) == (WORLD, 4, ring_layout.GROUP_NCCL)
    assert group.seconds == pytest.approx(WAIT_SECONDS) and group.step_seconds == pytest.approx(STEP_SECONDS)


def test_each_step_is_handed_on_once(watched: Watch) -> None:
    job = watched(bursts)
    samples = [sample for sample in (job.look() for _ in range(KNOWN + 8)) if sample is not None]
    assert len(samples) >= 8
    totals = [sample.steps_total for sample in samples]
    counts = [len(sample.step_seconds) for sample in samples]
    assert np.diff(totals).tolist() == counts[1:]


def test_the_window_has_steps_and_the_source_of_waiting(watched: Watch) -> None:
    sample = watched(bursts).after(KNOWN)
    made = assemble(RANK, "node", Span(0, WINDOW_NS), 1, RankSamples(steps=sample), lambda _: None)
    assert made.steps > 50 and made.wait_source == "NCCL" and not made.problems
    assert made.step_seconds.mean == pytest.approx(STEP_SECONDS)
    assert made.figures["host_seconds"] == pytest.approx(STEP_SECONDS, rel=0.01)


def test_the_host_of_a_late_device_gets_ahead(watched: Watch) -> None:
    def late_device(loop: Loop) -> None:
        loop.work(20 * MS)
        loop.operate(100, ahead_ns=19 * MS)

    late = watched(late_device).after(KNOWN)
    assert late is not None and late.run_ahead_seconds == pytest.approx(0.019)
    on_time = watched(bursts).after(KNOWN)
    assert on_time is not None and (on_time.run_ahead_seconds < 0.001).all()


def test_operations_without_a_pause_are_no_steps(watched: Watch) -> None:
    assert watched(lambda loop: loop.operate(100)).after(KNOWN) is None


def test_a_loop_without_a_period_is_searched_ever_less_often(watched: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    monkeypatch.setattr(unmarked_steps, "find_period", searches.append)
    job = watched(lambda loop: loop.operate(100, gap_ns=10 * MS))
    job.after(40)
    assert len(searches) < 20
    for _ in range(4):
        before = len(searches)
        assert job.after(unmarked_steps.MAX_PAUSE + 1) is None
        assert len(searches) > before, "but it is not given up"


def test_groups_of_some_ranks_alone_number_no_steps(watched: Watch) -> None:
    def pipeline(loop: Loop) -> None:
        loop.work(20 * MS)
        loop.operate(10, group=HALF)
        loop.operate(function=ALL_GATHER, group=HALF)

    assert watched(pipeline).after(KNOWN) is None


def test_records_overwritten_between_looks_are_lost_steps(watched: Watch) -> None:
    def fast(loop: Loop) -> None:
        loop.work(30 * MS)
        loop.operate(400, lasts_ns=2_000, gap_ns=1_000)

    job = watched(fast)
    samples = [sample for sample in (job.look() for _ in range(KNOWN + 6)) if sample is not None]
    assert samples and all(sample.steps_lost > 0 for sample in samples[1:])
    for sample in samples:
        assert sample.step_seconds == pytest.approx(0.0312)
        assert len(sample.step_seconds) <= nccl_layout.CAPACITY // 400


def test_a_loop_that_becomes_another_has_other_steps(watched: Watch) -> None:
    def evaluation(loop: Loop) -> None:
        loop.work(50 * MS)
        loop.operate(3, moved=1 << 20)
        loop.operate(function=ALL_GATHER)

    job = watched(bursts)
    assert job.after(KNOWN) is not None
    job.becomes(evaluation)
    samples = [job.look() for _ in range(KNOWN + 12)]
    new = [sample.step_seconds for sample in samples if sample is not None and len(sample.step_seconds)]
    assert all(steps == pytest.approx(0.05044) or steps == pytest.approx(STEP_SECONDS) for steps in new[1:])
    assert None in samples, "the steps of the one are not compared with those of the other"
    assert new[-1] == pytest.approx(0.05044)


def test_a_loop_that_stops_keeps_its_last_step(watched: Watch) -> None:
    job = watched(bursts)
    before = job.after(KNOWN)
    job.becomes(lambda loop: loop.work(1 * SECOND))
    after = job.after(3)
    assert before is not None and after is not None
    assert len(after.step_seconds) == 0 and after.steps_total >= before.steps_total
    assert after.communicators, "what a hang is found by"


def test_steps_of_the_probe_come_before_the_period(watched: Watch, writer: Writer) -> None:
    writer.step(10)
    sample = watched(bursts).after(KNOWN)
    assert sample is not None and sample.steps_total == 1


def test_operations_of_steps_go_to_the_critical_path(watched: Watch) -> None:
    """Where ranks have different roles. A step has all of its operations."""

    def stage(loop: Loop) -> None:
        loop.work(20 * MS)
        loop.operate(6, group=HALF)
        loop.operate(moved=1 << 24)

    job = watched(stage)
    sent = [sample.operations for sample in (job.look() for _ in range(KNOWN + 6)) if sample is not None]
    rows = join([part for part in sent if part is not None])
    steps, counts = np.unique(rows.step, return_counts=True)
    assert len(steps) > 100 and (counts == 7).all()
    assert (np.diff(steps) == 1).all()


def test_memory_of_another_process_is_not_believed(watched: Watch) -> None:
    job = watched(bursts)
    os.pwrite(job.memory.descriptor, nccl_layout.fixed_part(os.getpid() + 1), 0)
    assert job.after(KNOWN) is None


def test_forged_records_break_nothing(watched: Watch) -> None:
    random = np.random.default_rng(0)
    job = watched(bursts)
    job.after(KNOWN)
    for _ in range(8):
        noise = random.integers(0, 256, nccl_layout.CAPACITY * nccl_layout.RECORD.size, dtype=np.uint8).view(
            RECORD_DTYPE
        )
        noise["number"] = np.arange(nccl_layout.CAPACITY) + 1
        noise["communicator"] = WORLD & 0xFFFFFFFF
        os.pwrite(job.memory.descriptor, noise.tobytes(), nccl_layout.HEADER_BYTES)
        os.pwrite(
            job.memory.descriptor, nccl_layout.COUNTERS.pack(nccl_layout.CAPACITY, 0), nccl_layout.COUNTERS_OFFSET
        )
        job.look()
