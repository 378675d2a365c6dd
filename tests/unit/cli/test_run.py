"""What goes wrong in Rankscope itself does not change how a command ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest

from rankscope.analysis.verdicts.verdict import DEVICE, HOST, Cause, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.cli import run
from rankscope.cli.main import main
from rankscope.cli.standalone import Standalone
from rankscope.daemon.samples import Span
from rankscope.daemon.windows.broadcast import Tick
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow


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


def test_all_steps_of_the_lowest_rank_are_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.CommandWatch, "_is_ours", lambda watch, state: state.job == "job")
    watch = run.CommandWatch(quiet=True)

    def tick(job: str, **steps: list[float]) -> None:
        ranks = {(job, int(name[1:]), 1, 1): np.array(seconds) for name, seconds in steps.items()}
        windows = {key: RankWindow(identity=RankIdentity(job=job, rank=key[1])) for key in ranks}
        watch.take_steps(Tick(Span(0, 1), windows, (), ranks))

    def state(job: str) -> JobState:
        return JobState(job, 2, Verdict(Kind.HEALTHY, ""), 0, 1.0, 2, 0.1, None, None, ())

    watch((state("early"), state("job")))  # judged before its first step
    tick("job", r1=[9.0])  # only rank 1 has ended a step
    tick("job", r1=[8.0], r0=[1.0, 2.0])
    tick("other", r0=[7.0])
    tick("job", r0=[3.0], r1=[6.0])
    watch((state("other"), state("job")))
    (job,) = watch.jobs
    assert job.step_times.seconds.tolist() == [1.0, 2.0, 3.0]
