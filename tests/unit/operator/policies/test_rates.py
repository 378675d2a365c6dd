"""Against a real gRPC server with the daemon's own board."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import grpc
import pytest

from rankscope.operator.policies.rates import LEASE_SECONDS, RETRY_SECONDS, PolicyPusher
from rankscope.v1 import policy_service_pb2 as pb
from rankscope.v1.policy_service_pb2_grpc import PolicyServiceServicer, add_PolicyServiceServicer_to_server


class Daemon(PolicyServiceServicer):
    def __init__(self) -> None:
        self.heard: list[dict[str, list[str]]] = []
        self.refuses = False
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_PolicyServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def ApplyPolicies(
        self, request: pb.ApplyPoliciesRequest, context: grpc.ServicerContext
    ) -> pb.ApplyPoliciesResponse:
        assert request.lease_seconds == LEASE_SECONDS
        self.heard.append({policy.run: list(policy.pods) for policy in request.policies})
        if self.refuses:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return pb.ApplyPoliciesResponse(notes=["ns/a: stacks are off on this node"])

    def stop(self) -> None:
        self._server.stop(None).wait()


class Played:
    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.now = 1000.0
        self.notes: list[tuple[str, str]] = []
        self.connected = {"n": 0}
        self.held: Callable[[str], bool] = lambda run: True
        self.pusher = PolicyPusher(grpc.insecure_channel, lambda *note: self.notes.append(note), lambda: self.now)

    def pulse(self, wanted: int, **rates: float | None) -> list[dict[str, list[str]]]:
        """What the daemon heard since, which has to be `wanted` calls: a run and its rate each, all in pod `p`."""
        before = len(self.daemon.heard)
        policies = {
            f"ns/{run}": pb.RunPolicy(run=f"ns/{run}", pods=["p"], stack_rate_hertz=hz) for run, hz in rates.items()
        }
        give_up = monotonic() + 180
        while True:
            self.pusher.forget_interrupted(self.connected)
            self.pusher.follow(
                {"n": policies} if policies else {}, {"n": self.daemon.address}, self.connected.keys(), self.held
            )
            if not self.pusher._busy and len(self.daemon.heard) - before >= wanted:
                assert len(self.daemon.heard) - before == wanted
                return self.daemon.heard[before:]
            assert monotonic() < give_up
            sleep(0.01)


@pytest.fixture
def played() -> Iterator[Played]:
    daemon = Daemon()
    made = Played(daemon)
    yield made
    made.pusher.stop()
    daemon.stop()


def test_rates_are_sent_only_on_change_and_at_half_lease(played: Played) -> None:
    assert played.pulse(1, a=2.0, b=3.0) == [{"ns/a": ["p"], "ns/b": ["p"]}]
    assert played.pulse(0, a=2.0, b=3.0) == []
    assert played.pulse(1, a=2.0, b=4.0) == [{"ns/b": ["p"]}]
    played.now += LEASE_SECONDS / 2 + 1
    assert played.pulse(1, a=2.0, b=4.0) == [{"ns/a": ["p"], "ns/b": ["p"]}]
    assert played.notes[0] == ("ns/a", "n: ns/a: stacks are off on this node")


def test_what_is_no_longer_wanted_is_withdrawn_once(played: Played) -> None:
    played.pulse(1, a=2.0, b=3.0)
    assert played.pulse(1, a=2.0) == [{"ns/b": []}]
    assert played.pulse(0, a=2.0) == []
    assert played.pulse(1) == [{"ns/a": []}]
    assert played.pulse(0) == []


def test_what_another_replica_holds_now_is_left_to_it(played: Played) -> None:
    played.pulse(1, a=2.0)
    played.held = lambda run: False
    assert played.pulse(0) == []


def test_a_daemon_that_was_away_is_told_everything_again(played: Played) -> None:
    played.pulse(1, a=2.0)
    played.connected = {}
    assert played.pulse(0, a=2.0) == []
    played.connected = {"n": 1}
    assert played.pulse(1, a=2.0) == [{"ns/a": ["p"]}]
    assert played.pulse(0, a=2.0) == []
    played.connected = {"n": 2}  # away for less than a pulse
    assert played.pulse(1, a=2.0) == [{"ns/a": ["p"]}]


def test_names_alone_are_not_sent_again_with_every_lease(played: Played) -> None:
    assert played.pulse(1, a=None) == [{"ns/a": ["p"]}]
    played.now += 2 * LEASE_SECONDS
    assert played.pulse(0, a=None) == []
    assert played.pulse(1, a=2.0) == [{"ns/a": ["p"]}]
    assert played.pulse(1, a=None) == [{"ns/a": ["p"]}]


def test_a_daemon_refusing_rates_is_asked_again_later(played: Played) -> None:
    played.daemon.refuses = True
    played.pulse(1, a=2.0)
    assert played.pulse(0, a=2.0) == []
    played.daemon.refuses = False
    played.now += RETRY_SECONDS + 1
    assert played.pulse(1, a=2.0) == [{"ns/a": ["p"]}]
    assert played.pulse(0, a=2.0) == []
