"""What goes wrong in Rankscope itself does not change how a command ends."""

from __future__ import annotations

import pytest

from rankscope.cli import run
from rankscope.cli.main import main
from rankscope.cli.standalone import Standalone


def test_a_failure_after_the_command_keeps_its_status_and_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(standalone: Standalone) -> None:
        raise RuntimeError("cannot stop")

    monkeypatch.setattr(run.Standalone, "start", lambda standalone: None)
    monkeypatch.setattr(run.Standalone, "stop", stop)
    assert main(["run", "--quiet", "--", "sh", "-c", "exit 3"]) == 3
    assert "the command ended with status 3, which is kept" in caplog.text and "cannot stop" in caplog.text


def test_a_failure_before_the_command_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(standalone: Standalone) -> None:
        raise RuntimeError("cannot start")

    monkeypatch.setattr(run.Standalone, "start", start)
    with pytest.raises(RuntimeError, match="cannot start"):
        main(["run", "--quiet", "--", "sh", "-c", "exit 3"])
