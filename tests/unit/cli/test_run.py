"""What goes wrong in Rankscope itself does not change how a command ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rankscope.cli import run
from rankscope.cli.main import main
from rankscope.cli.standalone import Standalone


def test_a_later_failure_is_reported_and_keeps_the_commands_status(
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


# Once the command runs, the main thread waits for it.
SIGNALLED = """
import signal, sys, threading
from rankscope.cli import run
def send():
    print(sys.stdin.readline(), end="", flush=True)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=send, daemon=True).start()
print(run._run_command(["sh", "-c", "echo started; exec sleep 1000"], "mark", probe=False))
"""


def test_a_signal_that_another_thread_takes_reaches_the_command() -> None:
    command = [sys.executable, "-c", SIGNALLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "started\n"
        try:
            output, _ = process.communicate("send\n", timeout=60)
        finally:
            process.kill()
    assert output == f"send\n{-signal.SIGTERM}\n"
