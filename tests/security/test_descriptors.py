"""Connections that do nothing but take file descriptors."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path

import grpc

from rankscope.v1.rank_service_pb2 import WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.integration.daemon_process import MAIN, PATIENCE_SECONDS, serving

DESCRIPTORS = 256
QUIET = ("--gpu", "false", "--stack-rate-hertz", "0")
PORTS = re.compile(r"metrics http://127\.0\.0\.1:(\d+)/metrics, .*grpc 127\.0\.0\.1:(\d+)")


def limited(soft: int, hard: int) -> tuple[str, ...]:
    return ("prlimit", f"--nofile={soft}:{hard}", *MAIN)


def test_silent_connections_leave_the_daemon_the_descriptors_that_it_needs(tmp_path: Path) -> None:
    flags = ("--grpc-listen", "127.0.0.1:0", *QUIET)
    with (
        serving(tmp_path / "d", "daemon", *flags, launcher=limited(DESCRIPTORS, DESCRIPTORS)) as daemon,
        grpc.insecure_channel(daemon.grpc_target) as channel,
        contextlib.ExitStack() as opened,
    ):
        stream = RankServiceStub(channel).WatchRanks(WatchRanksRequest(), timeout=PATIENCE_SECONDS)
        next(stream)
        ports = PORTS.search(daemon.log)
        assert ports is not None
        for port in map(int, ports.groups()):
            for _ in range(DESCRIPTORS):
                with contextlib.suppress(TimeoutError, ConnectionError):
                    opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1.0))
        for _ in range(6):
            next(stream)
        assert "Too many open files" not in daemon.log


def test_the_daemon_raises_its_limit_as_far_as_it_may(tmp_path: Path) -> None:
    with serving(tmp_path / "d", "daemon", *QUIET, launcher=limited(DESCRIPTORS, 4096)) as daemon:
        limits = Path(f"/proc/{daemon.process.pid}/limits").read_text()
        assert limits.split("Max open files")[1].split()[:2] == ["4096", "4096"]
