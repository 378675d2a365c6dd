"""Host time by NVTX range, from the ring's table into a window; honest tables and others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.operator.correlation.columns import MAX_RANGES, range_seconds
from rankscope.probe import ring_layout
from rankscope.v1.window_pb2 import RangeTime, RankWindow
from tests.unit.daemon import window_makers as make
from tests.unit.daemon.ring_writer import Writer, sample_of

NAN = float("nan")


@pytest.fixture
def collector(writer: Writer) -> StepsCollector:
    """One that has looked once, so that the next look tells what came since."""
    collector = StepsCollector()
    writer.step()
    writer.ring.write_ranges([(b"forward", 10, 5.0), (b"loss", 10, 1.0)])
    assert sample_of(collector).ranges == {}
    writer.step()
    return collector


def test_ranges_are_seconds_of_a_step_since_the_last_look(writer: Writer, collector: StepsCollector) -> None:
    writer.ring.write_ranges([(b"forward", 14, 5.2), (b"loss", 14, 1.0), ("données".encode(), 14, 0.4)])
    sample = sample_of(collector)
    assert list(sample.ranges.items()) == [("données", pytest.approx(0.1)), ("forward", pytest.approx(0.05))]
    window = assemble(make.rank(), "node-a", make.span(), 1, RankSamples(sample), lambda _: None)
    assert [one.name for one in window.ranges] == ["données", "forward"]
    assert sample_of(collector).ranges == {}  # no step since


def test_a_program_without_ranges_has_none(writer: Writer) -> None:
    collector = StepsCollector()
    for _ in range(2):
        writer.step()
        assert sample_of(collector).ranges == {}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param((b"forward", 14, 4.0), id="seconds go back"),
        pytest.param((b"forward", 10, 6.0), id="no new step"),
        pytest.param((b"forward", 2, 6.0), id="steps go back"),
        pytest.param((b"forward", 2**64 - 1, 6.0), id="2**64 - 1 steps"),
        pytest.param((b"forward", 14, NAN), id="NaN seconds"),
        pytest.param((b"forward", 14, float("inf")), id="infinite seconds"),
        pytest.param((b"forward", 14, 1e9), id="a step of years"),
        pytest.param((b"forward", 14, -1.0), id="negative seconds"),
        pytest.param((b"", 14, 6.0), id="no name"),
        pytest.param((b"\xff\xfe", 14, 6.0), id="no text"),
    ],
)
def test_an_impossible_range_is_left_out(row: Sequence[object], writer: Writer, collector: StepsCollector) -> None:
    writer.ring.write_ranges([row, (b"loss", 14, 1.4)])
    assert sample_of(collector).ranges == pytest.approx({"loss": 0.1})


def test_names_of_a_hostile_process_are_printable(writer: Writer, collector: StepsCollector) -> None:
    writer.ring.write_ranges([(b"a\x1b[31m\n\0b", 14, 1.0), ("é".encode() * 40, 14, 1.0)])
    assert set(sample_of(collector).ranges) == {"a\ufffd[31m \ufffdb", "é" * (ring_layout.RANGE_NAME_BYTES // 2)}


def test_a_broken_table_of_ranges_is_skipped(writer: Writer, collector: StepsCollector) -> None:
    writer.ring.write_ranges([(b"forward", 14, 6.0)])
    writer.write[ring_layout.RANGES_OFFSET + ring_layout.TABLE_HEAD.size] ^= 1
    assert sample_of(collector).ranges == {}


def test_a_full_table_fits_before_the_records() -> None:
    size = ring_layout.TABLE_HEAD.size + ring_layout.MAX_RANGES * ring_layout.RANGE.size
    groups = ring_layout.TABLE_HEAD.size + ring_layout.MAX_GROUPS * ring_layout.GROUP.size
    assert ring_layout.GROUPS_OFFSET + groups <= ring_layout.RANGES_OFFSET
    assert ring_layout.RANGES_OFFSET + size <= ring_layout.HEADER_BYTES


def test_ranges_of_a_hostile_daemon_are_bounded() -> None:
    window = RankWindow(ranges=[RangeTime(name=f"{number}\n" * 500, seconds=0.1) for number in range(5000)])
    window.ranges[0].seconds = NAN
    found = range_seconds(window)
    assert 0 < len(found) < MAX_RANGES
    assert all(len(name) <= 48 and name.isprintable() for name in found)
