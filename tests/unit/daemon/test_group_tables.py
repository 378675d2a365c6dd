"""Time in collectives by process group, from the ring's table into a window; honest tables and others."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rankscope.daemon.samples import GroupSpan, Problem, StepSample
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.windows.window import BLIND, MAX_PROBLEMS, RankSamples, assemble
from rankscope.probe import ring_layout
from rankscope.v1.window_pb2 import RankWindow
from tests.unit.daemon import window_makers as make
from tests.unit.daemon.ring_writer import Writer, sample_of

NAN = float("nan")
GOOD = (7, 4, 2, ring_layout.GROUP_EXPOSED)
BODY = ring_layout.GROUPS_OFFSET + ring_layout.TABLE_HEAD.size


@pytest.fixture
def collector(writer: Writer) -> StepsCollector:
    """One that has looked once, so that the next look tells what came since."""
    collector = StepsCollector()
    writer.step()
    writer.ring.write_groups([(*GOOD, 10, 0.2, 0.5)])
    assert sample_of(collector).groups == ()
    writer.step()
    return collector


def looked_at(collector: StepsCollector) -> StepSample:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return sample_of(collector)


@pytest.mark.parametrize("count", [ring_layout.MAX_GROUPS + 1, 1000, 2**32 - 1])
def test_a_table_that_claims_too_many_rows_is_not_read(count: int, writer: Writer, collector: StepsCollector) -> None:
    size = count * ring_layout.GROUP.size
    body = bytes(writer.write[BODY : BODY + min(size, ring_layout.HEADER_BYTES - BODY)])
    ring_layout.TABLE_HEAD.pack_into(writer.write, ring_layout.GROUPS_OFFSET, count, zlib.crc32(body))
    sample = looked_at(collector)
    assert sample.groups == () and len(sample.step_seconds) == 1


def test_a_full_table_is_read(writer: Writer, collector: StepsCollector) -> None:
    rows = [
        (number, 4, 2, ring_layout.GROUP_EXPOSED, 1, 0.01, 0.1) for number in range(100, 100 + ring_layout.MAX_GROUPS)
    ]
    writer.ring.write_groups(rows)
    assert [span.number for span in looked_at(collector).groups] == [row[0] for row in rows]


def test_a_table_with_a_wrong_checksum_is_skipped(writer: Writer, collector: StepsCollector) -> None:
    writer.ring.write_groups([(*GOOD, 12, 0.26, 0.6)])
    writer.write[BODY + ring_layout.GROUP.size - 1] ^= 1
    assert looked_at(collector).groups == ()
    writer.ring.write_groups([(*GOOD, 14, 0.32, 0.7)])
    (span,) = looked_at(collector).groups
    assert (span.samples, span.seconds) == pytest.approx((4, 0.03))


def test_a_write_under_way_is_not_half_believed(writer: Writer, collector: StepsCollector) -> None:
    """The head of the new table with the body of the old one, and the other way round."""
    before = bytes(writer.write[ring_layout.GROUPS_OFFSET : ring_layout.HEADER_BYTES])
    writer.ring.write_groups([(*GOOD, 12, 0.26, 0.6), (9, 2, 0, ring_layout.GROUP_DDP, 1, 0.01, 0.1)])
    after = bytes(writer.write[ring_layout.GROUPS_OFFSET : ring_layout.HEADER_BYTES])
    for cut in (4, 8, 30, ring_layout.GROUP.size + 8):
        writer.write[ring_layout.GROUPS_OFFSET : ring_layout.HEADER_BYTES] = after[:cut] + before[cut:]
        assert looked_at(collector).groups == (), cut
    writer.write[ring_layout.GROUPS_OFFSET : ring_layout.HEADER_BYTES] = after
    assert len(looked_at(collector).groups) == 2


@pytest.mark.parametrize(
    "row",
    [
        pytest.param((*GOOD, 9, 0.3, 0.6), id="samples go back"),
        pytest.param((*GOOD, 10, 0.3, 0.6), id="no new sample"),
        pytest.param((*GOOD, 12, 0.1, 0.6), id="seconds go back"),
        pytest.param((*GOOD, 12, 0.3, 0.4), id="steps go back"),
        pytest.param((*GOOD, 2**63, 0.3, 0.6), id="2**63 samples"),
        pytest.param((*GOOD, 2**64 - 1, 0.3, 0.6), id="2**64 - 1 samples"),
        pytest.param((*GOOD, 12, NAN, 0.6), id="NaN seconds"),
        pytest.param((*GOOD, 12, 0.3, NAN), id="NaN steps"),
        pytest.param((*GOOD, 12, np.inf, 0.6), id="infinite seconds"),
        pytest.param((*GOOD, 12, 1e300, 0.6), id="huge seconds"),
        pytest.param((*GOOD, 12, -1.0, 0.6), id="negative seconds"),
        pytest.param((2**53, *GOOD[1:], 12, 0.3, 0.6), id="an id that is no exact float"),
        pytest.param((7, 0, 0, ring_layout.GROUP_EXPOSED, 12, 0.3, 0.6), id="an empty group"),
        pytest.param((7, 4, 4, ring_layout.GROUP_EXPOSED, 12, 0.3, 0.6), id="outside of its group"),
        pytest.param((7, 4, 2, 0, 12, 0.3, 0.6), id="kind 0"),
        pytest.param((7, 4, 2, 99, 12, 0.3, 0.6), id="kind 99"),
    ],
)
def test_an_impossible_row_is_left_out_and_others_stay(
    row: Sequence[float], writer: Writer, collector: StepsCollector
) -> None:
    writer.ring.write_groups([row, (9, 2, 0, ring_layout.GROUP_DDP, 2, 0.02, 0.2)])
    (span,) = looked_at(collector).groups
    assert (span.number, span.kind, span.samples) == (9, ring_layout.GROUP_DDP, 2)
    assert (span.seconds, span.step_seconds) == pytest.approx((0.01, 0.1))


def test_counters_that_went_back_count_from_there_on(writer: Writer, collector: StepsCollector) -> None:
    writer.ring.write_groups([(*GOOD, 2, 0.02, 0.1)])
    assert looked_at(collector).groups == ()
    writer.ring.write_groups([(*GOOD, 4, 0.06, 0.2)])
    (span,) = looked_at(collector).groups
    assert (span.samples, span.seconds) == pytest.approx((2, 0.02))


def test_spans_of_few_seen_collectives_do_not_represent_all(writer: Writer, collector: StepsCollector) -> None:
    """A compiled model, and a loss that is reduced from Python: most of the wait is not in these spans. Durations of
    the flight recorder hold all of it."""
    for number in (1, 2):
        rows = [(*GOOD[:3], ring_layout.GROUP_OVERLAPPED, number, 0.01 * number, 0.1 * number)]
        rows += [(7, 4, 2, ring_layout.GROUP_EXPOSED, 10 + number, 0.2 + 0.01 * number, 0.5 + 0.1 * number)]
        rows += [(7, 4, 2, ring_layout.GROUP_RECORDER, 10 * number, 0.5 * number, number)]
        writer.step(
            50, flags=ring_layout.FLAG_DEVICE | (ring_layout.FLAG_BLIND if number == 2 else 0), device=(0.05, 0.0, 0.01)
        )
        writer.ring.write_groups(rows)
        kinds = {span.kind for span in looked_at(collector).groups}
        seen = {ring_layout.GROUP_OVERLAPPED, ring_layout.GROUP_EXPOSED} if number == 1 else set()
        assert kinds == seen | {ring_layout.GROUP_RECORDER}


def window_of(sample: StepSample, *problems: Problem) -> RankWindow:
    return assemble(make.rank(), "node-a", make.span(), 1, RankSamples(sample, problems=problems), lambda _: None)


def with_groups(sample: StepSample, *kinds: int) -> StepSample:
    spans = tuple(GroupSpan(7 + number, 4, 2, kind, 3, 0.02, 0.1) for number, kind in enumerate(kinds))
    return replace(sample, groups=spans)


def test_groups_are_rows_of_seven_numbers_in_a_window() -> None:
    window = window_of(with_groups(make.steps(0.1, host=[0.01]), ring_layout.GROUP_EXPOSED, ring_layout.GROUP_DDP))
    told = [[value for _, value in group.ListFields()] for group in window.groups]
    assert told == [[7, 4, 2, 1, 3, 0.02, 0.1], [8, 4, 2, 4, 3, 0.02, 0.1]]
    assert window.figures["host_seconds"] == 0.01
    assert not window_of(make.steps(0.1)).groups


@pytest.mark.parametrize(
    ("kinds", "source"),
    [
        ((), ""),
        (
            (ring_layout.GROUP_EXPOSED, ring_layout.GROUP_OVERLAPPED, ring_layout.GROUP_POINT_TO_POINT),
            "collective spans",
        ),
        ((ring_layout.GROUP_EXPOSED, ring_layout.GROUP_DDP), "ddp timers + collective spans"),
        ((ring_layout.GROUP_RECORDER,), "flight recorder"),
    ],
)
def test_on_a_device_the_groups_give_the_wait_source(kinds: Sequence[int], source: str) -> None:
    assert window_of(with_groups(make.steps(0.1, host=[0.01]), *kinds)).wait_source == source


def test_on_a_cpu_the_measurement_gives_the_wait_source() -> None:
    blocking = make.steps(0.1, wait=[0.02])
    assert window_of(blocking).wait_source == "blocking calls"
    by_ddp = make.steps(0.1, wait=[0.02], forward=[0.03])
    assert window_of(by_ddp).wait_source == "ddp timers"
    assert window_of(with_groups(by_ddp, ring_layout.GROUP_EXPOSED)).wait_source == "ddp timers + blocking calls"
    assert window_of(with_groups(make.steps(0.1), ring_layout.GROUP_EXPOSED)).wait_source == ""


def test_a_rank_with_unseen_collectives_has_a_next_step() -> None:
    blind = replace(make.steps(0.1, host=[0.01]), is_blind=True)
    (problem,) = window_of(blind).problems
    assert problem == BLIND
    assert len(problem) <= 300 and "--duty-cycle-steps 10" in problem and "TORCH_NCCL_ENABLE_TIMING=1" in problem
    assert not window_of(with_groups(blind, ring_layout.GROUP_RECORDER)).problems
    assert not window_of(make.steps(0.1, host=[0.01])).problems


def test_the_problems_of_a_window_stay_bounded() -> None:
    blind = replace(make.steps(0.1, host=[0.01]), is_blind=True)
    others = [Problem("stacks", "permission", f"problem {number}") for number in range(MAX_PROBLEMS)]
    assert len(window_of(blind, *others).problems) == MAX_PROBLEMS
