from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rankscope.analysis.verdicts.verdict import Cause, Kind, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.cli import capture as command
from rankscope.cli import capture_output as capture_following
from rankscope.cli import captures, doctor, top
from rankscope.cli.capture_output import LineProgress, LiveProgress
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from rankscope.cli.terminal import Terminal
from rankscope.operator.correlation.job_service import verdict_message
from rankscope.v1 import capture_service_pb2 as pb
from tests.unit.cli import capture_server as scripted
from tests.unit.cli.capture_server import (
    ACCEPTED,
    ANALYSED,
    ARMED,
    CANCELLED,
    FAILED,
    ID,
    RUNNING,
    WRITTEN,
    ScriptedCaptures,
    capture,
)

HELD = "rank 1 (pid 4101): a profiler of its own was active for 60 s; end it, or ask again with more --patience"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedCaptures]:
    captures = ScriptedCaptures()
    server = scripted.serve(captures, f"unix:{tmp_path}/d.sock")
    yield captures
    captures.cancelled.set()
    server.stop(0).wait(5)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/d.sock"


def run(module: ModuleType, *words: str) -> int:
    return main([module.__name__.rpartition(".")[2], *words])


def joined(record: pb.Capture) -> None:
    record.start_skew_millis = 2.0
    record.join.verdict, record.join.reason = "slow_rank", "rank 1: it came last to 58 of 60 collectives"
    record.join.culprits.append(1)
    record.join.last_arrivals[1], record.join.last_arrivals[0] = 58, 2
    for entry in record.ranks:
        entry.summary.span_seconds = 0.3
        entry.summary.findings.append(f"communication is exposed on {entry.rank}")


def whole_life() -> list[pb.Capture]:
    return [
        capture(ACCEPTED, ACCEPTED, ACCEPTED),
        capture(ACCEPTED, ARMED, ACCEPTED),
        capture(RUNNING, RUNNING, RUNNING),
        capture(WRITTEN, WRITTEN, WRITTEN),
        capture(WRITTEN, ANALYSED, ANALYSED),
        capture(ANALYSED, ANALYSED, ANALYSED, edit=joined),
    ]


def test_a_capture_of_every_rank_exits_0_with_its_findings(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.script = whole_life()
    assert run(command, "--connect", endpoint, "--run", "bert", "--ranks", "0,1", "--steps", "3", "--shapes") == 0
    asked = daemon.requests[0]
    assert (asked.job, asked.ranks, asked.steps, asked.options.shapes, asked.options.stacks) == (
        "bert", "0,1", 3, True, False,
    )  # fmt: skip
    shown = capsys.readouterr()
    assert "2 of 2 ranks delivered, 3 steps each, begun within 2 ms of each other" in shown.out
    assert "In these steps rank 1 is slow: it came last to 58 of 60 collectives." in shown.out
    assert "Rank 1: communication is exposed on 1." in shown.out
    assert f"rankscope captures get {ID} --output DIR" in shown.out
    assert [line.split(" (")[0] for line in shown.err.splitlines()[1:-1]] == [
        "ranks 0 and 1: accepted", "rank 0: armed", "ranks 0 and 1: running", "ranks 0 and 1: written",
        "ranks 0 and 1: analysed",
    ]  # fmt: skip


def slow(record: pb.Capture, excess_seconds: float = 0.05, half_seconds: float = 0.01, steps: int = 12) -> None:
    """Rank 1 is slow by the verdict, and rank 0 waits for it."""
    joined(record)
    frames = (FrameSeen("augment", "/job/train.py", 11, 0.5, 0.5, ""),)
    verdict = Verdict(Kind.SLOW_RANK, "slow", culprits=(1,), impact_ratio=0.5, cause=Cause(frames=frames))
    record.verdict.CopyFrom(verdict_message(verdict, 0.0))
    record.join.verdict, record.join.reason = "insufficient_data", "traces of 2 of 4 ranks"
    del record.join.culprits[:]
    for rank, sign in ((1, 1), (0, -1)):
        mean = sign * excess_seconds
        interval = {"low_seconds": mean - half_seconds, "high_seconds": mean + half_seconds}
        record.join.excesses.add(rank=rank, steps=steps, excess_seconds=mean, **interval)
    for entry in record.ranks:
        entry.step_times.before_seconds = 0.1
        entry.summary.advice.append(f"rank {entry.rank} needs a link of twice the bandwidth")


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({}, "The recording confirms it: rank 1 works 50 ms longer in a step than rank 0 (between 40 ms and 60"),
        ({"excess_seconds": 0.001}, "The recording contradicts it: rank 1 works 1 ms longer in a step than rank 0"),
        ({"half_seconds": 0.2, "steps": 2}, "The recording is too short to tell: rank 1 works 50 ms longer"),
    ],
)
def test_a_capture_begins_with_the_verdict_and_judges_it(
    daemon: ScriptedCaptures,
    endpoint: str,
    capsys: pytest.CaptureFixture[str],
    figures: dict[str, float],
    says: str,
) -> None:
    daemon.script = [capture(ANALYSED, ANALYSED, ANALYSED, edit=lambda record: slow(record, **figures))]
    assert run(command, "--connect", endpoint, "--ranks", "straggler+peer") == 0
    assert daemon.requests[0].WhichOneof("length") is None
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    first = lines.index("The verdict on the job was: rank 1 is slow because of train.py:11 (augment).")
    assert lines[first + 1].startswith(says)
    assert lines[first + 2].startswith("Rank 1: ")
    assert "Try: look at train.py:11, where rank 1 spends the additional time" in lines
    # Nothing about the rank that waits, and no other advice.
    assert not any(text in shown for text in ("Rank 0: ", "link", "cannot be compared", "no rank stands out"))


def test_ranks_that_only_wait_get_no_advice(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def waiting(record: pb.Capture) -> None:
        slow(record)
        record.verdict.culprits[:] = [3]
        del record.join.excesses[:]

    daemon.script = [capture(ANALYSED, ANALYSED, ANALYSED, edit=waiting)]
    assert run(command, "--connect", endpoint, "--ranks", "0,1") == 0
    shown = capsys.readouterr().out
    assert "The verdict on the job was: rank 3 is slow" in shown
    assert "Rank 0: " not in shown and "Rank 1: " not in shown and "link" not in shown


def test_two_steps_of_a_healthy_job_name_nobody(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def healthy(record: pb.Capture) -> None:
        slow(record, half_seconds=0.2, steps=2)
        record.verdict.CopyFrom(verdict_message(Verdict(Kind.HEALTHY, "healthy"), 0.0))

    daemon.script = [capture(ANALYSED, ANALYSED, ANALYSED, edit=healthy)]
    assert run(command, "--connect", endpoint, "--steps", "2") == 0
    shown = capsys.readouterr().out
    assert "The verdict on the job was: healthy." in shown
    assert "Between the recorded ranks no difference is clear; of the job this tells nothing more: traces of 2" in shown
    assert "slow" not in shown and "link" not in shown


def test_an_undelivered_rank_gives_exit_code_1_and_its_cause(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(record: pb.Capture) -> None:
        record.ranks[1].error = HELD

    daemon.script = [capture(ACCEPTED, ACCEPTED, ACCEPTED), capture(ANALYSED, ANALYSED, FAILED, edit=fail)]
    assert run(command, "--connect", endpoint, "--seconds", "0.5") == 1
    shown = capsys.readouterr()
    (row,) = (line for line in shown.out.splitlines() if line.lstrip().startswith("1 "))
    assert "failed" in row and HELD in row
    assert "1 of 2 ranks delivered" in shown.out
    assert f"rank 1: failed ({HELD})" in shown.err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--steps", "0"], "--steps 0"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--steps", "3", "--patience", "-1"], "--patience -1"),
        (["--steps", "3", "--connect", "somewhere"], "say HOST:PORT or unix:PATH"),
        (["--steps", "3", "--output", "/proc/nowhere"], "/proc/nowhere: cannot be written: No such file"),
    ],
)
def test_an_impossible_request_exits_with_2_and_the_reason(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, *words) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("unix:/nowhere/d.sock", "no daemon at /nowhere/d.sock; start `rankscope up`"),
        ("127.0.0.1:1", "nobody answers at 127.0.0.1:1"),
    ],
)
def test_an_unreachable_server_has_its_own_exit_code(
    address: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ((command, "--steps", "3"), (captures, "ls"), (top, "--once"), (doctor,)):
        module, *flags = words
        assert run(module, *flags, "--connect", address) == Exit.UNREACHABLE
        assert reason in capsys.readouterr().err


def test_a_refusal_is_told_in_the_daemons_words(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.refusal = "several runs are seen: a, b; name one with --run"
    assert run(command, "--connect", endpoint, "--steps", "3") == Exit.REFUSED
    assert f"error: {daemon.refusal}\n" in capsys.readouterr().err


def test_json_has_documented_keys_and_null_for_unmeasured_values(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(record: pb.Capture) -> None:
        joined(record)
        record.ranks[0].step_times.before_seconds = 0.1
        record.ranks[1].error = HELD
        record.ranks[1].ClearField("summary")

    daemon.script = [capture(ANALYSED, ANALYSED, FAILED, edit=edit)]
    assert run(command, "--connect", endpoint, "--steps", "3", "--json") == 1
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["id"], told["job"], told["state"], told["start_skew_ms"]) == (ID, "bert", "analysed", 2.0)
    first, second = told["ranks"]
    assert {"rank", "backend", "state", "error", "file", "bytes", "start_unix_ms", "steps"} <= first.keys()
    assert (first["state"], first["error"], first["file"], first["bytes"]) == ("analysed", None, "rank0.json.gz", 2500)
    assert first["step_times"] == {"before_seconds": 0.1, "during_seconds": None, "after_seconds": None}
    assert first["summary"]["mfu_ratio"] is None and first["summary"]["span_seconds"] == 0.3
    assert (second["state"], second["error"], second["steps"], second["start_unix_ms"]) == ("failed", HELD, None, None)
    assert told["summary"]["join"]["last_arrivals"] == {"0": 2, "1": 58}
    assert [rank["rank"] for rank in told["summary"]["ranks"]] == [0]


def test_ctrl_c_cancels_the_capture_and_exits_with_130(daemon: ScriptedCaptures, endpoint: str, tmp_path: Path) -> None:
    daemon.script = [capture(ACCEPTED, ACCEPTED), capture(RUNNING, RUNNING)]
    words = [sys.executable, "-m", "rankscope.cli.main", "capture", "--connect", endpoint, "--steps", "3"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asking:
        assert asking.stderr is not None
        # Only once the running state was shown is Ctrl-C sure to come in the middle.
        for line in asking.stderr:
            if "running" in line:
                break
        asking.send_signal(signal.SIGINT)
        out, err = asking.communicate(timeout=180)
    assert asking.returncode == 130
    assert daemon.cancelled.is_set()
    assert f"asked for capture {ID} to be cancelled" in err
    assert "rank 0 (pid 4100): cancelled" in out


class _Restarted(dict[str, pb.Capture]):
    """What a daemon knows from its store; nothing new is entered."""

    def __setitem__(self, key: str, value: pb.Capture) -> None:
        return


def test_a_restarted_daemon_is_asked_how_the_capture_ended(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(record: pb.Capture) -> None:
        record.ranks[0].error = "the daemon was restarted during the capture"

    daemon.script = [capture(RUNNING, RUNNING), capture(RUNNING, RUNNING)]
    daemon.hang_up_after = 1
    daemon.known = _Restarted({ID: capture(FAILED, FAILED, edit=lose)})
    assert run(command, "--connect", endpoint, "--steps", "3") == 1
    shown = capsys.readouterr()
    assert "the connection was lost (UNAVAILABLE)" in shown.err
    assert "the daemon was restarted during the capture" in shown.out


def test_an_absent_daemon_is_an_error_that_names_the_capture(
    daemon: ScriptedCaptures, endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(capture_following, "RECONNECT_SECONDS", 0.1)
    daemon.script = [capture(RUNNING, RUNNING), capture(RUNNING, RUNNING)]
    daemon.hang_up_after = 1
    daemon.is_away = True
    assert run(command, "--connect", endpoint, "--steps", "3") == Exit.UNREACHABLE
    assert f"rankscope captures show {ID}" in capsys.readouterr().err


def test_container_text_neither_controls_the_terminal_nor_is_markup(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(record: pb.Capture) -> None:
        record.ranks[0].error = "[bold]x[/] \x1b[2Jgone [Errno 13] Permission denied"

    daemon.script = [capture(FAILED, FAILED, job="evil\x1b]0;title\x07job", edit=fail)]
    assert run(command, "--connect", endpoint, "--steps", "3") == 1
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err and "\x07" not in shown.out + shown.err
    assert "[bold]x[/]" in shown.out and "[Errno 13] Permission denied" in shown.out


def test_the_live_table_shows_rank_states_and_fits_the_terminal() -> None:
    console = Terminal(file=io.StringIO(), force_terminal=True, width=120, height=20, color_system=None)
    progress = LiveProgress(console)
    progress.show(capture(RUNNING, *[RUNNING] * 63, FAILED))
    with console.capture() as shown:
        console.print(progress._render())
    lines = shown.get().splitlines()
    assert any(line.startswith("  63  4163  kineto  failed") for line in lines)
    assert sum("records" in line for line in lines) == 13
    assert "64 ranks: 1 failed, 63 running" in lines[-1]


def test_many_ranks_get_a_tally_and_failures_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress()
    progress.show(capture(ACCEPTED, *[ACCEPTED] * 64))
    progress.show(capture(RUNNING, *[RUNNING] * 62, FAILED, FAILED))
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["64 accepted", "ranks 62 and 63: failed", "2 failed, 62 running"]


def test_captures_are_listed_by_job_and_shown_by_id(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.known = {ID: capture(ANALYSED, ANALYSED, FAILED, edit=joined)}
    assert run(captures, "ls", "--connect", endpoint) == 0
    assert [word for word in capsys.readouterr().out.split() if word in (ID, "1/2")] == [ID, "1/2"]
    assert run(captures, "ls", "--connect", endpoint, "--run", "other") == 0
    assert "no capture of other yet" in capsys.readouterr().out
    assert run(captures, "ls", "--connect", endpoint, "--json") == 0
    assert json.loads(capsys.readouterr().out)["captures"][0]["id"] == ID
    assert run(captures, "show", ID, "--connect", endpoint, "--json") == 0
    assert json.loads(capsys.readouterr().out)["ranks"][1]["state"] == "failed"
    assert run(captures, "show", "c-other", "--connect", endpoint) == Exit.NOT_FOUND
    assert "no capture 'c-other'" in capsys.readouterr().err


def test_cancelling_by_id_stops_a_capture_or_says_it_ended(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.known = {ID: capture(RUNNING, RUNNING)}
    assert run(captures, "cancel", ID, "--connect", endpoint) == 0
    assert daemon.known[ID].state == CANCELLED
    assert "was asked to stop" in capsys.readouterr().out
    assert run(captures, "cancel", ID, "--connect", endpoint) == 0
    assert "is over: cancelled" in capsys.readouterr().out


def test_a_rank_slower_after_the_capture_gives_a_warning(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow_down(record: pb.Capture) -> None:
        for entry, after in zip(record.ranks, (0.00945, 0.0073), strict=True):
            entry.step_times.before_seconds, entry.step_times.after_seconds = 0.00719, after

    daemon.script = [capture(ANALYSED, ANALYSED, ANALYSED, edit=slow_down)]
    assert run(command, "--connect", endpoint, "--steps", "3") == 0
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning"))
    assert warning.startswith("Warning: rank 0 took longer for a step after the capture: 7.19 ms before, 9.45 ms")


def test_a_note_is_told_once_with_its_ranks(
    daemon: ScriptedCaptures, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def note(record: pb.Capture) -> None:
        record.notes.append("2 of the job's 8 ranks run on node-a; these were asked")
        for entry in record.ranks:
            entry.notes.extend(["not by kineto: it was started without KINETO_USE_DAEMON=1", f"writing {entry.pid} ms"])

    many = [ANALYSED] * 10
    daemon.script = [capture(ANALYSED, *many, edit=note)]
    assert run(command, "--connect", endpoint, "--steps", "3") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("Note", "…"))]
    assert lines[0] == "Note: 2 of the job's 8 ranks run on node-a; these were asked."
    assert lines[1] == "Note: 10 ranks (0, 1, 2 …): not by kineto: it was started without KINETO_USE_DAEMON=1."
    assert lines[2] == "Note: rank 0: writing 4100 ms."
    assert lines[-1].startswith("… and 4 more notes: rankscope captures show") and len(lines) == 9
