from __future__ import annotations

from rankscope.analysis.step_graph.window_operations import RankOperations, Seat
from rankscope.operator.correlation.daemon_windows import UNREADABLE, HeldWindow, HeldWindows, RankSeen
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import GroupSeat, RankWindow, StackSummary, StepOperations
from tests.daemon_messages import hold


def held(rank: int, **fields: object) -> HeldWindow:
    identity = RankIdentity(job="said", rank=rank, world_size=4)
    return hold(RankWindow(identity=identity, end_unix_nanos=9, **fields))


def renamed(window: HeldWindow, message_bytes: bytes | None = None) -> HeldWindow:
    who = RankSeen(RankIdentity(job="ours", rank=window.who.rank, world_size=4))
    return HeldWindow(who, window.message_bytes if message_bytes is None else message_bytes, 0, 9, window.figures)


def test_a_window_is_fully_read_on_demand_under_our_names() -> None:
    window = renamed(held(2, stacks=StackSummary(samples=5))).message()
    assert (window.identity.job, window.identity.rank, window.stacks.samples) == ("ours", 2, 5)


def test_garbage_found_later_becomes_a_window_with_a_problem() -> None:
    window = renamed(held(2), b"\x8a\x01\x02\xff\xff").message()  # stacks of two bytes that are no message
    assert (window.identity.job, window.end_unix_nanos, list(window.problems)) == ("ours", 9, [UNREADABLE])


def test_operations_are_read_without_the_rest_of_a_window() -> None:
    seats = [GroupSeat(number=7, size=2, position=1)]
    sent = StepOperations(first_step=41, start_nanos=5, tick_nanos=2, unix_less_gpu_nanos=-3, seats=seats, rows=b"rows")
    window = renamed(held(2, operations=sent, stacks=StackSummary(samples=5)))
    assert window.operations() == RankOperations(2, 41, 5, 2, -3, (Seat(7, 2, 1),), b"rows")
    assert renamed(held(2)).operations() is None
    assert renamed(held(2), b"\xe2\x02\x02\xff\xff").operations() is None, "two bytes that are no message"


def test_windows_of_a_job_are_sorted_by_rank_and_sliceable() -> None:
    windows = HeldWindows({rank: held(rank) for rank in (3, 1, 2)})
    assert [window.identity.rank for window in windows] == [1, 2, 3] == list(windows.identities)
    assert [window.identity.rank for window in windows[1:]] == [2, 3]
    assert (windows[-1].identity.rank, len(windows)) == (3, 3)
