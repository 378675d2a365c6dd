"""`caplog` holds the records of the test that asks for it, and no others."""

from __future__ import annotations

import logging
import threading

import pytest

log = logging.getLogger(__name__)


def logging_thread(line: str, when: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=lambda: when.wait() and log.warning(line), daemon=True)
    thread.start()
    return thread


@pytest.fixture
def now() -> threading.Event:
    return threading.Event()


@pytest.fixture
def earlier(now: threading.Event) -> threading.Thread:
    return logging_thread("earlier", now)


def test_threads_of_earlier_tests_leave_no_records(
    earlier: threading.Thread, now: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    own = logging_thread("own", now)
    now.set()
    for thread in (earlier, own):
        thread.join()
    log.warning("main thread")
    assert caplog.messages == ["own", "main thread"]
