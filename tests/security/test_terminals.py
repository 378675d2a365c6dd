"""Names that a container chose reach a colleague's terminal and files that they open: they must be shown, not obeyed.

Real processes on a real pseudo-terminal, because styles and escape sequences are for terminals only."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import select
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.cli.messages import log_to_stderr, to_stderr, to_stdout
from rankscope.cli.terminal import Terminal
from rankscope.operator.correlation.job_service import verdict_message
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1 import identity_pb2, job_service_pb2, window_pb2
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceServicer, add_CaptureServiceServicer_to_server
from rankscope.v1.job_service_pb2_grpc import JobServiceServicer, add_JobServiceServicer_to_server

HANG_SECONDS = 180.0
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
NAMES = [
    "[/b]",
    "[link=https://evil.example]click[/link]",
    "[bold red]fine[/]",
    ":smiley:",
    f"a{ESCAPES}b",
    "two\nlines",
]
EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1, "dur": 5}


def run_on_terminal(arguments: list[str], **environment: str) -> tuple[int, bytes]:
    """The exit code, and what a terminal receives."""
    own, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "rankscope.cli.main", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", **environment},
    )
    os.close(theirs)
    received = bytearray()
    give_up = time.monotonic() + HANG_SECONDS
    try:
        while time.monotonic() < give_up:
            if select.select([own], [], [], 0.2)[0]:
                try:
                    block = os.read(own, 65536)
                except OSError:
                    break  # the process has closed its end
                received += block
        return process.wait(max(0.1, give_up - time.monotonic())), bytes(received)
    except subprocess.TimeoutExpired:
        pytest.fail(f"rankscope {' '.join(arguments)} hangs; so far: {bytes(received)!r}")
    finally:
        process.kill()
        process.wait()
        os.close(own)


def assert_shown_and_not_obeyed(received: bytes) -> None:
    for control in (b"\x1b]0;", b"\x1b[2J", b"\x07", b"\x1b]8;", "\x9b".encode(), "\u202e".encode()):
        assert control not in received, received


class HostileJobs(JobServiceServicer):
    def ListJobs(self, request: job_service_pb2.ListJobsRequest, context: object) -> job_service_pb2.ListJobsResponse:
        return job_service_pb2.ListJobsResponse(jobs=[self._job(name) for name in NAMES])

    def _job(self, name: str) -> job_service_pb2.JobStatus:
        window = window_pb2.RankWindow(
            identity=identity_pb2.RankIdentity(job=name, rank=0, node=name),
            wait_source=name,
            stacks=window_pb2.StackSummary(
                phase_shares={name: 1.0},
                frames=[window_pb2.FrameShare(function=name, file=f"/{name}.py", line=1, share=1.0, own_share=1.0)],
            ),
        )
        verdict = verdict_message(Verdict(kind=Kind.INSUFFICIENT_DATA, reason=name), 0.0)
        return job_service_pb2.JobStatus(job=name, world_size=1, ranks_seen=1, ranks=[window], verdict=verdict)


class HostileCaptures(CaptureServiceServicer):
    """Announces `announced` bytes and sends `sent`, without end if that is None."""

    def __init__(self, announced: int, sent: int | None) -> None:
        self.announced, self.sent = announced, sent
        self.chunks = 0

    def ListCaptures(self, request: pb.ListCapturesRequest, context: object) -> pb.ListCapturesResponse:
        return pb.ListCapturesResponse(captures=[self._capture()])

    def GetCapture(self, request: pb.GetCaptureRequest, context: object) -> pb.GetCaptureResponse:
        return pb.GetCaptureResponse(capture=self._capture())

    def _capture(self) -> pb.Capture:
        name = "".join(NAMES)
        rank = pb.RankCapture(
            rank=0,
            node=name,
            backend=name,
            state=pb.CAPTURE_STATE_ANALYSED,
            artifact="/x.json.gz",
            bytes=self.announced,
            notes=[name],
            uri=name,
            summary=pb.TraceSummary(findings=[name]),
        )
        failed = pb.RankCapture(rank=1, node="other", state=pb.CAPTURE_STATE_FAILED, error=name)
        capture = pb.Capture(id="c1", job=name, reason=name, state=pb.CAPTURE_STATE_ANALYSED, ranks=[rank, failed])
        capture.notes.append(name)
        return capture

    def DownloadArtifact(
        self, request: pb.DownloadArtifactRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.DownloadArtifactResponse]:
        left = self.sent
        while context.is_active() and (left is None or left > 0):
            size = 65536 if left is None else min(left, 65536)
            left = None if left is None else left - size
            self.chunks += 1
            yield pb.DownloadArtifactResponse(chunk=bytes(size), total_bytes=self.announced)

    def CancelCapture(self, request: pb.CancelCaptureRequest, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.NOT_FOUND, "".join(NAMES))


@contextmanager
def served(servicer: JobServiceServicer | CaptureServiceServicer) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    if isinstance(servicer, JobServiceServicer):
        add_JobServiceServicer_to_server(servicer, server)
    else:
        add_CaptureServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_top_shows_the_names_of_a_hostile_job() -> None:
    with served(HostileJobs()) as endpoint:
        code, received = run_on_terminal(["top", "--once", "--connect", endpoint])
    assert code == 0, received
    assert_shown_and_not_obeyed(received)
    for name in ("[/b]", "[link=https://evil.example]click[/link]", "[bold red]fine[/]", ":smiley:"):
        assert received.count(name.encode()) >= 2, received  # the job, and the function


@pytest.mark.parametrize("action", [["ls"], ["show", "c1"], ["cancel", "c1"]], ids=lambda action: str(action[0]))
def test_captures_show_the_texts_of_a_hostile_daemon(action: list[str]) -> None:
    with served(HostileCaptures(1, 1)) as endpoint:
        _, received = run_on_terminal(["captures", *action, "--connect", endpoint])
    assert_shown_and_not_obeyed(received)
    assert b"[/b]" in received


def hostile_trace(folder: Path, number: int) -> Path:
    name = "".join(NAMES)
    kernel = {"cat": "kernel", "args": {"device": 0, "stream": 7, "correlation": 1}}
    group = {"Collective name": name, "Process Group Name": name, "Process Group Description": name, "Group size": 2}
    events = [
        EVENT,
        {**EVENT, **kernel, "name": name},
        {**EVENT, "ts": 20, "cat": "kernel", "name": "ncclDevKernel_AllReduce", "args": {**kernel["args"], **group}},
        {**EVENT, "name": f"ProfilerStep#{number}", "cat": "user_annotation", "dur": 100},
    ]
    devices = [{"id": 0, "name": name, "totalGlobalMem": 1, "numSms": 1}]
    distributed = {"backend": name, "rank": number, "world_size": 2, "pg_config": [{"pg_name": name, "ranks": [0, 1]}]}
    content = {"deviceProperties": devices, "distributedInfo": distributed, name: 1, "traceEvents": events}
    path = folder / f"{name.replace('/', '_')}-rank{number}.json"
    path.write_text(json.dumps(content))
    return path


def test_a_trace_report_shows_the_names_of_a_hostile_trace(tmp_path: Path) -> None:
    hostile_trace(tmp_path, 0)
    hostile_trace(tmp_path, 1)
    (tmp_path / f"broken{ESCAPES}.json").write_text("{" + ESCAPES)
    (tmp_path / "keys.json").write_text(json.dumps({"".join(NAMES): 1}))
    html = tmp_path / "report.html"
    code, received = run_on_terminal(["analyze", "trace", str(tmp_path), "--html", str(html)])
    assert code == 0, received
    assert_shown_and_not_obeyed(received)
    assert b"[link=https" in received
    page = html.read_text()
    assert not any(letter in page for letter in "\x1b\x07\x9b\u202e")


def test_other_reports_show_the_names_of_a_hostile_trace(tmp_path: Path) -> None:
    path = hostile_trace(tmp_path, 0)
    memory = {"ph": "i", "name": "[memory]", "ts": 2, "args": {"Bytes": 8, "Total Allocated": 8, "Device Type": 1}}
    content = json.loads(path.read_text())
    content["traceEvents"] += [memory, {**EVENT, "name": "".join(NAMES), "dur": 50, "ts": 0}]
    path.write_text(json.dumps(content))
    for command in (
        ["analyze", "alphabeta"],
        ["mfu", "--memory-trace"],
        ["analyze", "timeline"],
        ["compare", str(path)],
    ):
        _, received = run_on_terminal([*command, str(path)])
        assert_shown_and_not_obeyed(received)


def test_a_pipe_in_a_directory_of_traces_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps({"traceEvents": [EVENT]}))
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    for asked in (str(tmp_path), f"{tmp_path}/*.json"):
        code, received = run_on_terminal(["analyze", "trace", asked])
        assert code == 0, received
        assert b"pipe.json: it is not a regular file" in received
        assert b"device.json: it is not a regular file" in received


def test_a_pipe_that_the_user_names_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["sh", "-c", f"cat > {pipe}"], stdin=subprocess.PIPE)
    try:
        writer.stdin.write(json.dumps({"traceEvents": [EVENT]}).encode())  # type: ignore[union-attr]
        writer.stdin.close()  # type: ignore[union-attr]
        code, received = run_on_terminal(["analyze", "trace", str(pipe)])
        assert code == 0, received
    finally:
        writer.kill()
        writer.wait()


def test_lines_and_logs_are_printable(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        log_to_stderr("info")
        logging.getLogger("rankscope.test").error("%s", ESCAPES, exc_info=ValueError(ESCAPES))
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    to_stdout(f"first\n{ESCAPES}")
    to_stderr(f"error: {ESCAPES}\nerror: forged")
    written = capfd.readouterr()
    assert not any(letter in written.out + written.err for letter in "\x1b\x07\x9b\u202e")
    assert written.out.startswith("first\n")
    assert len(written.err.splitlines()) == 2


def test_a_terminal_prints_nothing_that_controls_it() -> None:
    file = io.StringIO()
    terminal = Terminal(file=file, force_terminal=True, width=200)
    for name in NAMES:
        terminal.print(name)
    assert not any(letter in file.getvalue() for letter in "\x07\x9b\u202e")
    assert "[/b]" in file.getvalue()
    assert ":smiley:" in file.getvalue()
    assert "\x1b]" not in file.getvalue()


# What the CLI writes and trusts.


@pytest.mark.parametrize("option", ["--merged", "--html"])
def test_a_device_is_written_to_and_not_replaced(tmp_path: Path, option: str) -> None:
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [EVENT]}))
    (tmp_path / "rank1.json").write_text(json.dumps({"traceEvents": [EVENT]}))
    device = tmp_path / "full"
    os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    code, received = run_on_terminal(["analyze", "trace", str(tmp_path), option, str(device)])
    assert device.is_char_device()
    assert code == 2, received
    assert b"No space left" in received


def test_a_link_is_followed_and_a_file_is_replaced_whole(tmp_path: Path) -> None:
    trace = tmp_path / "rank0.json"
    trace.write_text(json.dumps({"traceEvents": [EVENT]}))
    real = tmp_path / "elsewhere" / "page.html"
    real.parent.mkdir()
    real.write_text("old")
    real.chmod(0o640)
    link = tmp_path / "page.html"
    link.symlink_to(real)
    code, received = run_on_terminal(["analyze", "trace", str(trace), "--html", str(link)])
    assert code == 0, received
    assert link.is_symlink()
    assert real.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(path.name for path in real.parent.iterdir()) == ["page.html"]
    # An input may be the target.
    code, received = run_on_terminal(["analyze", "trace", str(trace), "--merged", str(trace)])
    assert code == 0, received
    assert len(json.loads(trace.read_text())["traceEvents"]) > 1


# Imports first: the interpreter may be out of reach for that user.
AS_NOBODY = """
import os, sys
from rankscope.cli import captures, main, top
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A directory that every user can enter."""
    with tempfile.TemporaryDirectory(prefix="rankscope-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.mark.parametrize("command", [["top", "--once"], ["captures", "ls"]], ids=lambda command: str(command[0]))
@pytest.mark.parametrize("trap", ["of another user", "open", "link", "own"])
def test_a_socket_directory_that_somebody_else_prepared_is_not_used(
    runtime: Path, command: list[str], trap: str
) -> None:
    directory = runtime / "rankscope"
    if trap == "link":
        (runtime / "away").mkdir()
        directory.symlink_to(runtime / "away")
    else:
        directory.mkdir(mode=0o755)
    if trap != "of another user":
        os.chown(directory, 65534, 65534, follow_symlinks=False)
    if trap == "open":
        directory.chmod(0o777)
    finished = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *command],
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert finished.returncode != 0
    assert ("is not trusted" in finished.stderr) == (trap != "own"), finished.stderr
    assert "--connect" in finished.stderr


def test_a_download_ends_at_the_announced_size(tmp_path: Path) -> None:
    hostile = HostileCaptures(announced=200_000, sent=None)
    with served(hostile) as endpoint:
        code, received = run_on_terminal(
            ["captures", "get", "c1", "--rank=0", f"--output={tmp_path}", f"--connect={endpoint}"]
        )
    assert code == 1, received
    assert b"more comes than the 200000 bytes" in received
    assert_shown_and_not_obeyed(received)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200_000 + 65536


def test_a_download_that_is_announced_too_large_does_not_begin(tmp_path: Path) -> None:
    hostile = HostileCaptures(1 << 50, sent=None)
    with served(hostile) as endpoint:
        code, received = run_on_terminal(
            ["captures", "get", "c1", "--rank=0", f"--output={tmp_path}", f"--connect={endpoint}"]
        )
    assert code == 2, received
    assert b"--max-bytes" in received
    assert hostile.chunks == 0


def test_a_download_larger_than_the_free_disk_does_not_begin(tmp_path: Path) -> None:
    hostile = HostileCaptures(1 << 50, sent=None)
    with served(hostile) as endpoint:
        code, received = run_on_terminal(
            ["captures", "get", "c1", f"--max-bytes={1 << 60}", f"--output={tmp_path}", f"--connect={endpoint}"]
        )
    assert code == 1, received
    assert b"do not fit" in received
    assert hostile.chunks == 0
