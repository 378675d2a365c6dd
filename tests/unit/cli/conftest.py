from __future__ import annotations

import pytest

from tests.support.commands import Command


@pytest.fixture
def predict(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "predict")
