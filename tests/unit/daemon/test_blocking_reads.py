from __future__ import annotations

import threading
import time

import pytest

from rankscope.daemon import blocking_reads
from rankscope.daemon.blocking_reads import BLOCKS_PER_OWNER, BlockedError, BlockingReads


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
def reads() -> BlockingReads:
    return BlockingReads(owner_of)


def test_what_a_read_returns_or_raises_comes_back(reads: BlockingReads) -> None:
    assert reads.call("a/1", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        reads.call("a/1", lambda: 1 // 0)
    assert reads.blocked == 0


def test_a_process_that_blocks_is_left_behind_and_the_others_are_read(reads: BlockingReads) -> None:
    node = Node()
    try:
        assert reads.each(["a/1", "a/blocked", "b/2"], str, node.read) == ["a/blocked"]
        assert node.read_processes == ["a/1", "b/2"]
        threads = threading.active_count()
        assert reads.each(["a/blocked", "b/3"], str, node.read) == ["a/blocked"]
        with pytest.raises(BlockedError):
            reads.call("a/blocked", lambda: 1)
        assert threading.active_count() <= threads  # it is not tried again
        assert reads.blocked == 1
    finally:
        node.released.set()
    give_up_at = time.monotonic() + 30
    while reads.blocked:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    assert reads.each(["a/blocked"], str, node.read) == []


def test_an_owner_of_many_processes_that_block_loses_only_its_own(
    reads: BlockingReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking_reads, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(blocking_reads, "LEAST_PATIENCE_SECONDS", 0.01)
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
    monkeypatch.setattr(blocking_reads, "PATIENCE_SECONDS", 0.2)
    assert reads.each(range(8), str, lambda _: time.sleep(0.05)) == []
