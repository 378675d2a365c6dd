"""How a command ended: real processes that end in every way, and what is said about them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.cli.process_ends import ProcessEnd, ProcessEnds
from rankscope.cli.run_end import CommandEnd, clock, read_exit_reports
from rankscope.probe import exit_report, injection
from tests.support.waiting import wait_until


@pytest.fixture
def ends() -> Iterator[ProcessEnds]:
    watched = ProcessEnds()
    yield watched
    watched.stop()


# A child of the process that we start, which we cannot wait for. Its parent reaps it at once.
GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("input(); raise SystemExit(0)", 0),
        ("input(); raise SystemExit(3)", 3),
        ("input(); import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("input(); import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_the_status_of_a_process_of_another_parent_is_seen(ends: ProcessEnds, code: str, status: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", GRANDCHILD, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        pid = int(parent.stdout.readline())
        ends.watch([pid])
        assert pid not in ends.ends
        before = time.time()
        parent.stdin.write("\n")
        parent.stdin.flush()
        wait_until(lambda: pid in ends.ends, lambda: "the end was not seen")
        parent.wait()
        # Only newer kernels keep the status of a process that its parent has reaped.
        wait_until(lambda: ends.ends[pid].status in (status, None), lambda: str(ends.ends))
    assert before <= ends.ends[pid].unix_seconds <= time.time()
    assert ends.ends[pid].memory == ""


def test_a_process_that_is_gone_already_has_ended(ends: ProcessEnds) -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
    ends.watch([child.pid, 0])
    assert ends.ends[child.pid].status is None and 0 not in ends.ends


def test_ends_that_come_with_the_stop_are_kept() -> None:
    watched = ProcessEnds()
    with subprocess.Popen(["sleep", "1000"]) as child:
        watched.watch([child.pid])
        child.kill()
        child.wait()
        watched.stop()
    assert child.pid in watched.ends
    watched.watch([os.getpid()])  # the correlator may have one more window
    assert os.getpid() not in watched.ends


# Reports of the probe.


def report_of(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = folder / "train.py"
    path.write_text(script)
    reports = folder / "reports"
    reports.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "PYTHON"))}
    variables = {"PYTHONPATH": injection.inject_folder(), exit_report.FOLDER: str(reports), **environment}
    return subprocess.run(
        [sys.executable, str(path)], env=kept | variables, capture_output=True, text=True, check=False
    )


RAISES = """
import json
def load_batch(step):
    return json.loads("{")
def main():
    load_batch(3)
"""


def test_the_exception_is_reported_with_the_line_of_the_program(tmp_path: Path) -> None:
    done = report_of(f"{RAISES}\nmain()\n", tmp_path, RANK="3")
    assert done.returncode == 1 and "JSONDecodeError" in done.stderr and "rankscope" not in done.stderr
    (report,) = read_exit_reports(tmp_path / "reports").values()
    assert report.rank == 3
    assert report.raised.text.startswith("JSONDecodeError: Expecting property name")
    assert report.raised.place == "train.py:4 (load_batch)"


@pytest.mark.parametrize(
    ("script", "text", "place"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'", "train.py:1 (<module>)"),
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax (train.py, line 2)", "train.py:2 (<module>)"),
        ("raise ValueError('first\\nsecond')\n", "ValueError: first", "train.py:1 (<module>)"),
        ("class E(Exception): pass\nraise E\n", "E", "train.py:2 (<module>)"),
        # The default hook is not ours to keep: the program has its own.
        ("import sys\nsys.excepthook = print\n1 / 0\n", "ZeroDivisionError: division by zero", "train.py:3 (<module>)"),
    ],
)
def test_what_a_program_can_fail_with_is_one_line(script: str, text: str, place: str, tmp_path: Path) -> None:
    report_of(script, tmp_path)
    (report,) = read_exit_reports(tmp_path / "reports").values()
    assert (report.raised.text, report.raised.place) == (text, place)


@pytest.mark.parametrize(
    "script",
    [
        "raise SystemExit(3)\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\n",
        "import os\nos._exit(3)\n",
        "import os\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\n",
    ],
)
def test_without_an_exception_there_is_no_report(script: str, tmp_path: Path) -> None:
    done = report_of(script, tmp_path)
    assert done.stderr == "" and read_exit_reports(tmp_path / "reports") == {}


def test_a_folder_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    done = report_of(RAISES + "\nmain()\n", tmp_path, **{exit_report.FOLDER: str(tmp_path / "gone")})
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1


POOL = """
from concurrent.futures import ProcessPoolExecutor
def work(n):
    raise ValueError(f"bad shard {n}")
if __name__ == "__main__":
    with ProcessPoolExecutor(1) as pool:
        pool.submit(work, 7).result()
"""


def test_an_exception_of_another_process_has_its_own_line(tmp_path: Path) -> None:
    report_of(POOL, tmp_path)
    (report,) = read_exit_reports(tmp_path / "reports").values()
    assert (report.raised.text, report.raised.place) == ("ValueError: bad shard 7", "train.py:4 (work)")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{" * 100_000,
        b'{"type": "E", "text": "x", "rank": null, "unix_seconds": 1e999, "frames": [{"line": "x"}]}',
        b'{"type": "E", "text": "x", "rank": null, "unix_seconds": {}, "frames": []}',
        b'{"type": "E", "rank": null, "unix_seconds": 1, "frames": [' + b"0," * 200_000 + b"0]}",
    ],
)
def test_a_report_that_no_probe_wrote_is_left_out(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "1.json").write_bytes(content)
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "2.json").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "3.json")
    assert read_exit_reports(tmp_path) == {}


def test_names_in_a_report_cannot_steer_the_terminal(tmp_path: Path) -> None:
    frame = {"file": "/a/\x1b[2Jb.py", "line": 1, "function": "f\x1b]0;x\x07"}
    report = {"type": "E\x1b[31m", "text": "a\x1b[2J", "rank": "\x1b", "unix_seconds": 1.0, "frames": [frame]}
    (tmp_path / "1.json").write_text(json.dumps(report))
    failure = CommandEnd(1, 1, 0.0, 2.0, reports=read_exit_reports(tmp_path)).failure({})
    assert str(failure).isprintable() and "\x1b" not in str(failure)


# Who failed first.


def write_report(folder: Path, pid: int, at: float, kind: str = "ValueError", rank: int | None = None) -> None:
    document = {"type": kind, "text": "bad", "unix_seconds": at, "rank": None if rank is None else str(rank)}
    (folder / f"{pid}.json").write_text(json.dumps(document | {"frames": []}))


RANKS = {100: 0, 101: 1}


def test_the_first_failure_counts_and_not_its_consequences(tmp_path: Path) -> None:
    # Rank 1 raises, and takes a second to end; its peer and the launcher end because of that.
    write_report(tmp_path, 101, 40.0)
    write_report(tmp_path, 100, 40.2, "RuntimeError")
    write_report(tmp_path, 9, 41.0, "ChildFailedError")
    ends = {pid: ProcessEnd(pid, at, 1) for pid, at in ((100, 40.5), (101, 41.0))}
    end = CommandEnd(9, 1, 0.0, 42.0, ends=ends, reports=read_exit_reports(tmp_path))
    failure = end.failure(RANKS)
    assert failure is not None and (failure.rank, failure.unix_seconds) == (1, 40.0)
    assert str(failure) == "rank 1 raised ValueError: bad"


@pytest.mark.parametrize(
    ("status", "memory", "text"),
    [
        (-9, "", "rank 1 was ended by SIGKILL"),
        (-9, "out of memory, beyond its cgroup's limit of 2 GiB", "was killed: out of memory, beyond its cgroup's"),
        (-11, "", "rank 1 crashed with SIGSEGV"),
        (-6, "", "rank 1 was ended by SIGABRT"),
        (-64, "", "rank 1 was ended by SIGRTMAX"),
        (3, "", "rank 1 exited with status 3"),
    ],
)
def test_how_the_first_rank_failed_has_advice(status: int, memory: str, text: str) -> None:
    ends = {100: ProcessEnd(100, 40.5, 1), 101: ProcessEnd(101, 40.0, status, memory)}
    failure = CommandEnd(9, 1, 0.0, 42.0, ends=ends).failure(RANKS)
    assert failure is not None and text in str(failure) and failure.advice


PEER_IS_GONE = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:64748"


@pytest.mark.parametrize(("status", "seconds", "rank"), [(3, 1.0, 1), (-9, 1.0, 1), (-15, 1.0, 0), (-9, 30.0, 0)])
def test_a_rank_fails_because_its_peer_is_gone(status: int, seconds: float, rank: int, tmp_path: Path) -> None:
    """Rank 1 ends a moment later. If a launcher ends it, another node was lost."""
    write_report(tmp_path, 100, 40.0, PEER_IS_GONE)
    ends = {100: ProcessEnd(100, 40.1, 1), 101: ProcessEnd(101, 40.0 + seconds, status)}
    failure = CommandEnd(9, 1, 0.0, 90.0, ends=ends, reports=read_exit_reports(tmp_path)).failure(RANKS)
    assert failure is not None and failure.rank == rank


def test_an_interruption_is_no_failure(tmp_path: Path) -> None:
    ends = {pid: ProcessEnd(pid, 40.5, -2) for pid in RANKS}
    write_report(tmp_path, 9, 40.6, "KeyboardInterrupt")
    reports = read_exit_reports(tmp_path)
    end = CommandEnd(9, 130, 0.0, 42.0, 40.0, signal.SIGINT, ends, reports)
    assert end.failure(RANKS) is None and str(end) == "interrupted by Ctrl-C after 0:42"
    # Ranks that ended before the interruption did not end because of it.
    late = CommandEnd(9, 130, 0.0, 42.0, 41.0, signal.SIGINT, ends, reports)
    assert late.failure(RANKS) is not None and not late.is_interrupted


def test_without_a_known_rank_the_command_failed(tmp_path: Path) -> None:
    assert str(CommandEnd(9, 2, 0.0, 1.0).failure_of_command()) == "the command exited with status 2"
    write_report(tmp_path, 77, 0.5, rank=4)
    end = CommandEnd(9, 1, 0.0, 1.0, reports=read_exit_reports(tmp_path))
    assert str(end.failure_of_command()) == "rank 4 raised ValueError: bad"
    assert CommandEnd(9, 0, 0.0, 1.0).failure_of_command() is None


def test_times_of_a_run_are_read_at_a_glance() -> None:
    assert [clock(seconds) for seconds in (-1.0, 7.9, 61.0, 3605.0)] == ["0:00", "0:07", "1:01", "1:00:05"]
