"""The daemon as a user runs it: a real process, real sockets, real signals, a real job beside it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rankscope.common.run_names import run_labels
from rankscope.v1.rank_service_pb2 import WatchRanksRequest, WatchRanksResponse
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from rankscope.v1.window_pb2 import RankWindow
from tests.integration.small_job import small_ddp_job
from tests.support.measuring import Measured
from tests.support.waiting import wait_until

PATIENCE_SECONDS = 180
WINDOW_NANOS = 500_000_000
ANNOUNCED = re.compile(r"rankscope daemon: metrics (http://127\.0\.0\.1:\d+/metrics), grpc (unix:\S+)")


def command(folder: Path, *flags: str) -> list[str]:
    settings = ("--metrics-listen", "127.0.0.1:0", "--socket", str(folder / "run" / "daemon.sock"))
    folders = ("--profile-dir", str(folder / "profiles"))
    return [sys.executable, "-m", "rankscope.cli.main", "daemon", *settings, *folders, *flags]


def announcement(process: subprocess.Popen[str]) -> re.Match[str]:
    """May come after other lines: the first scan has found somebody else's ranks."""
    assert process.stderr is not None
    return next(found for line in process.stderr if (found := ANNOUNCED.match(line)))


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    metrics_url: str
    grpc_target: str

    def scrape(self) -> str:
        return str(urllib.request.urlopen(self.metrics_url, timeout=PATIENCE_SECONDS).read().decode())


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    flags = ("--window-seconds", "0.5", "--metrics-detail", "full")
    process = subprocess.Popen(command(tmp_path, *flags), stderr=subprocess.PIPE, text=True)
    try:
        announced = announcement(process)
        yield Running(process, announced[1], announced[2])
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def training_job() -> Iterator[str]:
    """Two ranks of a real DDP job with the probe; yields its run id, which is part of the job's name."""
    run_id = f"daemon-test-{os.getpid()}"
    with small_ddp_job(run_id, RANKSCOPE_PROBE="1"):
        yield run_id


def first_message(
    stream: Iterator[WatchRanksResponse], wanted: Callable[[WatchRanksResponse], bool]
) -> WatchRanksResponse:
    return next(message for message in stream if wanted(message))


def test_the_daemon_serves_metrics_health_reflection_and_ends_on_sigterm(running: Running, measured: Measured) -> None:
    assert "rankscope_daemon_ranks " in running.scrape()
    assert urllib.request.urlopen(running.metrics_url.replace("/metrics", "/healthz")).status == 200
    with grpc.insecure_channel(running.grpc_target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "rankscope.v1.RankService", "rankscope.v1.CaptureService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        (listing,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([question]))
        names = {service.name for service in listing.list_services_response.service}
        assert {"rankscope.v1.RankService", "rankscope.v1.CaptureService", "grpc.health.v1.Health"} <= names
        # A watcher must not hold the shutdown up.
        stream = RankServiceStub(channel).WatchRanks(WatchRanksRequest())
        next(stream)
        running.process.send_signal(signal.SIGTERM)
        sent = time.monotonic()
        assert running.process.wait(PATIENCE_SECONDS) == 0
        # Kubernetes kills it after 30 s.
        measured("end of a daemon after SIGTERM", time.monotonic() - sent, "s", at_most=20)
    assert not Path(running.grpc_target.removeprefix("unix:")).exists()


def test_a_second_daemon_fails_clearly_and_the_first_one_lives(running: Running, tmp_path: Path) -> None:
    same_socket = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert same_socket.returncode == 1
    assert re.fullmatch(
        rf"error: \S+/daemon.sock is in use by another rankscope daemon \(pid {running.process.pid}\); stop it .*\n",
        same_socket.stderr,
    )
    port = running.metrics_url.split(":")[2].split("/")[0]
    same_port = subprocess.run(
        command(tmp_path / "second", "--metrics-listen", f"127.0.0.1:{port}"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert same_port.returncode == 1
    assert same_port.stderr == (
        f"error: port {port} is in use, perhaps by another rankscope daemon; "
        "stop it or pass --metrics-listen 127.0.0.1:0\n"
    )
    with grpc.insecure_channel(running.grpc_target) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert "rankscope_build_info" in running.scrape()


def test_a_killed_daemon_leaves_nothing_that_stops_the_next_one(running: Running, tmp_path: Path) -> None:
    running.process.kill()
    running.process.wait(PATIENCE_SECONDS)
    path = Path(running.grpc_target.removeprefix("unix:"))
    assert path.is_socket()
    successor = subprocess.Popen(command(tmp_path), stderr=subprocess.PIPE, text=True)
    try:
        assert announcement(successor)
    finally:
        successor.terminate()
        successor.communicate(timeout=PATIENCE_SECONDS)
    assert not path.exists()


def test_a_real_job_is_seen_sampled_and_seen_ending(running: Running, training_job: str) -> None:
    with grpc.insecure_channel(running.grpc_target) as channel:
        stream = RankServiceStub(channel).WatchRanks(WatchRanksRequest(), timeout=2 * PATIENCE_SECONDS)

        def windows(message: WatchRanksResponse) -> list[RankWindow]:
            return [window for window in message.windows if training_job in window.identity.job]

        def ranks_with_waiting(message: WatchRanksResponse) -> set[int]:
            return {window.identity.rank for window in windows(message) if window.HasField("wait_seconds")}

        both = windows(first_message(stream, lambda message: ranks_with_waiting(message) == {0, 1}))
        for window in both:
            assert window.end_unix_nanos % WINDOW_NANOS == 0
            assert window.process.HasField("resident_bytes")
            assert window.self_seconds.mean < window.step_seconds.mean
            # The training script sleeps 20 ms in each forward.
            assert window.figures["forward_seconds"] > 0.02
        job = both[0].identity.job

        def forward_sampled(window: RankWindow) -> bool:
            # A first window may have only a sample or two, of other phases.
            return window.HasField("stacks") and window.stacks.phase_shares["forward"] > 0

        with_stacks = first_message(stream, lambda m: any(map(forward_sampled, windows(m))))
        window = next(filter(forward_sampled, windows(with_stacks)))
        assert window.stacks.samples > 0
        # Not every window has stacks, and a scrape may come a window late.
        shown = re.compile(rf'^rankscope_rank_phase_ratio{{.*run="{re.escape(run_labels(job)["run"])}"', re.MULTILINE)
        wait_until(lambda: shown.search(running.scrape()), running.scrape)
        os.kill(window.identity.pid, signal.SIGKILL)
        ended = first_message(stream, lambda m: any(gone.pid == window.identity.pid for gone in m.departed))
        assert all(w.identity.pid != window.identity.pid for w in ended.windows)
        stream.cancel()
    assert running.process.poll() is None
