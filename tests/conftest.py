"""Fixtures of all suites."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.audit_records import Audited, audit_records
from tests.support.measuring import Measured

# How long an example takes says something about the machine, not about the code. Every run tries the same examples: one
# that fails does so for the change at hand. With RANKSCOPE_NEW_EXAMPLES=1 it tries others, and more of them.
_IS_NEW = os.environ.get("RANKSCOPE_NEW_EXAMPLES") == "1"
settings.register_profile(
    "untimed",
    deadline=None,
    derandomize=not _IS_NEW,
    max_examples=300 if _IS_NEW else 40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("untimed")

# Not the server that the developer's own file of contexts names.
os.environ["RANKSCOPE_CONTEXT"] = "local"

_OTHERS = pytest.StashKey[set[threading.Thread]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Notes the threads that run before the first fixture of the test does. Not those that Python did not start: gRPC's
    own threads serve one test after the other."""
    running = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))
    item.stash[_OTHERS] = {thread for thread in running if thread is not threading.current_thread()}


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest) -> Iterator[pytest.LogCaptureFixture]:
    """Only records of this test: a thread that an earlier test started may still log."""
    others = request.node.stash[_OTHERS]

    def is_own(_: logging.LogRecord) -> bool:
        return threading.current_thread() not in others  # a filter runs in the thread that logs

    caplog.handler.addFilter(is_own)
    yield caplog
    caplog.handler.removeFilter(is_own)


@pytest.fixture
def audited(caplog: pytest.LogCaptureFixture) -> Audited:
    caplog.set_level(logging.INFO, "rankscope.audit")
    return lambda: audit_records(caplog)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "measured" in getattr(item, "fixturenames", ()):
            item.add_marker("measured")


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    return Measured(record_property)
