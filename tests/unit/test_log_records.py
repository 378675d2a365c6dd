"""`caplog` holds the records of the test that asks for it, and no others."""

from __future__ import annotations

import logging
import threading

import pytest

log = logging.getLogger(__name__)
now = threading.Event()


def logging_thread(line: str) -> threading.Thread:
    thread = threading.Thread(target=lambda: now.wait() and log.warning(line), daemon=True)
    thread.start()
    return thread


earlier = logging_thread("of an earlier test")


@pytest.fixture
def of_a_fixture() -> threading.Thread:
    return logging_thread("of a fixture")


def test_threads_of_earlier_tests_leave_no_records(
    of_a_fixture: threading.Thread, caplog: pytest.LogCaptureFixture
) -> None:
    own = logging_thread("own")
    now.set()
    for thread in (earlier, of_a_fixture, own):
        thread.join()
    log.warning("main thread")
    assert sorted(caplog.messages) == ["main thread", "of a fixture", "own"]
