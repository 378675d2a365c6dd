from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankscope.daemon import blocking_reads
from tests.unit.daemon.ring_writer import Writer


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    yield writer
    writer.ring.abandon()


@pytest.fixture(autouse=True)
def patient_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process here blocks its readers, and one that was taken for blocking would be skipped by the next tests."""
    monkeypatch.setattr(blocking_reads, "PATIENCE_SECONDS", 60.0)
