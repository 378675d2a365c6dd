"""What NCCL told, beside the steps of the probe's ring: in the collector's sample, the window and the metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from rankscope.analysis.step_graph.window_operations import join
from rankscope.daemon.export.rank_metrics import RankReport, RankTotals, rank_metrics
from rankscope.daemon.samples import StepSample
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.probe import nccl_layout, ring_layout
from rankscope.v1.window_pb2 import RankWindow
from tests.unit.daemon.nccl_writer import HASH, NcclWriter
from tests.unit.daemon.ring_writer import ME, MS, Writer, sample_of, window

FLAGS = ring_layout.FLAG_DEVICE | ring_layout.FLAG_NCCL
EXPOSED = (7, 4, 2, ring_layout.GROUP_EXPOSED)


@pytest.fixture
def nccl() -> Iterator[NcclWriter]:
    made = NcclWriter()
    yield made
    os.close(made.descriptor)


def step(writer: Writer, flags: int = FLAGS) -> None:
    writer.step(50, flags=flags, device=(0.05, 0.0, float("nan")))


def played(writer: Writer, nccl: NcclWriter, descriptor: int, flags: int = FLAGS) -> StepSample:
    """The second look, at three steps with a collective of 8, 20 and 8 ms."""
    collector = StepsCollector()
    writer.ring.write_facts({"nccl_descriptor": descriptor, "nccl_cost_ratio": 0.0015, "tokens_per_step": 512.0})
    step(writer)
    writer.ring.write_groups([(*EXPOSED, 10, 0.2, 0.5), (7, 4, 2, ring_layout.GROUP_OVERLAPPED, 10, 0.2, 0.5)])
    assert sample_of(collector).groups == ()
    for milliseconds in (8, 20, 8):
        step(writer, flags)
        nccl.collective(writer.end_ns - 5 * MS, milliseconds)
    writer.ring.write_groups([(*EXPOSED, 11, 0.21, 0.55), (7, 4, 2, ring_layout.GROUP_OVERLAPPED, 11, 0.23, 0.55)])
    return sample_of(collector)


def window_of(sample: StepSample) -> RankWindow:
    return assemble(ME, "node", window(), 1, RankSamples(steps=sample), lambda _: None)


def test_nccls_times_take_the_place_of_the_probes(writer: Writer, nccl: NcclWriter) -> None:
    sample = played(writer, nccl, nccl.descriptor)
    told, exposed = sample.groups
    assert (told.number, told.size, told.position, told.kind, told.samples) == (HASH, 4, 2, ring_layout.GROUP_NCCL, 3)
    assert (told.seconds, told.step_seconds) == pytest.approx((0.012, 0.05))
    assert exposed.kind == ring_layout.GROUP_EXPOSED  # what nothing hides is known from nowhere else
    assert sample.communication_seconds == pytest.approx([0.008, 0.020, 0.008])
    made = window_of(sample)
    assert made.wait_source == "NCCL"
    assert made.nccl_cost_ratio == pytest.approx(0.0015)
    assert made.figures["tokens_per_step"] == 512.0


def test_bandwidth_and_bytes_of_a_group_reach_the_window(writer: Writer, nccl: NcclWriter) -> None:
    (rate,) = window_of(played(writer, nccl, nccl.descriptor)).collectives
    assert (rate.number, rate.size, rate.operations, rate.bytes_per_step) == (HASH, 4, 3, 1_000_000)
    assert (rate.function, rate.algorithm, rate.protocol) == ("all_reduce", "ring", "simple")
    assert rate.bus_bytes_per_second == pytest.approx(1_000_000 / 0.008 * 1.5)


def test_a_rank_whose_collectives_nccl_times_is_not_blind(writer: Writer, nccl: NcclWriter) -> None:
    sample = played(writer, nccl, nccl.descriptor, FLAGS | ring_layout.FLAG_BLIND)
    assert [span.kind for span in sample.groups] == [ring_layout.GROUP_NCCL]
    assert not sample.is_blind
    assert not window_of(sample).problems


def test_a_window_between_nccls_turns_is_not_called_blind(writer: Writer, nccl: NcclWriter) -> None:
    sample = played(writer, nccl, nccl.descriptor, ring_layout.FLAG_DEVICE | ring_layout.FLAG_BLIND)
    assert sample.is_blind and not window_of(sample).problems


def test_long_steps_between_turns_count_for_an_unknown_rank(writer: Writer, nccl: NcclWriter) -> None:
    """What a job loses must not depend on how often NCCL is asked."""
    collector = StepsCollector()
    writer.ring.write_facts({"nccl_descriptor": nccl.descriptor})
    for _ in range(20):
        step(writer)
        nccl.collective(writer.end_ns - 5 * MS, 8)
    sample_of(collector)
    for milliseconds in (50, 50, 450, 50):
        writer.step(milliseconds, flags=ring_layout.FLAG_DEVICE, device=(milliseconds / 1e3, 0.0, float("nan")))
    sample = sample_of(collector)
    assert sample.long_steps is not None
    assert (sample.long_steps.steps, sample.long_steps.waited_seconds) == (1, None)
    assert sample.long_steps.seconds == pytest.approx(0.4, rel=0.1)
    row = window_of(sample)
    assert not row.long_steps.HasField("waited_seconds")


def test_the_metric_has_no_collective_twice(writer: Writer, nccl: NcclWriter) -> None:
    made = window_of(played(writer, nccl, nccl.descriptor))
    families = {family.name: family for family in rank_metrics([RankReport(made, RankTotals(), ())], full=True)}
    (series,) = families["rankscope_rank_group_seconds"].samples
    assert (series.labels["kind"], series.labels["group"]) == ("nccl", f"{HASH:x}")
    assert series.value == pytest.approx(0.012)


def test_an_operation_is_seen_while_no_step_ends(writer: Writer, nccl: NcclWriter) -> None:
    collector = StepsCollector()
    writer.ring.write_facts({"nccl_descriptor": nccl.descriptor})
    step(writer)
    for started in (5, 6):
        nccl.count(issued=9, started=started, finished=5, last_started=4711 << 8 | 1)
        sample = sample_of(collector)
        (row,) = sample.communicators
        assert (row.number, row.size, row.position, row.is_busy) == (HASH, 4, 2, started == 6)
        assert row.last_started == ("AllReduce", 4711)
    assert not len(sample.step_seconds)


def kinds_without_nccl(sample: StepSample) -> bool:
    kinds = {span.kind for span in sample.groups}
    return kinds == {ring_layout.GROUP_EXPOSED, ring_layout.GROUP_OVERLAPPED} and len(sample.step_seconds) == 3


def test_a_plugin_that_nccl_has_not_loaded_tells_nothing(writer: Writer, nccl: NcclWriter) -> None:
    nccl.load(0)
    assert kinds_without_nccl(played(writer, nccl, nccl.descriptor))


def test_memory_of_another_process_is_not_believed(writer: Writer, nccl: NcclWriter) -> None:
    os.pwrite(nccl.descriptor, nccl_layout.fixed_part(os.getpid() + 1), 0)
    assert kinds_without_nccl(played(writer, nccl, nccl.descriptor))


@pytest.mark.parametrize("what", ["closed", "file", "unsealed", "ring", "huge"])
def test_a_descriptor_of_something_else_leaves_the_steps(writer: Writer, nccl: NcclWriter, what: str) -> None:
    if what == "file":
        descriptor = os.open("/dev/null", os.O_RDWR)
    elif what == "unsealed":
        descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nccl_layout.MEMORY_BYTES)
    else:
        descriptor = {"closed": 987, "ring": writer.ring._fd, "huge": 10_000_000}[what]
    try:
        assert kinds_without_nccl(played(writer, nccl, descriptor))
    finally:
        if what in ("file", "unsealed"):
            os.close(descriptor)


def test_operations_belong_to_the_step_that_issued_them(writer: Writer, nccl: NcclWriter) -> None:
    """The host is two steps ahead of its device."""
    collector = StepsCollector()
    nccl.count(ranks=2)
    writer.ring.write_facts({"nccl_descriptor": nccl.descriptor})
    step(writer)
    sample_of(collector)
    sent = []
    for _ in range(3):
        for _ in range(4):
            writer.step(50, flags=FLAGS, device=(0.05, 0.0, float("nan")), ahead=120)
            nccl.collective(writer.end_ns - 5 * MS, 8, issued_ns=writer.end_ns - 140 * MS)
        sent.append(sample_of(collector).operations)
    rows = join([part for part in sent if part is not None])
    assert len(rows) >= 4 and np.diff(rows.step).tolist() == [1] * (len(rows) - 1)
    assert rows.step[0] == 2, "one operation a step, from the first that has one"
