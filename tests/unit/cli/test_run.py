"""What goes wrong in Rankscope itself does not change how a command ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from rankscope.analysis.verdicts.verdict import DEVICE, HOST, Cause, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.cli import run
from rankscope.cli.demo_job.environment import probe_environment
from rankscope.cli.main import main
from rankscope.cli.output_file import keep_output
from rankscope.cli.standalone import Standalone
from rankscope.daemon.samples import Span
from rankscope.daemon.windows.broadcast import Tick
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow
from tests.support.waiting import wait_until

HEALTHY = Verdict(Kind.HEALTHY, "nothing stands out")


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
import pathlib, signal, sys, threading
from rankscope.cli import run
def send():
    print(sys.stdin.readline(), end="", flush=True)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=send, daemon=True).start()
command = run.Command(["sh", "-c", "echo started; exec sleep 1000"], pathlib.Path(sys.argv[1]), probe=False)
end = command.run()
print(end.status, end)
"""


def test_a_signal_that_another_thread_takes_reaches_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIGNALLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "started\n"
        try:
            output, _ = process.communicate("send\n", timeout=60)
        finally:
            process.kill()
    assert output.startswith(f"send\n{-signal.SIGTERM} interrupted by SIGTERM after 0:")


def test_a_finding_is_printed_once_per_cause_whatever_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_device(figure: str) -> Verdict:
        cause = Cause("device", (), f"{figure} ms a step more on its device", DEVICE)
        return Verdict(Kind.SLOW_RANK, figure, Severity.ALARM, culprits=(2,), cause=cause)

    def at_line(line: int) -> Verdict:
        cause = Cause("forward", (FrameSeen("load", "/app/a.py", line, 0.4, 0.4, "forward"),), "", HOST)
        return Verdict(Kind.SLOW_RANK, "slow", Severity.ALARM, culprits=(2,), cause=cause)

    command = run.Command(["true"], tmp_path, probe=False)
    watch = run.CommandWatch(command, quiet=False)
    verdicts = (HEALTHY, on_device("58.1"), on_device("59.2"), at_line(7), at_line(9), at_line(7), on_device("57.0"))
    for at, verdict in enumerate((*verdicts, HEALTHY, HEALTHY, on_device("60.3")), start=1):
        watch((JobState("job", 4, verdict, 0, at, 4, 0.1, None, None, ()),))
    command.ends.stop()
    printed = [line.split(" ", 3)[3] for line in capsys.readouterr().err.splitlines()]
    assert printed == [
        "rank 2 is slow because its GPU is slow (58.1 ms a step more on its device)",
        "rank 2 is slow because its host is late, at a.py:7 (load, forward)",
        "rank 2 is slow because its host is late, at a.py:9 (load, forward)",
        "healthy",
        "rank 2 is slow because its GPU is slow (60.3 ms a step more on its device)",
    ]


def test_windows_in_which_a_rank_ends_show_hangs_only(tmp_path: Path) -> None:
    command = run.Command(["true"], tmp_path, probe=False)
    watch = run.CommandWatch(command, quiet=True)
    with subprocess.Popen(["sleep", "1000"]) as rank:
        window = RankWindow(identity=RankIdentity(rank=1, pid=rank.pid))

        def tell(kind: Kind, at: float) -> None:
            verdict = Verdict(kind, "", Severity.ALARM, culprits=(0,))
            watch((JobState("job", 2, verdict, 0, at, 2, 0.1, None, None, (window,), window_end_unix_seconds=at),))

        before = time.time()
        tell(Kind.HEALTHY, before)
        rank.kill()
        wait_until(lambda: rank.pid in command.ends.ends, lambda: "the end was not seen")
    (job,) = watch.jobs
    tell(Kind.SLOW_RANK, before + 1000)
    assert [finding.verdict.kind for finding in job.findings] == []
    tell(Kind.HANG, before + 1001)
    tell(Kind.HANG, before + 1002)
    assert [finding.verdict.kind for finding in job.findings] == [Kind.HANG]
    command.ends.stop()


def test_an_unwritable_path_ends_the_run_before_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "started"
    for option in ("--summary", "--html"):
        assert main(["run", option, str(tmp_path / "missing" / "file"), "--", "touch", str(mark)]) == 2
        assert f"next step: name another with {option}" in capsys.readouterr().err
    assert not mark.exists()


def test_unwritable_results_are_kept_in_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keep_output("--summary", Path("/dev/full"), "measured")
    told = capsys.readouterr().err
    kept = Path(told.rpartition(" ")[2].strip())
    assert "No space left on device" in told and kept.read_text() == "measured"


def test_all_steps_of_the_lowest_rank_are_summed_up(tmp_path: Path) -> None:
    command = run.Command(["true"], tmp_path, probe=False)
    command.ends.stop()
    watch = run.CommandWatch(command, quiet=True)

    def tick(job: str, **steps: list[float]) -> None:
        ranks = {(job, int(name[1:]), 1, 1): np.array(seconds) for name, seconds in steps.items()}
        windows = {key: RankWindow(identity=RankIdentity(job=job, rank=key[1])) for key in ranks}
        watch.take_steps(Tick(Span(0, 1), windows, (), ranks))

    def state(job: str) -> JobState:
        return JobState(job, 2, Verdict(Kind.HEALTHY, ""), 0, 1.0, 2, 0.1, None, None, ())

    watch((state("job"),))  # judged before its first step
    tick("job", r1=[9.0])  # only rank 1 has ended a step
    tick("job", r1=[8.0], r0=[1.0, 2.0])
    tick("job", r0=[3.0], r1=[6.0])
    watch((state("job"),))
    (job,) = watch.jobs
    assert job.step_times.seconds.tolist() == [1.0, 2.0, 3.0]


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
