from __future__ import annotations

import pytest

from rankscope.daemon.profiles import store


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of this machine may be slow, and what a store was given is written when it is closed."""
    monkeypatch.setattr(store, "CLOSE_SECONDS", 180.0)
