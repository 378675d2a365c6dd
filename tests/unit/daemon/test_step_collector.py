"""What the steps collector makes of an honest ring."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest

from rankscope.daemon.steps import ring_reader
from rankscope.daemon.steps.collector import WARM_UP_STEPS, StepsCollector
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.probe import ring_layout
from rankscope.v1.window_pb2 import RankWindow
from tests.unit.daemon.ring_writer import ME, MS, NAN4, Writer, problem_of, sample_of, window


@pytest.fixture
def collector() -> StepsCollector:
    return StepsCollector()


def test_a_process_without_a_ring_is_absent(collector: StepsCollector) -> None:
    assert collector.collect([ME], window()) == {}


def test_each_step_is_handed_over_once(writer: Writer, collector: StepsCollector) -> None:
    writer.step(0)  # the first has no known beginning
    for milliseconds in (10, 20, 30):
        writer.step(milliseconds, blocking=0.004, input_=0.002)
    sample = sample_of(collector)
    assert sample.step_seconds == pytest.approx([0.01, 0.02, 0.03])
    assert sample.wait_seconds == pytest.approx([0.004] * 3)
    assert sample.communication_seconds == pytest.approx([0.004] * 3)
    assert sample.input_seconds == pytest.approx([0.002] * 3)
    assert np.isnan(sample.forward_seconds).all()
    assert (sample.steps_total, sample.steps_lost) == (4, 0)
    assert sample.last_step_unix_nanos is not None
    assert abs(sample.last_step_unix_nanos - (time.time_ns() - time.monotonic_ns() + writer.end_ns)) < 50 * MS

    again = sample_of(collector)
    assert len(again.step_seconds) == 0
    assert again.last_step_unix_nanos is not None
    writer.step(40)
    assert sample_of(collector).step_seconds == pytest.approx([0.04])


def test_steps_that_share_a_record_share_its_time(writer: Writer, collector: StepsCollector) -> None:
    writer.step(10, blocking=0.005, steps=100)
    sample = sample_of(collector)
    assert sample.step_seconds == pytest.approx([0.0001] * 100)
    assert sample.wait_seconds.sum() == pytest.approx(0.005)
    assert sample.steps_total == 100


def test_ddp_figures_belong_to_the_step_before(writer: Writer, collector: StepsCollector) -> None:
    for number in range(1, 5):
        writer.step(100, flags=ring_layout.FLAG_DDP, blocking=0.01, ddp=(0.01 * number, 0.02, 0.05, 0.03))
    sample = sample_of(collector)
    assert sample.forward_seconds == pytest.approx([0.02, 0.03, 0.04])
    assert sample.wait_seconds == pytest.approx([0.01 + 0.02] * 3)
    assert sample.communication_seconds == pytest.approx([0.01 + 0.05] * 3)
    assert sample.steps_total == 4
    writer.step(100, flags=ring_layout.FLAG_DDP)
    later = sample_of(collector)
    assert len(later.step_seconds) == 1
    assert np.isnan(later.wait_seconds).all()  # not sampled: unknown, not zero
    assert later.steps_lost == 0


def test_the_hosts_pace_counts_after_the_first_steps(writer: Writer, collector: StepsCollector) -> None:
    """A host that needs 4 ms waits for its device until the queue is empty, and fills it again."""

    def run(*milliseconds: float) -> RankWindow:
        for host in milliseconds:
            writer.step(50, flags=ring_layout.FLAG_DEVICE, device=(host / 1e3, 0.4, 0.0))
        return assemble(ME, "node", window(), 1, RankSamples(steps=sample_of(collector)), lambda _: None)

    assert "host_quick_seconds" not in run(*[50] * WARM_UP_STEPS).figures
    found = run(*[50] * 40, 450, *[4] * 8, *[50] * 10)
    assert found.figures["host_quick_seconds"] == pytest.approx(0.004)
    assert found.figures["host_gained_steps"] == pytest.approx(7, abs=1)


def test_on_a_device_only_sampled_steps_give_the_wait(writer: Writer, collector: StepsCollector) -> None:
    writer.step(50, flags=ring_layout.FLAG_DEVICE, blocking=0.001)
    writer.step(50, flags=ring_layout.FLAG_DEVICE, device=(0.004, 0.12, 0.03))
    sample = sample_of(collector)
    assert sample.step_seconds == pytest.approx([0.05, 0.05])
    assert sample.wait_seconds == pytest.approx([np.nan, 0.03], nan_ok=True)
    assert sample.host_seconds == pytest.approx([np.nan, 0.004], nan_ok=True)
    assert sample.run_ahead_seconds == pytest.approx([np.nan, 0.12], nan_ok=True)


def test_a_wait_the_probe_misses_is_unknown_not_zero(writer: Writer, collector: StepsCollector) -> None:
    writer.step(50, flags=ring_layout.FLAG_DEVICE | ring_layout.FLAG_BLIND, device=(0.004, 0.0, 0.0))
    assert np.isnan(sample_of(collector).wait_seconds).all()


def test_collective_time_is_given_per_group_and_sampled_step(writer: Writer, collector: StepsCollector) -> None:
    writer.step()
    writer.ring.write_groups([(7, 4, 2, ring_layout.GROUP_OVERLAPPED, 10, 0.2, 0.5)])
    assert sample_of(collector).groups == ()  # the past, which no window covers
    writer.step()
    writer.ring.write_groups([(7, 4, 2, ring_layout.GROUP_OVERLAPPED, 12, 0.26, 0.6), (9, 2, 2, 1, 1, 1.0, 1.0)])
    (span,) = sample_of(collector).groups  # the other one claims a position outside of its group
    assert (span.number, span.size, span.position, span.kind, span.samples) == (
        7,
        4,
        2,
        ring_layout.GROUP_OVERLAPPED,
        2,
    )
    assert (span.seconds, span.step_seconds) == pytest.approx((0.03, 0.05))


def test_history_from_before_the_first_window_is_left_out(writer: Writer, collector: StepsCollector) -> None:
    writer.end_ns -= 3600 * 1000 * MS
    writer.step()
    writer.end_ns += 3600 * 1000 * MS
    writer.step()
    sample = sample_of(collector)
    assert len(sample.step_seconds) == 1
    assert sample.steps_lost == 0


def test_overwritten_steps_are_counted_as_lost(writer: Writer, collector: StepsCollector) -> None:
    writer.step(0.001)
    sample_of(collector)
    for _ in range(ring_layout.CAPACITY + 50):
        writer.step(0.001)
    sample = sample_of(collector)
    # The slot that the writer would write next is not believed either.
    assert len(sample.step_seconds) + sample.steps_lost == ring_layout.CAPACITY + 50
    assert 50 <= sample.steps_lost <= 51


def test_a_probe_that_has_given_up_is_no_hanging_rank(writer: Writer, collector: StepsCollector) -> None:
    writer.step()
    writer.ring.mark_disabled()
    assert problem_of(collector).kind == "disabled"


def test_facts_and_counters_arrive(writer: Writer, collector: StepsCollector) -> None:
    writer.ring.write_facts(
        {"rank": 3, "pipeline": 1, "model_flops_per_step": 1e15, "device_name": "H200\n" + "x" * 500}
    )
    writer.ring.write_live((1, 2, 3, -1), (7, 6))
    sample = sample_of(collector)
    assert sample.facts.rank == 3
    assert sample.facts.model_flops_per_step == 1e15
    assert sample.facts.device_name == "H200 " + "x" * 122 + "…"
    assert sample.memory == {"allocated_bytes": 1, "reserved_bytes": 2, "peak_allocated_bytes": 3}
    assert (sample.collectives_enqueued, sample.collectives_completed) == (7, 6)


def test_nothing_stays_open_and_ranks_that_left_are_forgotten(writer: Writer, collector: StepsCollector) -> None:
    writer.step()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        sample_of(collector)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    collector.collect([], window())
    assert len(sample_of(collector).step_seconds) == 1  # as at first sight


def test_a_new_ring_after_exec_is_read_from_its_beginning(collector: StepsCollector) -> None:
    first = Writer()
    for _ in range(50):
        first.step()
    sample_of(collector)
    first.ring.abandon()
    second = Writer()
    second.step()
    assert len(sample_of(collector).step_seconds) == 1
    second.ring.abandon()


@pytest.mark.parametrize(
    ("flags", "more", "waited_seconds"),
    [
        (ring_layout.FLAG_DDP, {"backward": 0.010}, 0.0),
        (ring_layout.FLAG_DDP, {"backward": 0.610}, None),
        (ring_layout.FLAG_DDP, {"backward": 0.010, "blocking": 0.6}, None),
        (ring_layout.FLAG_DDP | ring_layout.FLAG_BLIND, {"backward": 0.010}, None),
    ],
)
def test_a_long_step_that_ddp_did_not_measure(
    writer: Writer, collector: StepsCollector, flags: int, more: dict[str, float], waited_seconds: float | None
) -> None:
    """It is the rank's own if the rank did not spend it where ranks wait."""
    for number in range(40):
        figures = (0.001, 0.010, 0.006, 0.002) if number % 5 == 0 else NAN4
        writer.step(20, flags=flags, ddp=figures, **{"backward": 0.010} if number != 32 else more)
        if number == 32:
            writer.rewrite(number + 1, span_ns=620 * MS)
    found = sample_of(collector).long_steps
    assert found is not None and found.steps == 1
    assert found.waited_seconds == waited_seconds


def test_a_record_is_read_by_the_names_in_its_layout(writer: Writer) -> None:
    written = {name: 0.5 + place for place, name in enumerate(ring_layout.SECONDS)}
    writer.ring.append(7, 5, written, flags=3, steps=2)
    records, whole = ring_reader.read_records(writer.ring._fd, 1, 1)
    assert whole.all() and {name: float(records[name][0]) for name in ring_layout.SECONDS} == written
    assert [int(records[name][0]) for name in ("sequence", "end_ns", "span_ns", "flags", "steps")] == [1, 7, 5, 3, 2]


def test_seconds_that_a_record_does_not_have_raise(writer: Writer) -> None:
    with pytest.raises(struct.error):
        writer.ring.append(7, 5, {"idle_seconds": 1.0}, flags=0, steps=1)
