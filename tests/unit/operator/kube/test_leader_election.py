"""Replicas on a clock of the test's, with an API server that loses requests, answers and whole replicas."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from rankscope.operator.kube.api_client import ConflictError, Document, MissingError, UnreachableError
from rankscope.operator.kube.leader_election import (
    DURATION_SECONDS,
    RENEW_SECONDS,
    SETTLING_SECONDS,
    ShardLeases,
    shard_of,
)

STEP_SECONDS = 0.25
TAKEOVER_SECONDS = 15.0


@dataclass
class Leases:
    """What the API server has, and the time that all go by."""

    stored: dict[str, Document] = field(default_factory=dict)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self._versions = itertools.count(1)

    def write(self, name: str, body: Document, is_new: bool) -> Document:
        known = self.stored.get(name)
        if is_new == (known is not None):
            raise ConflictError(409, "AlreadyExists", name) if is_new else MissingError(404, "NotFound", name)
        if known is not None and known["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise ConflictError(409, "Conflict", name)
        metadata = {**body["metadata"], "resourceVersion": str(next(self._versions))}
        self.stored[name] = {**body, "metadata": metadata}
        return self.stored[name]


@dataclass
class Replica:
    """One operator's connection and its rounds. `loses` tells whether this request is lost, or its answer."""

    server: Leases
    name: str
    shards: int
    random: random.Random
    trouble: float = 0.0
    is_cut_off: bool = False
    next_round: float = 0.0

    def __post_init__(self) -> None:
        fake: Any = self
        self.leases = ShardLeases(fake, "n", self.name, self.shards, monotonic=lambda: self.server.now)

    def pages(self, path: str, **query: Any) -> Iterator[Document]:
        self._lose()
        yield {"items": list(self.server.stored.values())}

    def create(self, path: str, body: Document) -> Document:
        self._lose()
        return self._answer(self.server.write(body["metadata"]["name"], body, is_new=True))

    def replace(self, path: str, body: Document) -> Document:
        self._lose()
        return self._answer(self.server.write(body["metadata"]["name"], body, is_new=False))

    def delete(self, path: str) -> None:
        self._lose()
        self.server.stored.pop(path.rpartition("/")[2], None)

    def live(self) -> None:
        if self.server.now < self.next_round:
            return
        with contextlib.suppress(UnreachableError):
            self.leases.round()
        pause = RENEW_SECONDS * self.random.uniform(0.8, 1.0)
        if self.random.random() < self.trouble / 4:
            pause += self.random.uniform(0, 2 * DURATION_SECONDS)  # a machine that stands still
        self.next_round = self.server.now + pause

    def _lose(self) -> None:
        if self.is_cut_off or self.random.random() < self.trouble:
            raise UnreachableError("lost")

    def _answer(self, answer: Document) -> Document:
        self._lose()  # it was written, and nobody hears of it
        return answer


def passes(server: Leases, replicas: list[Replica], seconds: float) -> None:
    """Nobody ever acts for a shard that somebody else acts for."""
    until = server.now + seconds
    while server.now < until:
        server.now += STEP_SECONDS
        for replica in replicas:
            replica.live()
        held = [shard for replica in replicas for shard in replica.leases.held]
        assert len(held) == len(set(held)), {replica.name: replica.leases.held for replica in replicas}


@pytest.mark.parametrize("seed", range(12))
def test_shards_never_have_two_holders_and_recover_after_trouble(seed: int) -> None:
    chance = random.Random(seed)
    server, shards = Leases(), chance.choice((1, 2, 5))
    replicas = [Replica(server, name, shards, chance) for name in ("a", "b", "c")]
    for _ in range(8):
        for replica in replicas:
            replica.trouble, replica.is_cut_off = chance.choice((0.0, 0.1, 0.5)), chance.random() < 0.3
        passes(server, replicas, 30.0)
    for replica in replicas:
        replica.trouble, replica.is_cut_off, replica.next_round = 0.0, False, server.now
    passes(server, replicas, TAKEOVER_SECONDS)
    held = [shard for replica in replicas for shard in replica.leases.held]
    assert sorted(held) == list(range(shards))
    assert max(len(replica.leases.held) for replica in replicas) <= -(-shards // 3)


def test_a_killed_replicas_shards_move_within_15_s_and_settle() -> None:
    chance = random.Random(1)
    server = Leases()
    first, second = (Replica(server, name, 2, chance) for name in ("first", "second"))
    passes(server, [first, second], 10.0)
    assert len(first.leases.held) == len(second.leases.held) == 1
    passes(server, [second], TAKEOVER_SECONDS)
    assert second.leases.held == {0, 1}
    key = next(f"team/{number}" for number in range(99) if shard_of(f"team/{number}", 2) in first.leases._renewed)
    assert second.leases.holds(key) and second.leases.is_settling(key)
    passes(server, [second], SETTLING_SECONDS)
    assert not second.leases.is_settling(key)


def test_a_stopped_replicas_shards_are_taken_at_the_next_round() -> None:
    chance = random.Random(1)
    server = Leases()
    first, second = (Replica(server, name, 4, chance) for name in ("first", "second"))
    passes(server, [first, second], 10.0)
    assert len(first.leases.held) == len(second.leases.held) == 2
    first.leases.stop()
    passes(server, [second], RENEW_SECONDS)
    assert second.leases.held == {0, 1, 2, 3}


def test_a_disconnected_replica_keeps_listening_and_stops_acting() -> None:
    server = Leases()
    (alone,) = replicas = [Replica(server, "alone", 1, random.Random(1))]
    passes(server, replicas, 5.0)
    assert alone.leases.holds("team/run") and alone.leases.keeps("team/run")
    alone.is_cut_off = True
    passes(server, replicas, DURATION_SECONDS)
    assert not alone.leases.holds("team/run")
    assert alone.leases.keeps("team/run")
