"""Who polls: bounded whatever a container does, and forgotten when silent."""

from __future__ import annotations

import pytest

from rankscope.daemon.captures.kineto import clients
from rankscope.daemon.captures.kineto.clients import CLIENTS_PER_NAMESPACE, CLIENTS_PER_PROCESS, STALE_SECONDS, Clients

HOST, POD, OTHER_POD = 1, 2, 3


def test_a_client_has_its_last_poll_and_learned_period() -> None:
    known = Clients()
    known.polled(POD, b"a", 7, True, 100.0)
    assert known.polled(POD, b"a", 7, True, 100.1).poll_seconds == 5.0, "two in a row tell nothing"
    assert known.polled(POD, b"a", 7, True, 101.1).poll_seconds == pytest.approx(1.0)
    client = known.polled(POD, b"a", 7, False, 102.1)
    assert known.of(7) == client
    assert not client.is_ready
    assert client.polls_in_seconds(102.4) == pytest.approx(0.7)
    assert client.polls_in_seconds(104.0) == pytest.approx(1.0), "one that is late may come a period later"
    assert known.of(8) is None


def test_an_address_of_another_process_is_a_new_client() -> None:
    known = Clients()
    known.polled(POD, b"a", 7, True, 100.0)
    known.polled(POD, b"a", 8, True, 101.0)
    assert known.of(7) is None
    client = known.of(8)
    assert client is not None and client.poll_seconds == 5.0
    assert len(known) == 1


def test_the_same_address_in_two_namespaces_is_two_clients() -> None:
    known = Clients()
    known.polled(POD, b"a", 7, True, 100.0)
    known.polled(OTHER_POD, b"a", 8, True, 100.0)
    assert len(known) == 2


def test_silent_clients_are_forgotten() -> None:
    known = Clients()
    known.polled(POD, b"a", 7, True, 0.0)
    known.polled(POD, b"b", 8, True, 1.0)
    known.polled(POD, b"a", 7, True, 20.0)
    known.forget_stale(STALE_SECONDS + 1.0)
    assert known.of(8) is None
    assert known.of(7) is not None
    known.forget_stale(STALE_SECONDS + 20.0)
    assert len(known) == 0


def test_a_process_with_many_sockets_displaces_only_its_own() -> None:
    known = Clients()
    known.polled(POD, b"neighbour", 8, True, 0.0)
    for number in range(100):
        known.polled(POD, b"%d" % number, 7, True, number / 1000)
    assert len(known) == 1 + CLIENTS_PER_PROCESS
    client = known.of(7)
    assert client is not None and client.address == b"99"
    assert known.of(8) is not None


def test_ten_thousand_processes_of_one_container_displace_nobody_elses() -> None:
    known = Clients()
    known.polled(HOST, b"a", 1, True, 0.0)
    known.polled(OTHER_POD, b"a", 2, True, 0.0)
    for number in range(10_000):
        known.polled(POD, b"%d" % number, 10 + number, True, 1.0)
    assert len(known) == 2 + CLIENTS_PER_NAMESPACE
    assert known.of(1) is not None and known.of(2) is not None
    assert known.of(10 + 9_999) is not None
    known.forget_namespace(POD)
    assert len(known) == 2


def test_all_namespaces_together_are_bounded() -> None:
    known = Clients()
    for namespace in range(clients.MAX_CLIENTS // 1000 + 4):
        for number in range(1000):
            known.polled(namespace, b"%d" % number, namespace * 1000 + number, True, 1.0)
    assert len(known) == clients.MAX_CLIENTS
    assert known.of(0) is None, "the longest silent went"
