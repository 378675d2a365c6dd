from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from rankscope.daemon.server import grpc_server
from rankscope.daemon.server.grpc_server import Arrivals


class Clock:
    """Time that passes when a test says so, with the timers that end meanwhile."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def timer(self, seconds: float, call: Callable[[], None]) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: self._due.append((self.now + seconds, call)))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while due := sorted((entry for entry in self._due if entry[0] <= end), key=lambda entry: entry[0]):
            self._due.remove(due[0])
            self.now, call = due[0]
            call()
        self.now = end


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(grpc_server, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(grpc_server, "threading", SimpleNamespace(Lock=threading.Lock, Timer=clock.timer))
    return clock


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().partition(":")[0] for record in caplog.records]


def test_silent_connections_are_logged_once_with_their_number(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    arrivals = Arrivals(patience_seconds=1.0, log_seconds=60.0)
    for number in range(5):
        arrivals.came()
        clock.run(0.01)
        arrivals.shown(f"ipv4:10.0.0.1:{number}")
        arrivals.shown(f"ipv4:10.0.0.1:{number}")  # a second call on the same connection
    for _ in range(7):
        arrivals.came()
    clock.run(1.1)
    for _ in range(100):
        arrivals.came()
    clock.run(1.1)
    assert arrivals.strangers_total == 107
    assert lines(caplog) == ["refused 7 connections"]


def test_what_was_not_told_is_told_when_it_may_be(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    arrivals = Arrivals(patience_seconds=0.5, log_seconds=10.0)
    arrivals.came()
    clock.run(0.6)
    for _ in range(3):
        arrivals.came()
        clock.run(1.0)
    assert lines(caplog) == ["refused 1 connections"]
    clock.run(10.0)
    assert lines(caplog) == ["refused 1 connections", "refused 3 connections"]


def test_operators_alone_are_no_news(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    arrivals = Arrivals(patience_seconds=0.5)
    for _ in range(2):  # the second connection is by chance from the same port
        arrivals.came()
        clock.run(0.1)
        arrivals.shown("ipv4:10.0.0.1:1")
        clock.run(0.1)
    clock.run(100.0)
    assert not caplog.records
