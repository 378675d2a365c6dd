"""Time in collectives from the NCCL plugin's records, made up so that the right answer is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rankscope.daemon.samples import GroupSpan
from rankscope.daemon.steps.nccl_reader import COMMUNICATOR_DTYPE, RECORD_DTYPE, NcclRecords, Table
from rankscope.daemon.steps.nccl_times import NcclProgress, NcclTimes, times
from rankscope.daemon.steps.ring_reader import RECORD_DTYPE as STEP_DTYPE
from rankscope.probe import nccl_layout, ring_layout

MS = 1_000_000
# The GPU's timer against the host's clock.
AHEAD = 5_000_000 * MS
WORLD, PAIR = 0xAAAA_0000_0000_0001, 0xBBBB_0000_0000_0002
ALL_REDUCE, SEND = nccl_layout.FUNCTIONS.index("AllReduce") + 1, nccl_layout.FUNCTIONS.index("Send") + 1
BEFORE = NcclProgress(memory_id=3, read=0)

# Milliseconds of the host's clock: start, stop; then the communicator and the function.
Operation = tuple[float, float, int, int]


def records(operations: Sequence[Operation]) -> Table:
    made = np.zeros(len(operations), RECORD_DTYPE)
    for number, (start, stop, communicator, function) in enumerate(operations, 1):
        row = made[number - 1]
        row["number"], row["function"], row["communicator"] = number, function, communicator & 0xFFFFFFFF
        row["start_ns"], row["stop_ns"] = start * MS + AHEAD, stop * MS + AHEAD
        row["seen_ns"] = stop * MS
    return made


def communicators(*hashes: int) -> Table:
    made = np.zeros(len(hashes), COMMUNICATOR_DTYPE)
    made["hash"], made["ranks"], made["rank"] = hashes, 4, 2
    return made


def steps(*ends: float) -> np.ndarray:
    """Of the host's clock, in ms; the first begins at 0."""
    made = np.zeros(len(ends), STEP_DTYPE)
    made["end_ns"] = [end * MS for end in ends]
    made["span_ns"] = np.diff([0, *made["end_ns"]])
    made["steps"] = 1
    made["flags"] = ring_layout.FLAG_NCCL
    return made


def told(
    operations: Sequence[Operation], *ends: float, known: Sequence[int] = (WORLD, PAIR), overwritten: int = 0
) -> tuple[NcclTimes, NcclProgress]:
    return times(NcclRecords(records(operations), overwritten), communicators(*known), BEFORE, steps(*ends))


def of(found: NcclTimes, number: int, kind: int = ring_layout.GROUP_NCCL) -> GroupSpan:
    (span,) = [span for span in found.groups if (span.number, span.kind) == (number & (1 << 53) - 1, kind)]
    return span


def test_an_operation_belongs_to_the_step_in_which_it_ends() -> None:
    found, progress = told([(10, 12, WORLD, ALL_REDUCE), (90, 130, WORLD, ALL_REDUCE)], 100, 200)
    assert found.seconds == pytest.approx([0.002, 0.040])
    assert of(found, WORLD) == GroupSpan(WORLD & (1 << 53) - 1, 4, 2, ring_layout.GROUP_NCCL, 2, 0.021, 0.1)
    assert progress == NcclProgress(3, 2)


def test_what_ends_after_the_last_step_is_left() -> None:
    found, progress = told([(10, 20, WORLD, ALL_REDUCE), (110, 120, WORLD, ALL_REDUCE)], 100)
    assert found.seconds == pytest.approx([0.010])
    assert progress == NcclProgress(3, 1)


def test_without_an_operation_nothing_is_known() -> None:
    assert told([], 100) == (NcclTimes(), BEFORE)
    assert told([(110, 120, WORLD, ALL_REDUCE)], 100) == (NcclTimes(), BEFORE)


def test_overlapping_operations_count_once_in_a_step() -> None:
    found, _ = told([(10, 30, WORLD, ALL_REDUCE), (20, 40, PAIR, ALL_REDUCE)], 100)
    assert found.seconds == pytest.approx([0.030])
    assert (of(found, WORLD).seconds, of(found, PAIR).seconds) == pytest.approx((0.020, 0.020))


def test_a_stale_stop_gives_way_to_when_it_was_seen() -> None:
    made = records([(10, 20, WORLD, ALL_REDUCE), (50, 75, WORLD, ALL_REDUCE)])
    made["stop_ns"][1] = made["start_ns"][0] - 7 * MS  # of an operation long before
    found, _ = times(NcclRecords(made, 0), communicators(WORLD), BEFORE, steps(100))
    assert found.seconds == pytest.approx([0.035])


def test_a_stale_start_time_reaches_back_to_the_operation_before() -> None:
    found, _ = told([(10, 50, WORLD, ALL_REDUCE), (20, 60, WORLD, ALL_REDUCE)], 100)
    assert found.seconds == pytest.approx([0.050])


def test_messages_are_a_group_of_their_own() -> None:
    found, _ = told([(10, 20, PAIR, SEND), (30, 35, PAIR, ALL_REDUCE)], 100)
    assert of(found, PAIR, ring_layout.GROUP_POINT_TO_POINT).seconds == pytest.approx(0.010)
    assert of(found, PAIR).seconds == pytest.approx(0.005)
    assert found.seconds == pytest.approx([0.005])


def test_the_records_that_are_left_stand_for_all() -> None:
    found, _ = told([(10, 12, WORLD, ALL_REDUCE)], 100, overwritten=3)
    assert found.seconds is None
    assert of(found, WORLD).seconds == pytest.approx(0.008)


def test_communicators_that_are_not_listed_are_left_out() -> None:
    found, _ = told([(10, 20, WORLD, ALL_REDUCE), (30, 40, PAIR, ALL_REDUCE)], 100, known=[PAIR])
    assert [span.number for span in found.groups] == [PAIR & (1 << 53) - 1]
    assert told([(10, 20, WORLD, ALL_REDUCE)], 100, known=[]) == (NcclTimes(), BEFORE)


def test_the_busiest_communicators_are_kept() -> None:
    hashes = [1 + number for number in range(20)]
    operations = [(place, place + 0.5, hash_, ALL_REDUCE) for hash_ in hashes for place in range(hash_)]
    found, _ = told(operations, 100, known=hashes)
    assert [span.number for span in found.groups] == list(range(20, 20 - ring_layout.MAX_GROUPS, -1))


@pytest.mark.parametrize("value", [0, 1, 1 << 62, (1 << 64) - 1])
@pytest.mark.parametrize("field", ["start_ns", "stop_ns", "seen_ns", "communicator", "number", "function"])
def test_forged_fields_give_no_absurd_time(field: str, value: int) -> None:
    made = records([(10, 20, WORLD, ALL_REDUCE)] * 4)
    made[field][1:3] = value & (1 << 8 * made[field].itemsize) - 1
    found, _ = times(NcclRecords(made, 0), communicators(WORLD), BEFORE, steps(100))
    for span in found.groups:
        assert 0 <= span.seconds <= 86_400 and span.samples == 1


def test_only_steps_of_which_all_operations_are_known_count() -> None:
    made = steps(100, 150, 300)
    made["flags"][1] = 0
    operations = [(10, 20, WORLD, ALL_REDUCE), (110, 140, WORLD, ALL_REDUCE), (200, 230, WORLD, ALL_REDUCE)]
    found, progress = times(NcclRecords(records(operations), 0), communicators(WORLD), BEFORE, made)
    assert found.seconds == pytest.approx([0.010, np.nan, 0.030], nan_ok=True)
    span = of(found, WORLD)
    assert (span.samples, span.seconds, span.step_seconds) == (2, pytest.approx(0.020), pytest.approx(0.125))
    assert progress == NcclProgress(3, 3)
