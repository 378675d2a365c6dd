"""The descriptor of a ring, and when the ring begins."""

from __future__ import annotations

import fcntl
import json
import os
import resource
from collections.abc import Iterator

import pytest

from rankscope.probe import ring_layout
from rankscope.probe.ring import Ring

FIRST, SECOND = ring_layout.DESCRIPTORS[:2]


@pytest.fixture
def null() -> Iterator[int]:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def number_of_a_ring() -> int:
    ring = Ring()
    number = ring._fd
    ring.abandon()
    return number


def test_a_ring_has_the_first_preferred_number_that_is_free(null: int) -> None:
    assert number_of_a_ring() == FIRST
    taken = fcntl.fcntl(null, fcntl.F_DUPFD, FIRST)
    try:
        assert number_of_a_ring() == SECOND
        assert os.path.samestat(os.fstat(taken), os.fstat(null)), "what the program has open stays"
    finally:
        os.close(taken)


def test_a_ring_has_any_number_below_a_low_limit() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (FIRST, limits[1]))
    try:
        assert number_of_a_ring() < FIRST
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_ring_is_closed_on_exec() -> None:
    ring = Ring()
    try:
        assert not os.get_inheritable(ring._fd)
    finally:
        ring.abandon()


def test_facts_are_there_before_a_ring_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes too early finds no rank rather than a rank without its group."""
    begun: list[bytes] = []
    write_facts = Ring.write_facts

    def write(ring: Ring, facts: dict[str, object]) -> None:
        begun.append(ring._memory[: len(ring_layout.MAGIC)])
        write_facts(ring, facts)

    monkeypatch.setattr(Ring, "write_facts", write)
    ring = Ring({"rank": 1})
    try:
        start = ring_layout.FACTS_OFFSET + ring_layout.FACTS_HEAD.size
        assert begun == [bytes(len(ring_layout.MAGIC))]
        assert ring._memory[: len(ring_layout.MAGIC)] == ring_layout.MAGIC
        assert json.loads(ring._memory[start : start + len('{"rank": 1}')]) == {"rank": 1}
    finally:
        ring.abandon()
