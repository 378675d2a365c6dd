"""Captures from end to end: `rankscope up`, real jobs in namespaces of their own, and the command line."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.steps import find_steps
from tests.integration.capture_jobs import (
    CAPTURE_SECONDS,
    RANKS,
    CaptureJob,
    capture,
    capture_command,
    capture_job,
    job_name,
)
from tests.integration.daemon_process import MAIN, Serving, serving
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="entering another network namespace takes CAP_SYS_ADMIN: run as root"),
]
# Whatever else runs on this machine.
RUN = f"captured-{os.getpid()}"
SKEW_MILLIS, SKEW_TRIES = 50.0, 5
QUOTA_BYTES = 32 << 20


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Not under /tmp, which the jobs see another one of."""
    with tempfile.TemporaryDirectory(prefix="rankscope-", dir="/var/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[Serving]:
    with serving(folder / "up", "up") as started:
        yield started


@pytest.fixture(scope="module")
def job(folder: Path) -> Iterator[CaptureJob]:
    with capture_job(folder / "job", RUN, slow_rank=2, hurried=True) as started:
        yield started


@pytest.fixture(scope="module")
def name(up: Serving, job: CaptureJob) -> str:
    found = job_name(up, RUN)
    # Ranks that libkineto has not called for would be captured by the probe.
    up.wait_until(lambda: (up.value("rankscope_capture_clients") or 0) >= RANKS)
    return found


def steps_in(path: str) -> int:
    return len(find_steps(read_trace(Path(path).read_bytes())))


def told(report: dict[str, Any], serving: Serving) -> str:
    return json.dumps(report)[:6000] + serving.log[-3000:]


def test_all_ranks_record_exactly_the_requested_steps_simultaneously(
    up: Serving, job: CaptureJob, name: str, tmp_path: Path
) -> None:
    status, report = capture(up, "--run", name, "--ranks", "all", "--steps", "3", "--output", str(tmp_path))
    assert status == 0, told(report, up)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2, 3]
    done = {(rank["backend"], rank["state"], rank["steps"]) for rank in report["ranks"]}
    assert done == {("kineto", "analysed", 3)}, told(report, up)
    assert [steps_in(rank["file"]) for rank in report["ranks"]] == [3, 3, 3, 3], told(report, up)
    assert report["summary"]["join"]["collectives_matched"] >= 3, told(report, up)
    for rank in report["ranks"]:
        notes = json.loads(gzip.decompress(Path(rank["file"]).read_bytes()))
        assert notes["distributedInfo"]["rank"] == notes["rankscope"]["rank"] == rank["rank"]
        assert notes["rankscope"]["job"] == name
        assert rank["step_times"]["before_seconds"] > 0, told(report, up)
        assert job.files_left(rank["pid"]) == []
    assert job.process.poll() is None


def test_a_timed_capture_lasts_as_asked_and_ranks_start_together(up: Serving, name: str) -> None:
    skews: list[float] = []
    # That is what an idle machine does every time. On one that is not, a rank may not get a CPU in time.
    while not skews or min(skews) >= SKEW_MILLIS:
        assert len(skews) < SKEW_TRIES, f"ranks began {skews} ms apart\n{up.log[-3000:]}"
        status, report = capture(up, "--run", name, "--ranks", "0,3", "--seconds", "1.5")
        assert status == 0, told(report, up)
        assert [rank["rank"] for rank in report["ranks"]] == [0, 3]
        for summary in report["summary"]["ranks"]:
            assert 0 < summary["span_seconds"] < 3.0, told(report, up)
        skews.append(report["start_skew_ms"])


def test_the_straggler_is_captured_with_a_healthy_rank_beside_it(up: Serving, name: str) -> None:
    wait_until(lambda: "rank 2 is slow" in up.output + up.log, lambda: up.output + up.log)
    status, report = capture(up, "--run", name, "--ranks", "straggler+peer")
    assert status == 0, told(report, up)
    ranks = [rank["rank"] for rank in report["ranks"]]
    assert 2 in ranks and len(ranks) == 2, told(report, up)
    # The daemon chose the length, and the pair is compared.
    assert {rank["steps"] for rank in report["ranks"]} <= set(range(3, 41)), told(report, up)
    assert "rank 2 is slow" in report["summary"]["verdict"], told(report, up)
    assert report["summary"]["judgement"].startswith("the recording "), told(report, up)
    assert "rank 2 works" in report["summary"]["judgement"], told(report, up)


def test_a_cancelled_capture_stops_and_leaves_the_job_alone(up: Serving, job: CaptureJob, name: str) -> None:
    asking = subprocess.Popen(
        capture_command(up, "--run", name, "--ranks", "3", "--seconds", "10"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    wait_until(lambda: _state(up, name) in ("armed", "running"), lambda: up.log)
    capture_id = _captures(up, name)[0]["id"]
    subprocess.run([*MAIN, "captures", "cancel", capture_id, "--connect", up.grpc_target], check=True)
    output, errors = asking.communicate(timeout=CAPTURE_SECONDS)
    assert asking.returncode == 1, errors
    assert json.loads(output)["ranks"][0]["state"] == "cancelled", output
    assert job.process.poll() is None


def test_a_capture_waits_for_the_users_profiler_then_reports_it(up: Serving, job: CaptureJob, name: str) -> None:
    (job.folder / "OWN_PROFILER").touch()
    try:
        wait_until((job.folder / "PROFILING").exists, lambda: up.log)
        status, report = capture(up, "--run", name, "--ranks", "0,1", "--steps", "2", "--patience", "15")
    finally:
        (job.folder / "OWN_PROFILER").unlink()
    states = {rank["rank"]: (rank["state"], rank["error"]) for rank in report["ranks"]}
    assert status == 1, told(report, up)
    assert states[0][0] == "failed" and "profiler of the user's own" in states[0][1], told(report, up)
    assert states[1][0] == "analysed", told(report, up)
    assert job.process.poll() is None


def test_concurrent_captures_of_two_jobs_report_a_killed_rank(up: Serving, name: str, folder: Path) -> None:
    with capture_job(folder / "other", f"beside-{os.getpid()}") as other:
        theirs = job_name(up, f"beside-{os.getpid()}")
        asking = subprocess.Popen(
            capture_command(up, "--run", theirs, "--ranks", "all", "--seconds", "2"), stdout=subprocess.PIPE, text=True
        )
        status, report = capture(up, "--run", name, "--ranks", "0,1", "--steps", "2")
        output, _ = asking.communicate(timeout=CAPTURE_SECONDS)
        assert (status, asking.returncode) == (0, 0), told(report, up) + output
        pids = {rank["rank"]: rank["pid"] for rank in json.loads(output)["ranks"]}
        doomed = subprocess.Popen(
            capture_command(up, "--run", theirs, "--ranks", "3", "--seconds", "40"), stdout=subprocess.PIPE, text=True
        )
        wait_until(lambda: _state(up, theirs) in ("armed", "running"), lambda: up.log)
        os.kill(pids[3], signal.SIGKILL)
        output, _ = doomed.communicate(timeout=CAPTURE_SECONDS)
        (rank,) = json.loads(output)["ranks"]
        assert doomed.returncode == 1
        assert rank["state"] == "failed" and "ended" in rank["error"], output
        assert other.process.pid


def test_the_probe_records_where_another_daemon_owns_libkineto(
    up: Serving, name: str, folder: Path, tmp_path: Path
) -> None:
    captures = folder / "second" / "captures"
    old = captures / f"c-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(time.time() - 60))}-abcdef"
    old.mkdir(parents=True, mode=0o700)
    (old / "rank0.json.gz").write_bytes(bytes(QUOTA_BYTES - 4096))
    with serving(folder / "second", "daemon", "--capture-quota-bytes", str(QUOTA_BYTES)) as second:
        second.wait_for_words("another profiling daemon")
        schedule = ("--steps", "2", "--wait", "3", "--repeat", "2")
        status, report = capture(second, "--run", name, "--ranks", "1,3", *schedule, "--output", str(tmp_path))
        assert status == 0, told(report, second)
        assert not old.exists(), "what is older makes room when the quota is reached"
        assert sum(path.stat().st_size for path in captures.rglob("*")) < QUOTA_BYTES
    assert {(rank["backend"], rank["steps"]) for rank in report["ranks"]} == {("probe", 4)}, told(report, second)
    assert any("another profiling daemon" in note for note in report["ranks"][0]["notes"]), told(report, second)
    for rank in report["ranks"]:
        files = [rank["file"], *rank["more_files"]]
        assert [steps_in(file) for file in files] == [2, 2], told(report, second)


def test_a_restarted_daemon_reports_and_clears_an_interrupted_capture(
    up: Serving, job: CaptureJob, name: str, folder: Path
) -> None:
    flags = ("--run", name, "--ranks", "1", "--seconds", "6")
    asking = subprocess.Popen(capture_command(up, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: _state(up, name) == "running", lambda: up.log)
    pid = _captures(up, name)[0]["ranks"][0]["pid"]
    up.process.kill()
    up.process.wait()
    with serving(folder / "up", "up") as again:
        # The command waits for the daemon to come back, and then tells what became of the capture.
        output, errors = asking.communicate(timeout=CAPTURE_SECONDS)
        assert asking.returncode == 1, errors
        (lost,) = json.loads(output)["ranks"]
        assert lost["state"] == "failed" and "daemon restarted" in lost["error"], lost
        assert job_name(again, RUN) == name
        # libkineto takes no other work before it has written what the lost capture was to have.
        status, report = capture(again, "--run", name, "--ranks", "1", "--steps", "2")
        assert status == 0, told(report, again)
        wait_until(lambda: job.files_left(pid) == [], lambda: job.files_left(pid))
        # The last test: the job has borne them all. It ends while there is a daemon, since without one that takes 10 s.
        assert job.stop() == 0, job.log


def _captures(serving: Serving, name: str) -> list[dict[str, Any]]:
    """The latest first."""
    command = [*MAIN, "captures", "ls", "--connect", serving.grpc_target, "--run", name, "--json"]
    listed = subprocess.run(command, capture_output=True, text=True)
    captures: list[dict[str, Any]] = json.loads(listed.stdout)["captures"]
    return captures


def _state(serving: Serving, name: str) -> str:
    captures = _captures(serving, name)
    return str(captures[0]["state"]) if captures else ""
