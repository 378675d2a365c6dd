"""Fixtures of all suites."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Only records of this test: a thread that an earlier test started may still log."""
    others = set(threading.enumerate()) - {threading.current_thread()}

    def is_own(_: logging.LogRecord) -> bool:
        return threading.current_thread() not in others  # a filter runs in the thread that logs

    caplog.handler.addFilter(is_own)
    yield caplog
    caplog.handler.removeFilter(is_own)
