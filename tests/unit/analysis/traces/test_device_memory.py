from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.traces.device_memory import Holder, measure_memory
from rankscope.analysis.traces.trace import ABSENT, Category, MemoryColumns, Trace
from tests.unit.analysis.traces.trace_builder import Event, make_trace

CPU_OP, ANNOTATION = Category.CPU_OP, Category.USER_ANNOTATION


def allocating(
    events: Sequence[Event],
    changes: Sequence[tuple[float, int]],
    *,
    before: int = 0,
    reserved: int = 10_000,
    device: int = 0,
    addresses: Sequence[int] | None = None,
) -> Trace:
    """Changes are (µs, bytes); `before` was allocated when the trace began. The thread is that of the event around."""
    change = np.array([size for _, size in changes], dtype=np.int64)
    return make_trace(
        events,
        memory=MemoryColumns(
            time_ns=np.array([round(1000 * moment) for moment, _ in changes], dtype=np.int64),
            change_bytes=change,
            allocated_bytes=before + np.cumsum(change),
            reserved_bytes=np.full(len(change), reserved),
            on_device=np.ones(len(change), dtype=bool),
            device=np.full(len(change), device),
            process=np.ones(len(change), dtype=np.int64),
            thread=np.array([_thread(events, moment) for moment, _ in changes], dtype=np.int64),
            address=np.full(len(change), ABSENT) if addresses is None else np.array(addresses, dtype=np.int64),
        ),
    )


def _thread(events: Sequence[Event], moment: float) -> int:
    around = [event for event in events if event[2] <= moment <= event[2] + event[3]]
    return around[-1][4]["thread"] if around and len(around[-1]) > 4 else 1


STEP: list[Event] = [
    ("aten::linear", CPU_OP, 0, 10),
    ("aten::addmm", CPU_OP, 1, 8),
    ("aten::gelu", CPU_OP, 20, 10),
    ("aten::empty_like", CPU_OP, 22, 2),
    ("autograd::engine::evaluate_function: MmBackward0", CPU_OP, 40, 20, {"thread": 2}),
    ("aten::mm", CPU_OP, 41, 15, {"thread": 2}),
    ("Optimizer.step#AdamW.step", ANNOTATION, 70, 30),
    ("aten::zeros_like", CPU_OP, 75, 5),
]


def test_the_peak_is_split_into_prior_memory_and_allocators() -> None:
    trace = allocating(STEP, [(5, 100), (23, 300), (45, 50), (46, 20), (58, -20), (77, 80), (95, -300)], before=1000)
    (memory,) = measure_memory(trace)
    assert memory.peak_allocated_bytes == 1530
    assert memory.before_trace_bytes == 1000
    assert (memory.forward_bytes, memory.backward_bytes, memory.optimizer_bytes) == (400, 50, 80)
    # A factory hands on to its caller; where nobody called it, it stands for itself.
    assert memory.holders == (
        Holder("aten::gelu", 300, 1),
        Holder("aten::addmm", 100, 1),
        Holder("aten::zeros_like", 80, 1),
        Holder("aten::mm", 50, 1),
    )


def test_fragmentation_is_what_is_reserved_and_not_allocated() -> None:
    (memory,) = measure_memory(allocating(STEP, [(5, 6000), (23, 1500)], reserved=10_000))
    assert memory.fragmentation_ratio == 0.25
    (on_host,) = measure_memory(allocating(STEP, [(5, 6000)], reserved=0))
    assert on_host.fragmentation_ratio is None and on_host.peak_reserved_bytes is None


def test_of_blocks_of_one_size_the_latest_is_freed() -> None:
    (memory,) = measure_memory(allocating(STEP, [(5, 100), (23, 100), (24, -100), (45, 107)]))
    assert memory.holders == (Holder("aten::mm", 107, 1), Holder("aten::addmm", 100, 1))


def test_with_addresses_the_block_itself_is_freed() -> None:
    trace = allocating(STEP, [(5, 100), (23, 100), (24, -100), (45, 107)], addresses=[64, 128, 64, 64])
    (memory,) = measure_memory(trace)
    assert memory.holders == (Holder("aten::mm", 107, 1), Holder("aten::gelu", 100, 1))


def test_what_is_freed_without_having_been_allocated_was_there_before() -> None:
    (memory,) = measure_memory(allocating(STEP, [(5, -400), (23, 700)], before=1000))
    assert (memory.peak_allocated_bytes, memory.before_trace_bytes, memory.forward_bytes) == (1300, 600, 700)


def test_devices_are_told_apart_and_no_events_are_no_memory() -> None:
    one = allocating(STEP, [(5, 100)], device=3)
    assert [memory.device for memory in measure_memory(one)] == [3]
    assert measure_memory(make_trace(STEP)) == ()
    assert measure_memory(allocating([], [(5, 100)]))[0].holders == (Holder("", 100, 1),)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=60), st.integers(0, 500))
def test_parts_sum_to_the_peak_and_match_stacks_per_size(turns: list[tuple[int, bool]], before: int) -> None:
    sizes = (8, 16, 32, 64)
    changes: list[tuple[float, int]] = [(i, sizes[s] if up else -sizes[s]) for i, (s, up) in enumerate(turns)]
    (memory,) = measure_memory(allocating([], changes, before=before + 4000), most_holders=100)
    total = memory.before_trace_bytes + memory.forward_bytes + memory.backward_bytes + memory.optimizer_bytes
    assert total == memory.peak_allocated_bytes
    totals = before + 4000 + np.cumsum([size for _, size in changes])
    stacks: dict[int, int] = dict.fromkeys(sizes, 0)
    for _, size in changes[: int(np.argmax(totals)) + 1]:
        stacks[abs(size)] = max(0, stacks[abs(size)] + (1 if size > 0 else -1))
    assert memory.forward_bytes == sum(size * count for size, count in stacks.items())
