"""`rankscope up` and `rankscope top` as a user runs them, beside a real job of two ranks."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rankscope.cli.demo_job.faults import Fault
from rankscope.cli.demo_job.launcher import DemoJob
from rankscope.common.run_names import run_labels
from rankscope.v1.job_service_pb2 import (
    VERDICT_KIND_UNSPECIFIED,
    JobStatus,
    ListJobsRequest,
    WatchJobsRequest,
)
from rankscope.v1.job_service_pb2_grpc import JobServiceStub
from rankscope.v1.rank_service_pb2 import WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.integration.daemon_process import MAIN, PATIENCE_SECONDS, Serving, run_of, serving
from tests.integration.test_metric_pages import complaints
from tests.support.measuring import Measured
from tests.support.waiting import wait_until

# Of a pseudo-terminal, which has no size of its own.
WIDE = {"COLUMNS": "200"}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("up"), "up") as up:
        yield up


@pytest.fixture(scope="module")
def job(up: Serving) -> Iterator[DemoJob]:
    with DemoJob(2, Fault(), probe=True) as job:
        job.start()
        job.wait_until_training(timeout=180)
        yield job


def status_of(up: Serving, name: str) -> JobStatus | None:
    with grpc.insecure_channel(up.grpc_target) as channel:
        jobs = JobServiceStub(channel).ListJobs(ListJobsRequest(), timeout=PATIENCE_SECONDS).jobs
    return next((status for status in jobs if status.job == name), None)


def is_judged(up: Serving, name: str) -> bool:
    status = status_of(up, name)
    return status is not None and status.ranks_seen == 2 and status.HasField("step_seconds")


def rankscope(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAIN, *words], capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_a_job_is_listed_with_ranks_windows_and_a_verdict(up: Serving, job: DemoJob) -> None:
    up.wait_until(lambda: is_judged(up, job.job_name))
    status = status_of(up, job.job_name)
    assert status is not None
    assert (status.world_size, status.ranks_seen) == (2, 2)
    assert status.verdict.kind != VERDICT_KIND_UNSPECIFIED
    assert status.verdict.reason
    assert [(window.identity.rank, window.identity.pid) for window in status.ranks] == list(enumerate(job.pids))
    assert 0 < status.step_seconds < 60
    # Every change of a verdict is a line on stdout.
    up.wait_until(lambda: re.search(rf"^\d\d:\d\d:\d\d . {job.job_name}: \S", up.output, re.MULTILINE))


def test_metrics_count_both_ranks_steps_and_give_identity_once(up: Serving, job: DemoJob) -> None:
    up.wait_until(lambda: all(up.steps(job.job_name, rank) > 0 for rank in range(2)))
    ours = [(name, labels) for name, labels, _ in up.scrape() if run_of(labels) == job.job_name]
    for rank, pid in enumerate(job.pids):
        infos = [labels for name, labels in ours if name == "rankscope_rank_info" and labels["rank"] == str(rank)]
        assert [labels["pid"] for labels in infos] == [str(pid)]
    # What tells who a rank is stands in rank_info alone: anywhere else it would multiply the series.
    telling = {"pid", "node", "run_pod", "world_size", "gpu"}
    others = [each for each in ours if each[0].startswith("rankscope_rank_") and each[0] != "rankscope_rank_info"]
    assert not [(name, labels) for name, labels in others if telling & labels.keys()]
    # The board counts a step when the script has left the optimizer, so the two may be a little apart.
    up.wait_until(lambda: abs(up.steps(job.job_name, 0) - job.steps_done()[0]) < 0.2 * job.steps_done()[0])


def test_promtool_accepts_the_page_with_a_job(up: Serving, job: DemoJob) -> None:
    up.wait_until(lambda: is_judged(up, job.job_name))
    with urllib.request.urlopen(up.metrics_url, timeout=PATIENCE_SECONDS) as answer:
        page = answer.read().decode()
    assert f'run="{run_labels(job.job_name)["run"]}"' in page
    assert complaints(page) == ""


def test_top_once_prints_the_verdict_and_every_rank(up: Serving, job: DemoJob) -> None:
    up.wait_until(lambda: is_judged(up, job.job_name))

    def has_a_row_of_numbers(rank: int, screen: str) -> bool:
        row = rf"^\s*{rank}\s+\S+\s+{job.pids[rank]}\s+\d+\.\d ms\s+\d+\.\d ms\s"
        return re.search(row, screen, re.MULTILINE) is not None

    def shows_both_ranks() -> bool:
        shown = rankscope("top", "--once", "--connect", up.grpc_target)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert f"{job.job_name}  2/2 ranks" in shown.stdout
        # Until DDP is sampled at the rate that fits the job, a window may hold no measured wait: '–', not a number.
        return all(has_a_row_of_numbers(rank, shown.stdout) for rank in range(2))

    up.wait_until(shows_both_ranks)
    cut = rankscope("top", "--once", "--rows", "1", "--connect", up.grpc_target)
    assert "… and 1 more rank (--rows N shows more)" in cut.stdout
    told = rankscope("top", "--once", "--json", "--run", job.job_name, "--ranks", "1", "--connect", up.grpc_target)
    (run,) = json.loads(told.stdout)["runs"]
    assert [rank["pid"] for rank in run["ranks"]] == job.pids[1:]


def test_the_console_shows_both_ranks_with_the_fields_of_top(up: Serving, job: DemoJob) -> None:
    found = re.search(r"console (http://127\.0\.0\.1:\d+/)", up.log)
    assert found is not None

    def ask(path: str) -> bytes:
        with urllib.request.urlopen(f"{found[1]}api/v1/{path}", timeout=PATIENCE_SECONDS) as answer:
            return bytes(answer.read())

    def matrix() -> np.ndarray:
        body = ask(f"heatmap?signal=self_seconds&run={job.job_name}")
        start = 4 + int.from_bytes(body[:4], "little")
        return np.frombuffer(body, "<f4", offset=start).reshape(len(json.loads(body[4:start])["ranks"]), -1)

    up.wait_until(lambda: is_judged(up, job.job_name))
    up.wait_until(lambda: matrix().shape[0] == 2 and (~np.isnan(matrix())).sum(axis=1).min() > 2)
    (listed,) = [run for run in json.loads(ask("runs"))["runs"] if run["run"] == job.job_name]
    assert 0 < listed["step_seconds"] < 60 and listed["recent_step_seconds"]
    told = rankscope("top", "--once", "--json", "--run", job.job_name, "--connect", up.grpc_target)
    (run,) = json.loads(told.stdout)["runs"]
    assert run.keys() - listed.keys() == {"breakdown", "ranks"}, "which the page of the run has"
    assert run["verdict"].keys() == listed["verdict"].keys()
    latest = json.loads(ask(f"rank?rank=1&run={job.job_name}"))["latest"]
    assert latest["pid"] == job.pids[1] and run["ranks"][1].keys() - latest.keys() == {"stale_seconds"}


@contextmanager
def live_top(
    target: str, *flags: str, has_keys: bool = False
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str], int, list[Any]]]:
    """`rankscope top` in a terminal of its own, everything it has drawn so far, where keys are pressed, and the
    terminal's attributes before it started."""
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    attributes = termios.tcgetattr(ours)
    drawn = bytearray()

    def screen() -> str:
        with suppress(OSError):  # nothing new, or the terminal is closed
            while piece := os.read(ours, 65536):
                drawn.extend(piece)
        return drawn.decode(errors="replace")

    command = [*MAIN, "top", "--connect", target, *flags]
    environment = {**os.environ, **WIDE, "TERM": "xterm"}
    keys = theirs if has_keys else subprocess.DEVNULL
    with subprocess.Popen(command, stdin=keys, stdout=theirs, stderr=theirs, env=environment) as top:
        os.close(theirs)
        try:
            yield top, screen, ours, attributes
        finally:
            top.kill()
            os.close(ours)


def test_top_draws_until_it_is_interrupted(up: Serving, job: DemoJob) -> None:
    with live_top(up.grpc_target, "--run", job.job_name) as (top, screen, *_):
        wait_until(lambda: all(str(pid) in screen() for pid in job.pids), screen)
        top.send_signal(signal.SIGINT)
        assert top.wait(PATIENCE_SECONDS) == 130
        assert "Traceback" not in screen()


def test_q_ends_it_and_the_terminal_is_as_before(up: Serving, job: DemoJob) -> None:
    with live_top(up.grpc_target, "--run", job.job_name, has_keys=True) as (top, screen, keys, before):
        wait_until(lambda: all(str(pid) in screen() for pid in job.pids), screen)
        assert not termios.tcgetattr(keys)[3] & termios.ECHO
        os.write(keys, b"s")
        wait_until(lambda: "sorted by node" in screen(), screen)
        os.write(keys, b"?")
        wait_until(lambda: "choose a run" in screen(), screen)
        os.write(keys, b"q")
        assert top.wait(PATIENCE_SECONDS) == 0
        assert termios.tcgetattr(keys) == before
        assert "Traceback" not in screen()


def test_top_needs_a_daemon_and_accepts_one_without_correlation(tmp_path: Path) -> None:
    nobody = tmp_path / "nobody.sock"
    alone = rankscope("top", "--once", "--connect", f"unix:{nobody}")
    assert (alone.returncode, alone.stdout) == (4, "")
    assert alone.stderr.startswith(f"error: no daemon at {nobody}; start `rankscope up`")
    with serving(tmp_path / "daemon", "daemon") as daemon:
        shown = rankscope("top", "--once", "--connect", daemon.grpc_target)
        assert (shown.returncode, shown.stderr) == (0, "")
        examined = rankscope("doctor", "--connect", daemon.grpc_target)
        assert examined.returncode == 0
        assert "a daemon without correlation" in examined.stdout


def test_a_second_up_fails_clearly_and_the_first_continues(up: Serving, job: DemoJob, tmp_path: Path) -> None:
    socket = up.grpc_target.removeprefix("unix:")
    same_socket = rankscope("up", "--metrics-listen", "127.0.0.1:0", "--socket", socket)
    assert same_socket.returncode == 1
    assert f"{socket} is in use by another rankscope daemon (pid {up.process.pid})" in same_socket.stderr
    address = re.sub(r"^http://|/metrics$", "", up.metrics_url)
    same_port = rankscope("up", "--metrics-listen", address, "--socket", str(tmp_path / "d.sock"))
    assert same_port.returncode == 1
    assert f"port {address.rpartition(':')[2]} is in use" in same_port.stderr
    assert "Traceback" not in same_socket.stderr + same_port.stderr
    steps = up.steps(job.job_name, 0)
    up.wait_until(lambda: up.steps(job.job_name, 0) > steps)
    assert is_judged(up, job.job_name)


def test_watchers_that_vanish_or_never_read_hurt_nobody(up: Serving, job: DemoJob) -> None:
    """A killed operator leaves its stream behind, a stuck one does not read: verdicts must come all the same."""
    target = up.grpc_target
    watcher = (
        "import grpc, sys, time\n"
        "from rankscope.v1.rank_service_pb2 import WatchRanksRequest\n"
        "from rankscope.v1.rank_service_pb2_grpc import RankServiceStub\n"
        "from rankscope.v1.job_service_pb2 import WatchJobsRequest\n"
        "from rankscope.v1.job_service_pb2_grpc import JobServiceStub\n"
        "channel = grpc.insecure_channel(sys.argv[1])\n"
        "streams = [RankServiceStub(channel).WatchRanks(WatchRanksRequest()), "
        "JobServiceStub(channel).WatchJobs(WatchJobsRequest())]\n"
        "for stream in streams: next(stream)\n"
        "print('watching', flush=True)\n"
        "time.sleep(600)\n"
    )
    alone = 1  # the correlation of `up` reads as any other does
    up.wait_until(lambda: up.value("rankscope_daemon_watch_readers") == alone)  # those of earlier tests are gone
    with subprocess.Popen([MAIN[0], "-c", watcher, target], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "watching\n"
            up.wait_until(lambda: up.value("rankscope_daemon_watch_readers") == alone + 1)
        finally:
            process.kill()
    up.wait_until(lambda: up.value("rankscope_daemon_watch_readers") == alone)
    with grpc.insecure_channel(target) as channel:
        jobs = JobServiceStub(channel).WatchJobs(WatchJobsRequest(), timeout=PATIENCE_SECONDS)
        ranks = RankServiceStub(channel).WatchRanks(WatchRanksRequest(), timeout=PATIENCE_SECONDS)
        for _ in range(3):
            assert any(status.job == job.job_name for status in next(jobs).jobs)
            assert any(window.identity.job == job.job_name for window in next(ranks).windows)
        jobs.cancel()
        ranks.cancel()
    assert up.is_healthy()
    assert job.poll() == []


def test_a_restart_is_a_new_incarnation_and_ended_jobs_disappear(up: Serving, job: DemoJob) -> None:
    """A launcher that restarts its ranks keeps the address and the run id; only the processes are others."""
    up.wait_until(lambda: is_judged(up, job.job_name))
    before = status_of(up, job.job_name)
    assert before is not None
    name, port = job.job_name, job.port
    job.stop()
    up.wait_until(lambda: status_of(up, name) is None)
    up.wait_until(lambda: up.values("rankscope_rank_up", **run_labels(name)) == [])
    where = {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": job.run_id}
    with DemoJob(2, Fault(), probe=True, extra_environment=where) as again:
        again.start()
        again.wait_until_training(timeout=180)
        up.wait_until(lambda: is_judged(up, name))
        after = status_of(up, name)
        assert after is not None
        old, new = ({w.identity.rank: w.identity for w in status.ranks} for status in (before, after))
        assert [new[rank].pid for rank in range(2)] == again.pids
        assert all(new[rank].incarnation > old[rank].incarnation for rank in range(2))
        # Steps are counted from this process' beginning, not from the one's before it.
        assert all(window.steps_total <= again.steps_done()[0] + 1 for window in after.ranks)
    up.wait_until(lambda: status_of(up, name) is None)


def test_sigterm_stops_a_busy_up_cleanly_and_top_reports_it(tmp_path: Path, measured: Measured) -> None:
    with serving(tmp_path, "up") as up, live_top(up.grpc_target) as (top, screen, *_):
        socket = Path(up.grpc_target.removeprefix("unix:"))
        assert socket.is_socket()
        wait_until(lambda: "\x1b[?1049h" in screen(), screen)  # top has taken the terminal
        with grpc.insecure_channel(up.grpc_target) as channel:
            stream = RankServiceStub(channel).WatchRanks(WatchRanksRequest())
            next(stream)
            up.process.send_signal(signal.SIGTERM)
            sent = time.monotonic()
            assert up.process.wait(PATIENCE_SECONDS) == 0
            measured("end of `up` after SIGTERM", time.monotonic() - sent, "s", at_most=20)
        assert not socket.exists()
        assert "Traceback" not in up.log
        assert "Traceback" not in up.output
        assert top.wait(PATIENCE_SECONDS) == 4
        assert "error: " in screen()
        assert "Traceback" not in screen()
