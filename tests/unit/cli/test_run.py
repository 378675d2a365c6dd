"""What goes wrong in Rankscope itself does not change how a command ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rankscope.analysis.verdicts.verdict import DEVICE, HOST, Cause, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.cli import run
from rankscope.cli.demo_job.environment import probe_environment
from rankscope.cli.main import main
from rankscope.cli.standalone import Standalone
from rankscope.operator.correlation.correlator import JobState


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


def test_a_finding_is_printed_once_per_cause_whatever_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_device(figure: str) -> Verdict:
        cause = Cause("device", (), f"{figure} ms a step more on its device", DEVICE)
        return Verdict(Kind.SLOW_RANK, figure, Severity.ALARM, culprits=(2,), cause=cause)

    def at_line(line: int) -> Verdict:
        cause = Cause("forward", (FrameSeen("load", "/app/a.py", line, 0.4, 0.4, "forward"),), "", HOST)
        return Verdict(Kind.SLOW_RANK, "slow", Severity.ALARM, culprits=(2,), cause=cause)

    healthy = Verdict(Kind.HEALTHY, "nothing stands out")
    monkeypatch.setattr(run.CommandWatch, "_is_ours", lambda watch, state: True)
    watch = run.CommandWatch(quiet=False)
    verdicts = (healthy, on_device("58.1"), on_device("59.2"), at_line(7), at_line(9), at_line(7), on_device("57.0"))
    for at, verdict in enumerate((*verdicts, healthy, healthy, on_device("60.3")), start=1):
        watch((JobState("job", 4, verdict, 0, at, 4, 0.1, None, None, ()),))
    printed = [line.split(" ", 3)[3] for line in capsys.readouterr().err.splitlines()]
    assert printed == [
        "rank 2 is slow because its GPU is slow (58.1 ms a step more on its device)",
        "rank 2 is slow because its host is late, at a.py:7 (load, forward)",
        "rank 2 is slow because its host is late, at a.py:9 (load, forward)",
        "healthy",
        "rank 2 is slow because its GPU is slow (60.3 ms a step more on its device)",
    ]


@pytest.mark.parametrize(("chosen", "expected"), [(None, "1"), ("0", "0"), ("1", "1")])
def test_captures_on_gpus_are_harmless_unless_the_user_chose_otherwise(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, expected: str
) -> None:
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", chosen)
    environment = probe_environment()
    assert environment["TEARDOWN_CUPTI"] == expected
    # A process that polls a daemon which has gone takes seconds longer to exit.
    assert not any(name.startswith("KINETO") for name in environment)
