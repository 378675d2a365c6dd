from __future__ import annotations

import itertools
import threading
import time
from collections import deque

import pytest

from rankscope.daemon import blocking_reads
from rankscope.daemon.blocking_reads import BLOCKS_PER_OWNER, PATIENCE_SECONDS, BlockedError, BlockingReads
from tests.support.waiting import wait_until


def owner_of(process: str) -> str:
    return process.partition("/")[0]


class Node:
    """Processes whose reads block until they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.read_processes: list[str] = []

    def read(self, process: str) -> None:
        if "blocked" in process:
            self.released.wait()
        self.read_processes.append(process)


@pytest.fixture
def reads(patient_reads: None, monkeypatch: pytest.MonkeyPatch) -> BlockingReads:
    monkeypatch.setattr(blocking_reads, "PATIENCE_SECONDS", PATIENCE_SECONDS)
    return BlockingReads(owner_of)


def readers() -> int:
    return sum(thread.name == "rankscope-reads" for thread in threading.enumerate())


def test_what_a_read_returns_or_raises_comes_back(reads: BlockingReads) -> None:
    assert reads.call("a/1", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        reads.call("a/1", lambda: 1 // 0)
    assert reads.blocked == 0


def test_a_blocked_process_does_not_stop_reads_of_others(reads: BlockingReads) -> None:
    node = Node()
    try:
        assert reads.each(["a/1", "a/blocked", "b/2"], str, node.read) == ["a/blocked"]
        assert node.read_processes == ["a/1", "b/2"]
        threads = readers()
        assert reads.each(["a/blocked", "b/3"], str, node.read) == ["a/blocked"]
        with pytest.raises(BlockedError):
            reads.call("a/blocked", lambda: 1)
        assert readers() <= threads  # it is not tried again
        assert reads.blocked == 1
    finally:
        node.released.set()
    wait_until(lambda: not reads.blocked)
    assert reads.each(["a/blocked"], str, node.read) == []


def test_an_owner_of_many_blocked_processes_loses_only_its_own(
    reads: BlockingReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_reads, "PATIENCE_SECONDS", 0.03)
    monkeypatch.setattr(blocking_reads, "MIN_PATIENCE_SECONDS", 0.03)
    node = Node()
    try:
        hostile = [f"a/blocked{number}" for number in range(40)]
        assert sorted(reads.each([*hostile, "b/1"], str, node.read)) == sorted(hostile)
        assert reads.blocked == BLOCKS_PER_OWNER
        assert reads.each(["a/new", "b/2", "b/blocked"], str, node.read) == ["a/new", "b/blocked"]
        assert node.read_processes == ["b/1", "b/2"]
    finally:
        node.released.set()


def test_a_slow_sweep_that_makes_progress_is_not_left_behind(
    reads: BlockingReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_reads, "PATIENCE_SECONDS", 1.0)
    assert reads.each(range(50), str, lambda _: time.sleep(0.05)) == []


def test_a_reader_that_begins_late_has_all_of_the_patience(
    reads: BlockingReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_reads, "_ticks_of_ready", lambda _: None)
    sweep = blocking_reads._Sweep(deque(), lambda _: None)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 3:
            sweep.item = "a/1"  # just before the third look
        return False

    monkeypatch.setattr(sweep.has_ended, "wait", wait)
    assert reads._done_when_it_stalled(sweep) == 0
    assert len(waits) == 4


def test_a_reader_waiting_for_a_cpu_is_not_left_behind(reads: BlockingReads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_reads, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(blocking_reads, "MIN_PATIENCE_SECONDS", 0.01)
    ready, looks = [7] * 5, threading.Event()

    def ticks_of_ready(_: int) -> int | None:
        if not ready:
            looks.set()
        return ready.pop() if ready else None

    monkeypatch.setattr(blocking_reads, "_ticks_of_ready", ticks_of_ready)
    released = threading.Event()
    try:
        assert reads.each(["a/1"], str, lambda _: released.wait()) == ["a/1"]
        assert looks.is_set(), "it had more patience while it was ready"
    finally:
        released.set()


@pytest.mark.parametrize(
    ("ticks_per_look", "looks"),
    [(0, blocking_reads.LOOKS_AT_A_READY_THREAD), (blocking_reads.RUNNING_TICKS, 2)],
    ids=["waits for a CPU without end", "computes"],
)
def test_an_endless_reader_is_left_behind_sooner_if_it_computes(
    ticks_per_look: int, looks: int, reads: BlockingReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_reads, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(blocking_reads, "MIN_PATIENCE_SECONDS", 0.01)
    ticks = itertools.count(100, ticks_per_look)
    looked: list[int] = []

    def ticks_of_ready(_: int) -> int:
        looked.append(next(ticks))
        return looked[-1]

    monkeypatch.setattr(blocking_reads, "_ticks_of_ready", ticks_of_ready)
    released = threading.Event()
    try:
        assert reads.each(["a/1"], str, lambda _: released.wait()) == ["a/1"]
        assert len(looked) == looks
    finally:
        released.set()


def test_a_sleeping_thread_is_not_ready_and_the_caller_is() -> None:
    released, began = threading.Event(), threading.Event()
    sleeper = threading.Thread(target=lambda: (began.set(), released.wait()))
    sleeper.start()
    try:
        assert began.wait(180) and sleeper.native_id is not None
        wait_until(lambda: blocking_reads._ticks_of_ready(sleeper.native_id) is None)
        assert blocking_reads._ticks_of_ready(threading.get_native_id()) is not None
    finally:
        released.set()
        sleeper.join()
    assert blocking_reads._ticks_of_ready(1 << 30) is None
