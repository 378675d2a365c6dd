"""Steps, waits and run-ahead on a device, with the device played by a clock that the test moves."""

from __future__ import annotations

import math
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.probe import collective_spans, device_steps, ring_layout
from rankscope.probe.clock import CudaClock
from rankscope.probe.collective_spans import Spans
from rankscope.probe.ddp import NOT_MEASURED
from rankscope.probe.device_steps import DeviceSteps
from rankscope.probe.failure import switch
from rankscope.probe.torch_timers import LAST_END, STEPS, Tally
from tests.unit.probe.fake_cuda import MS, FakeCuda


class Group:
    """A process group of four whose collectives end when `others_ns`, and the transfer, allow."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def allreduce(self, others_ns: int = 0, transfer: float = 5.0, is_async: bool = False) -> Any:
        job = self._job
        done_ns = max(job.cuda.current.reached_ns, others_ns) + int(transfer * MS)
        if is_async:
            return Work(job, done_ns)
        job.cuda.current.enqueue(0.0, done_ns)
        return None

    def _start_coalescing(self) -> None:
        pass

    def _end_coalescing(self) -> None:
        self._job.cuda.current.enqueue(7.0)


class Work:
    def __init__(self, job: Job, done_ns: int) -> None:
        self._job, self._done_ns = job, done_ns

    def wait(self) -> None:
        self._job.cuda.current.enqueue(0.0, self._done_ns)


class Job:
    """One rank's loop. `step` advances the host and gives the device its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = FakeCuda()
        clock = SimpleNamespace(monotonic_ns=self.cuda.monotonic_ns)
        monkeypatch.setattr(device_steps, "time", clock)
        monkeypatch.setattr(collective_spans, "time", clock)
        self.tally = Tally()
        distributed = SimpleNamespace(
            get_process_group_ranks=lambda group: [0, 1, 2, 3], get_rank=lambda: 2, group=SimpleNamespace(WORLD=None)
        )
        torch = SimpleNamespace(compiler=SimpleNamespace(is_compiling=lambda: False), distributed=distributed)
        self.spans = Spans(torch, self.tally)
        group_class = type("ProcessGroup", (Group,), {})
        work_class = type("Work", (Work,), {})
        monkeypatch.setattr(f"{__name__}.Work", work_class)
        self.spans.install(SimpleNamespace(ProcessGroup=group_class, Work=work_class))
        self.group = group_class(self)
        self.spans.clock = CudaClock(self.cuda)
        self.records: list[dict[str, float]] = []
        self.device = DeviceSteps(self.spans.clock, self.spans, self._write)

    def sample_every(self, steps: int) -> None:
        self.spans.rate.every = self.spans.collective_rate.every = steps

    def _write(
        self, end_ns: int, span_ns: int, seconds: dict[str, float], flags: int, steps: int, host_end_ns: int
    ) -> None:
        self.records.append(
            {
                "end": end_ns / MS,
                "host_end": host_end_ns / MS,
                "span": span_ns / MS,
                "steps": steps,
                "flags": flags,
                **seconds,
            }
        )

    def border(self) -> None:
        self.tally.ledger[STEPS] += 1
        self.tally.ledger[LAST_END] = self.cuda.now_ns
        self.device.border(self.tally.ledger[:], NOT_MEASURED, 0, is_typical=True)
        self.device.look()

    def median(self, name: str, skip: int = 20) -> float:
        known = [record[name] for record in self.records[skip:] if record[name] == record[name]]
        return median(known) * (1 if name in ("span", "end") else 1000)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_a_step_takes_its_device_time_despite_an_early_host(job: Job) -> None:
    job.sample_every(4)
    for number in range(200):
        job.cuda.main.enqueue(58.0)
        job.cuda.pass_time(4.0 if number < 20 else 58.0)  # until the queue is full
        job.border()
    assert job.median("span") == pytest.approx(58.0)
    assert job.median("host_seconds") == pytest.approx(58.0, abs=0.1)
    assert job.median("run_ahead_seconds") == pytest.approx(20 * 54.0, rel=0.1)
    assert all(record["flags"] & ring_layout.FLAG_DEVICE for record in job.records)
    ahead = [record["end"] - record["host_end"] for record in job.records[20:]]
    assert median(ahead) == pytest.approx(20 * 54.0, rel=0.1)


def test_a_late_host_is_never_ahead(job: Job) -> None:
    job.sample_every(4)
    for number in range(200):
        job.cuda.pass_time(number % 60)
        job.device.look()  # from beside the loop, at any moment
        job.cuda.pass_time(60 - number % 60)
        job.cuda.main.enqueue(5.0)
        job.border()
    assert job.median("span") == pytest.approx(60.0)
    assert job.median("run_ahead_seconds") <= 6.0


def test_a_step_unfinished_on_the_device_is_not_recorded(job: Job) -> None:
    for _ in range(5):
        job.cuda.main.enqueue(100.0)
        job.cuda.pass_time(1.0)
        job.border()
    assert job.records == []
    job.cuda.pass_time(300.0)
    job.device.look()
    assert len(job.records) == 3


def test_the_rank_that_others_wait_for_has_the_shortest_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = []
    for own, others in ((10.0, 70.0), (70.0, 10.0)):  # victim, culprit
        job = Job(monkeypatch)
        job.sample_every(4)
        for _ in range(100):
            start_ns = job.cuda.main.reached_ns
            job.cuda.main.enqueue(own)
            job.group.allreduce(start_ns + int(others * MS))
            job.cuda.pass_time(75.0)
            job.border()
        (slot,) = job.spans.groups.slots.values()
        assert (slot.size, slot.position, slot.kind) == (4, 2, ring_layout.GROUP_EXPOSED)
        slots.append(slot)
        assert job.median("span") == pytest.approx(75.0)
        assert job.median("exposed_seconds") == pytest.approx(slot.seconds / slot.samples * 1000)
    victim, culprit = (slot.seconds / slot.samples * 1000 for slot in slots)
    assert victim == pytest.approx(65.0)
    assert culprit == pytest.approx(5.0)


def test_an_asynchronous_collective_costs_what_the_stream_waits_for_it(job: Job) -> None:
    job.sample_every(4)
    for _ in range(100):
        work = job.group.allreduce(transfer=30.0, is_async=True)
        job.cuda.main.enqueue(20.0)  # goes on meanwhile
        work.wait()
        job.cuda.pass_time(30.0)
        job.border()
    (slot,) = job.spans.groups.slots.values()
    assert slot.seconds / slot.samples == pytest.approx(0.010)


def test_coalesced_collectives_are_one_span_and_each_is_seen(job: Job) -> None:
    job.sample_every(4)
    for _ in range(100):
        job.group._start_coalescing()
        for _ in range(3):
            job.group.allreduce(transfer=0.0)
        job.group._end_coalescing()
        job.cuda.pass_time(20.0)
        job.border()
    (slot,) = job.spans.groups.slots.values()
    assert slot.seconds / slot.samples == pytest.approx(0.007)
    assert not job.spans.is_blind(enqueued=300, steps=100)
    assert job.spans.is_blind(enqueued=300, steps=100)  # from here on none was seen


def test_what_another_stream_waits_is_not_taken_for_exposed(job: Job) -> None:
    job.sample_every(4)
    for _ in range(100):
        job.cuda.current = job.cuda.side
        job.group.allreduce(transfer=30.0)
        job.cuda.current = job.cuda.main
        job.cuda.main.enqueue(40.0)
        job.cuda.pass_time(40.0)
        job.border()
    (slot,) = [slot for slot in job.spans.groups.slots.values() if slot.samples > 5]
    assert slot.kind == ring_layout.GROUP_OVERLAPPED
    assert job.records[-5]["exposed_seconds"] != job.records[-5]["exposed_seconds"]


def test_events_are_neither_recorded_nor_queried_during_graph_capture(job: Job) -> None:
    job.sample_every(1)
    for number in range(40):
        job.cuda.capturing = 10 <= number < 20
        job.cuda.main.enqueue(5.0)
        job.group.allreduce()
        job.cuda.pass_time(10.0)
        job.border()
    job.cuda.pass_time(100.0)
    job.device.look()
    assert sum(record["steps"] for record in job.records) == 40
    assert job.median("span", skip=25) == pytest.approx(10.0)


def test_an_evaluation_between_two_steps_is_not_in_the_spans(job: Job) -> None:
    job.sample_every(1)
    for number in range(60):
        job.cuda.main.enqueue(400.0 if number == 40 else 5.0)
        job.group.allreduce(job.cuda.main.reached_ns + (300 * MS if number == 40 else 0))
        job.cuda.pass_time(705.0 if number == 40 else 10.0)
        job.border()
    (slot,) = job.spans.groups.slots.values()
    assert slot.seconds / slot.samples == pytest.approx(0.005)


def test_events_are_used_again(job: Job) -> None:
    job.sample_every(2)
    for _ in range(500):
        job.cuda.main.enqueue(5.0)
        job.group.allreduce()
        job.cuda.pass_time(10.0)
        job.border()
    assert job.cuda.events_recorded > 900
    assert job.cuda.events_made < 30


@pytest.mark.parametrize(("step_milliseconds", "marks"), [(5.0, 4), (30.0, 60), (500.0, 60), (4000.0, 400)])
def test_sampling_keeps_its_budget_and_samples_steps_common_to_ranks(step_milliseconds: float, marks: int) -> None:
    rates = []
    for jitter in (0.97, 1.0, 1.02):
        rate = collective_spans.Rate()
        for step in range(1, 400):
            sampled = rate.is_sampled(step)
            rate.observe(step_milliseconds * jitter * 1e-3, marks if sampled else 0)
            if step % 20 == 0:
                rate.tune(collective_spans.SAMPLED_EVERY_SECONDS)
        rates.append(rate)
        cost = marks * collective_spans.MARK_SECONDS / (rate.every * step_milliseconds * 1e-3)
        is_at_least = rate.every * step_milliseconds * 1e-3 * 2 > collective_spans.SAMPLED_EVERY_SECONDS
        assert cost <= collective_spans.COST_BUDGET_RATIO * 1.5 or is_at_least
    rarest, densest = max(rates, key=lambda r: r.every), min(rates, key=lambda r: r.every)
    assert all(densest.is_sampled(step) for step in range(1, 5000) if rarest.is_sampled(step))


@pytest.mark.parametrize("is_told_by_nccl", [False, True])
def test_collectives_are_marked_rarely_where_nccl_times_them(job: Job, is_told_by_nccl: bool) -> None:
    for _ in range(1500):
        for _ in range(20):
            job.group.allreduce(transfer=0.1)
        job.spans.mark_moment()
        job.cuda.now_ns += int(5 * MS)
        job.border()
        job.spans.tune(is_told_by_nccl)
    timed, sampled = (
        sum(not math.isnan(record[name]) for record in job.records) for name in ("exposed_seconds", "run_ahead_seconds")
    )
    if is_told_by_nccl:
        assert 0 < timed * 41 * collective_spans.MARK_SECONDS < 2 * collective_spans.COST_BUDGET_RATIO * 1500 * 5e-3
        assert sampled > 3 * timed
    else:
        assert timed == sampled > 0


def test_a_device_error_disables_the_probe_without_reaching_the_program(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a failed kernel every call of CUDA raises; the program's own next call is the one to tell it."""
    job.sample_every(1)
    job.border()

    def failing() -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    assert job.spans.clock is not None
    job.spans.clock._current_device = failing
    try:
        assert job.group.allreduce() is None
        assert job.group.allreduce(is_async=True).wait() is None
        assert "probe disabled" in capsys.readouterr().err
    finally:
        switch.on = True
        switch.when_disabled.clear()
