"""Bus bandwidth and bytes from the NCCL plugin's records, against the formulas of nccl-tests."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from rankscope.daemon.samples import CollectiveRate
from rankscope.daemon.steps import nccl_bandwidth
from rankscope.daemon.steps.nccl_reader import COMMUNICATOR_DTYPE, RECORD_DTYPE, NcclRecords, Table
from rankscope.daemon.steps.nccl_times import NcclProgress, times
from rankscope.daemon.steps.ring_reader import RECORD_DTYPE as STEP_DTYPE
from rankscope.probe import nccl_layout, ring_layout

US = 1_000
MIB = 1 << 20
WORLD, PAIR = 0xAAAA_0000_0000_0001, 0xBBBB_0000_0000_0002


@dataclass(frozen=True)
class Operation:
    bytes: int  # as NCCL counts them
    microseconds: float
    function: str = "AllReduce"
    after_us: float = 10.0  # that the one before has ended
    communicator: int = WORLD
    algorithm: str = "RING"
    protocol: str = "SIMPLE"


def records(operations: Sequence[Operation]) -> Table:
    made = np.zeros(len(operations), RECORD_DTYPE)
    now_ns = 1_000_000
    for row, operation in zip(made, operations, strict=True):
        start_ns = now_ns + int(operation.after_us * US)
        now_ns = start_ns + int(operation.microseconds * US)
        row["start_ns"], row["stop_ns"], row["seen_ns"] = start_ns, now_ns, now_ns
        row["bytes"], row["communicator"] = operation.bytes, operation.communicator & 0xFFFFFFFF
        row["function"] = nccl_layout.FUNCTIONS.index(operation.function) + 1
        row["algorithm"] = nccl_layout.ALGORITHMS.index(operation.algorithm) + 1
        row["protocol"] = nccl_layout.PROTOCOLS.index(operation.protocol) + 1
    made["number"] = np.arange(1, len(operations) + 1)
    return made


def rates(table: Table, ranks: int = 8, overwritten: int = 0, steps: int = 1) -> tuple[CollectiveRate, ...]:
    """In so many steps, the last of which ends after all operations."""
    communicators = np.zeros(2, COMMUNICATOR_DTYPE)
    communicators["hash"], communicators["ranks"] = (WORLD, PAIR), ranks
    ends = np.zeros(steps, STEP_DTYPE)
    ends["end_ns"] = 3_600_000_000_000
    ends["span_ns"], ends["steps"], ends["flags"] = 1_000_000_000, 1, ring_layout.FLAG_NCCL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, _ = times(NcclRecords(table, overwritten), communicators, NcclProgress(3, 0), ends)
    return found.collectives


def rate(*operations: Operation, ranks: int = 8) -> CollectiveRate:
    (found,) = rates(records(operations), ranks)
    return found


def test_all_reduce_has_the_bus_bandwidth_of_nccl_tests() -> None:
    found = rate(Operation(17_179_869_184, 61_974))
    assert found.bus_bytes_per_second == pytest.approx(17_179_869_184 / 61_974e-6 * 2 * 7 / 8, rel=1e-12)
    assert found.bus_bytes_per_second == pytest.approx(485.1191e9, rel=1e-7)
    assert (found.number, found.size, found.operations) == (WORLD & (1 << 53) - 1, 8, 1)


@pytest.mark.parametrize(
    ("function", "whole_array", "factor"),
    [
        ("AllReduce", 1, 2 * 7 / 8),
        ("AllGather", 8, 7 / 8),  # NCCL counts what a rank sends
        ("ReduceScatter", 8, 7 / 8),  # and what it receives
        ("AlltoAll", 8, 7 / 8),  # for one peer
        ("Gather", 8, 7 / 8),
        ("Scatter", 8, 7 / 8),
        ("Broadcast", 1, 1.0),
        ("Reduce", 1, 1.0),
    ],
)
def test_sizes_and_factors_are_those_of_nccl_tests(function: str, whole_array: int, factor: float) -> None:
    found = rate(Operation(MIB, 100, function))
    assert found.bytes_per_step == MIB * whole_array
    assert found.bus_bytes_per_second == pytest.approx(MIB * whole_array * factor / 100e-6, rel=1e-12)


def test_the_median_operation_of_a_size_counts() -> None:
    waited = [Operation(MIB, microseconds) for microseconds in (900, 100, 1, 5000, 300)]
    assert rate(*waited).bus_bytes_per_second == rate(Operation(MIB, 300)).bus_bytes_per_second


def test_sizes_are_combined_by_bytes_and_time() -> None:
    large = [Operation(64 * MIB, 1000), Operation(64 * MIB, 4000)]
    found = rate(*large, Operation(MIB, 50), Operation(MIB, 40), Operation(MIB, 60))
    expected = (2 * 64 + 3) * MIB * 1.75 / (2 * 1000e-6 + 3 * 50e-6)
    assert found.bus_bytes_per_second == pytest.approx(expected, rel=1e-12)


def test_operations_that_run_together_count_as_one() -> None:
    together = [Operation(MIB, 100), Operation(2 * MIB, 150, after_us=-100), Operation(MIB, 20, after_us=-90)]
    found = rate(*together)
    assert found.operations == 3
    assert found.bus_bytes_per_second == pytest.approx(4 * MIB * 1.75 / 150e-6, rel=1e-12)


def test_functions_that_run_together_have_no_bandwidth() -> None:
    table = records([Operation(MIB, 100), Operation(MIB, 100, "AllGather", after_us=-50)])
    assert {(found.function, found.bus_bytes_per_second) for found in rates(table)} == {
        ("all_reduce", None),
        ("all_gather", None),
    }


def test_communicators_that_overlap_are_told_apart() -> None:
    table = records([Operation(MIB, 100), Operation(MIB, 200, after_us=-100, communicator=PAIR)])
    first, second = sorted(rates(table), key=lambda found: found.number)
    assert first.bus_bytes_per_second == pytest.approx(MIB * 1.75 / 100e-6)
    assert second.bus_bytes_per_second == pytest.approx(MIB * 1.75 / 200e-6)


def test_messages_have_bytes_and_no_bandwidth() -> None:
    found = rate(Operation(MIB, 100, "Send"))
    assert (found.function, found.bytes_per_step, found.bus_bytes_per_second) == ("send", MIB, None)


def test_algorithm_and_protocol_are_those_of_most_bytes() -> None:
    small = [Operation(1024, 20, algorithm="TREE", protocol="LL")] * 50
    found = rate(*small, Operation(MIB, 100, algorithm="NVLS"))
    assert (found.algorithm, found.protocol) == ("nvls", "simple")


def test_bytes_are_per_step_and_for_overwritten_records_too() -> None:
    table = records([Operation(MIB, 100)] * 4)
    (found,) = rates(table, overwritten=4, steps=2)
    assert found.bytes_per_step == pytest.approx(4 * MIB)


def test_steps_without_nccl_do_not_count() -> None:
    table = records([Operation(MIB, 100)])
    communicators = np.zeros(1, COMMUNICATOR_DTYPE)
    communicators["hash"], communicators["ranks"] = WORLD, 8
    ends = np.zeros(2, STEP_DTYPE)
    ends["end_ns"], ends["span_ns"], ends["steps"] = [2_000_000, 9_000_000], 1_000_000, 1
    ends["flags"][1] = ring_layout.FLAG_NCCL
    found, _ = times(NcclRecords(table, 0), communicators, NcclProgress(3, 0), ends)
    assert found.collectives == ()


def test_the_functions_with_most_bytes_are_kept() -> None:
    names = nccl_layout.FUNCTIONS[:8]
    groups = [Operation((1 + place) * 1024, 100, name) for place, name in enumerate(names)]
    table = records([*groups, *(Operation(64 * MIB, 900, name, communicator=PAIR) for name in names[:3])])
    found = rates(table)
    assert len(found) == ring_layout.MAX_GROUPS
    assert [one.number for one in found[:3]] == [PAIR & (1 << 53) - 1] * 3
    assert found == tuple(sorted(found, key=lambda one: -one.bytes_per_step))


def test_a_group_of_one_rank_has_no_rate() -> None:
    assert rates(records([Operation(MIB, 100)]), ranks=1) == ()


def test_without_records_there_is_no_rate() -> None:
    assert rates(records([])) == ()
    assert rates(records([Operation(0, 100)])) == ()


def test_unknown_numbers_are_called_other() -> None:
    table = records([Operation(MIB, 100)])
    table["function"], table["algorithm"], table["protocol"] = 12, 8, 255
    (found,) = rates(table)
    assert (found.function, found.algorithm, found.protocol) == ("other", "other", "other")
    assert found.bytes_per_step == MIB and found.bus_bytes_per_second is None


@pytest.mark.parametrize("bytes_", [1 << 41, 1 << 48, (1 << 64) - 1])
@pytest.mark.parametrize("function", ["AllReduce", "AllGather"])
def test_absurd_bytes_are_left_out(bytes_: int, function: str) -> None:
    table = records([Operation(bytes_, 1e9, function)] * 3)
    assert rates(table) == ()


def test_a_rate_beyond_any_link_is_left_out() -> None:
    found = rate(Operation(1 << 40, 1), Operation(MIB, 0))
    assert found.operations == 2 and found.bus_bytes_per_second is None


@pytest.mark.parametrize("ranks", [0, 2, 1 << 20, (1 << 20) + 1, (1 << 32) - 1])
@pytest.mark.parametrize("seed", range(5))
def test_forged_records_give_bounded_rates(seed: int, ranks: int) -> None:
    random = np.random.default_rng(seed)
    table = np.frombuffer(random.bytes(RECORD_DTYPE.itemsize * nccl_layout.CAPACITY), RECORD_DTYPE).copy()
    table["communicator"] = random.choice([WORLD & 0xFFFFFFFF, PAIR & 0xFFFFFFFF], len(table))
    table["start_ns"] = random.integers(1, 1 << 40, len(table))
    table["stop_ns"] = table["start_ns"] + random.integers(0, 1 << random.integers(1, 41), len(table)).astype("u8")
    table["seen_ns"] = table["stop_ns"]
    table["bytes"] >>= random.integers(0, 64, len(table)).astype("u8")
    found = rates(table, ranks)
    assert bool(found) == (2 <= ranks <= 1 << 20) and len(found) <= ring_layout.MAX_GROUPS
    assert len({(one.number, one.function) for one in found}) == len(found)
    for one in found:
        assert 0 < one.bytes_per_step <= nccl_bandwidth.MAX_ARRAY_BYTES * nccl_layout.CAPACITY
        assert one.function in nccl_bandwidth.FUNCTIONS and one.algorithm in nccl_bandwidth.ALGORITHMS
        assert one.bus_bytes_per_second is None or 0 < one.bus_bytes_per_second <= 2.1e13
