from __future__ import annotations

import pytest

from rankscope.daemon import blocking_reads


@pytest.fixture(autouse=True)
def patient_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process here blocks its readers, and one that was taken for blocking would be skipped by the next tests."""
    monkeypatch.setattr(blocking_reads, "PATIENCE_SECONDS", 60.0)
