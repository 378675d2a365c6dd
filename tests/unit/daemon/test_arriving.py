from __future__ import annotations

import logging
import time

import pytest

from rankscope.daemon.server.grpc_server import Arrivals


def wait_for_lines(caplog: pytest.LogCaptureFixture, number: int) -> None:
    give_up = time.monotonic() + 30.0
    while len(caplog.records) < number:
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_connections_that_show_nothing_are_told_of_once_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    arrivals = Arrivals(patience_seconds=1.0, log_seconds=60.0)
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            arrivals.came()
            arrivals.shown(f"ipv4:10.0.0.1:{number}")
            arrivals.shown(f"ipv4:10.0.0.1:{number}")  # a second call on the same connection
        for _ in range(7):
            arrivals.came()
        wait_for_lines(caplog, 1)
        for _ in range(100):
            arrivals.came()
        give_up = time.monotonic() + 30.0
        while arrivals.strangers_total < 107:
            assert time.monotonic() < give_up
            time.sleep(0.02)
    assert [record.getMessage()[:22] for record in caplog.records] == ["refused 7 connections:"]


def test_what_was_not_told_is_told_when_it_may_be(caplog: pytest.LogCaptureFixture) -> None:
    arrivals = Arrivals(patience_seconds=0.5, log_seconds=1.0)
    with caplog.at_level(logging.WARNING):
        arrivals.came()
        wait_for_lines(caplog, 1)
        for _ in range(3):
            arrivals.came()
        wait_for_lines(caplog, 2)
    assert "refused 3 connections" in caplog.text


def test_operators_alone_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    arrivals = Arrivals(patience_seconds=0.5)
    with caplog.at_level(logging.WARNING):
        arrivals.came()
        arrivals.shown("ipv4:10.0.0.1:1")
        arrivals.came()
        arrivals.shown("ipv4:10.0.0.1:1")  # another connection, by chance from the same port
        time.sleep(1.0)
    assert not caplog.records
