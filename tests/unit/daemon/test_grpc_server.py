from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rankscope.daemon.loop import Daemon
from rankscope.daemon.server import grpc_server
from rankscope.daemon.server.grpc_server import Service
from rankscope.daemon.server.sockets import ListenError, SocketLock
from rankscope.daemon.windows.broadcast import QUEUED_TICKS, Publisher, Tick
from rankscope.v1 import (
    capture_service_pb2,
    capture_service_pb2_grpc,
    job_service_pb2_grpc,
    rank_service_pb2,
    rank_service_pb2_grpc,
)
from tests.unit.daemon import window_makers as make

READERS = 2


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose sockets are real and whose time stands still: the test closes the windows."""
    clock = make.FakeClock(seconds=-1.0)
    config = make.config(socket=str(tmp_path / "d.sock"), metrics_listen="127.0.0.1:0", watch_readers=READERS)
    daemon = Daemon(config, collectors=make.collectors(make.rank(0), make.rank(1, job="other")), clock=clock)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture
def channel(served: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.addresses.grpc_targets[0]) as channel:
        yield channel


def test_ranks_are_listed_with_their_latest_window_and_by_job(served: Daemon, channel: grpc.Channel) -> None:
    stub = rank_service_pb2_grpc.RankServiceStub(channel)
    assert not stub.ListRanks(rank_service_pb2.ListRanksRequest()).ranks
    served.tick(make.span(0))
    served.tick(make.span(1))
    answer = stub.ListRanks(rank_service_pb2.ListRanksRequest())
    assert answer.node == "node-a"
    assert [(rank.identity.rank, rank.latest.sequence) for rank in answer.ranks] == [(0, 2), (1, 2)]
    (only,) = stub.ListRanks(rank_service_pb2.ListRanksRequest(job="other")).ranks
    assert only.identity.rank == 1


def test_a_call_without_a_request_is_ended(channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "REQUEST_SECONDS", 0.3)
    is_over = threading.Event()

    def never() -> Iterator[bytes]:
        is_over.wait(180)
        yield b""

    with pytest.raises(grpc.RpcError) as ended:
        channel.stream_unary("/rankscope.v1.RankService/ListRanks")(never(), timeout=180)
    is_over.set()
    assert ended.value.code() is grpc.StatusCode.CANCELLED


def test_a_watcher_begins_with_the_latest_windows_and_sees_departures(served: Daemon, channel: grpc.Channel) -> None:
    served.tick(make.span(0))
    stream = rank_service_pb2_grpc.RankServiceStub(channel).WatchRanks(rank_service_pb2.WatchRanksRequest())
    assert [window.sequence for window in next(stream).windows] == [1, 1]
    served._collectors.discovery.ranks = (make.rank(0),)
    served.tick(make.span(1))
    message = next(stream)
    assert [window.sequence for window in message.windows] == [2]
    assert [identity.job for identity in message.departed] == ["other"]
    stream.cancel()


def test_a_watcher_may_ask_for_some_pods_only(served: Daemon, channel: grpc.Channel) -> None:
    served._collectors.discovery.ranks = (replace(make.rank(0), pod="p1"), replace(make.rank(1), pod="p2"))
    served.tick(make.span(0))
    stub = rank_service_pb2_grpc.RankServiceStub(channel)
    some = stub.WatchRanks(rank_service_pb2.WatchRanksRequest(pods=["p2", "p3"]))
    assert [window.identity.pod for window in next(some).windows] == ["p2"]
    none = stub.WatchRanks(rank_service_pb2.WatchRanksRequest(pods=["p3"]))
    assert not next(none).windows
    some.cancel()
    none.cancel()


def test_too_many_watchers_are_refused_but_short_calls_answered(served: Daemon, channel: grpc.Channel) -> None:
    stub = rank_service_pb2_grpc.RankServiceStub(channel)
    served.tick(make.span(0))
    streams = [stub.WatchRanks(rank_service_pb2.WatchRanksRequest()) for _ in range(READERS)]
    for stream in streams:
        next(stream)
    with pytest.raises(grpc.RpcError) as raised:
        next(stub.WatchRanks(rank_service_pb2.WatchRanksRequest()))
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--watch-readers" in raised.value.details()
    assert len(stub.ListRanks(rank_service_pb2.ListRanksRequest()).ranks) == 2
    for stream in streams:
        stream.cancel()


def test_captures_are_refused_with_a_sentence(channel: grpc.Channel) -> None:
    stub = capture_service_pb2_grpc.CaptureServiceStub(channel)
    with pytest.raises(grpc.RpcError) as raised:
        next(stub.StartCapture(capture_service_pb2.StartCaptureRequest(job="x")))
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "captures are off" in raised.value.details()
    with pytest.raises(grpc.RpcError, match="captures are off"):
        stub.ListCaptures(capture_service_pb2.ListCapturesRequest())


@pytest.mark.parametrize("service", ["", "rankscope.v1.RankService", "rankscope.v1.CaptureService"])
def test_health_is_serving(channel: grpc.Channel, service: str) -> None:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_metrics_and_health_are_served_over_http(served: Daemon) -> None:
    served.tick(make.span(0))
    url = served.addresses.metrics_url
    assert url is not None
    assert b"rankscope_rank_info{" in urllib.request.urlopen(url).read()
    assert urllib.request.urlopen(url.replace("/metrics", "/healthz")).status == 200
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url.replace("/metrics", "/etc/passwd"))


def test_a_daemon_that_closes_no_windows_is_not_healthy(served: Daemon) -> None:
    served._clock.sleep(60.0)
    assert served.addresses.metrics_url is not None
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(served.addresses.metrics_url.replace("/metrics", "/healthz"))


def test_a_taken_port_is_named_and_nothing_is_left_behind(served: Daemon, tmp_path: Path) -> None:
    assert served.addresses.metrics_url is not None
    port = served.addresses.metrics_url.split(":")[2].split("/")[0]
    second_socket = tmp_path / "second.sock"
    config = make.config(socket=str(second_socket), metrics_listen=f"127.0.0.1:{port}")
    with pytest.raises(ListenError, match=f"port {port} is in use, perhaps by another rankscope daemon"):
        Daemon(config, collectors=make.collectors(), clock=make.FakeClock()).start()
    assert not second_socket.exists()
    SocketLock(second_socket).release()


def test_a_taken_grpc_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = make.config(grpc_listen=f"127.0.0.1:{port}")
        with pytest.raises(ListenError, match=f"port {port} is in use.*--grpc-listen"):
            Daemon(config, collectors=make.collectors(), clock=make.FakeClock()).start()


def test_only_a_dead_daemons_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "daemon.sock"
    first = SocketLock(path)
    assert (path.parent.stat().st_mode & 0o777) == 0o700
    with pytest.raises(ListenError, match=f"in use by another rankscope daemon .pid {os.getpid()}."):
        SocketLock(path)
    first.release()
    program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1])"
    subprocess.run([sys.executable, "-S", "-c", program, str(path)], check=True)
    assert path.is_socket()
    second = SocketLock(path)
    assert not path.exists()
    second.release()


def test_our_own_folder_is_closed_to_others_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "volume" / "daemon.sock"
    monkeypatch.setattr("rankscope.daemon.server.sockets.default_socket", lambda: str(path))
    path.parent.mkdir()
    path.parent.chmod(0o777)  # as an emptyDir is
    SocketLock(path).release()
    assert (path.parent.stat().st_mode & 0o777) == 0o700
    monkeypatch.setattr(os, "geteuid", lambda: path.parent.stat().st_uid + 1)
    with pytest.raises(ListenError, match="that nobody else can enter"):
        SocketLock(path)


def test_a_plain_file_or_overlong_path_is_refused(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("keep me")
    with pytest.raises(ListenError, match="is not a socket"):
        SocketLock(precious)
    assert precious.read_text() == "keep me"
    with pytest.raises(ListenError, match="at most 107 bytes"):
        SocketLock(tmp_path / ("x" * 120))


def test_a_slow_reader_loses_the_oldest_windows_but_no_departure() -> None:
    publisher = Publisher(max_readers=1)
    reader = publisher.open_reader()
    gone = rank_service_pb2.WatchRanksResponse().departed.add(job="x", rank=3)
    publisher.publish(Tick(make.span(0), {}, (gone,)))
    for index in range(1, QUEUED_TICKS + 3):
        publisher.publish(Tick(make.span(index)))
    assert reader.dropped == publisher.dropped_total == 3
    ticks = [reader.take() for _ in range(QUEUED_TICKS)]
    assert ticks[0] is not None
    assert ticks[0].span == make.span(3)
    assert [identity.rank for tick in ticks if tick for identity in tick.departed] == [3]
    publisher.close()
    assert reader.take() is None


def test_an_embedding_program_can_add_services_to_the_server(tmp_path: Path) -> None:
    jobs = Service(
        "rankscope.v1.JobService",
        lambda server: job_service_pb2_grpc.add_JobServiceServicer_to_server(
            job_service_pb2_grpc.JobServiceServicer(), server
        ),
    )
    config = make.config(socket=str(tmp_path / "d.sock"))
    daemon = Daemon(config, collectors=make.collectors(), clock=make.FakeClock(seconds=-1.0), services=[jobs])
    daemon.start()
    try:
        with grpc.insecure_channel(daemon.addresses.grpc_targets[0]) as channel:
            request = health_pb2.HealthCheckRequest(service=jobs.name)
            assert health_pb2_grpc.HealthStub(channel).Check(request).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        daemon.stop()


def test_a_source_failing_to_close_leaves_no_open_sockets(tmp_path: Path) -> None:
    def fail() -> None:
        raise ChildProcessError("no child processes")

    sources = make.collectors()
    sources.stacks.close = fail
    path = tmp_path / "d.sock"
    daemon = Daemon(make.config(socket=str(path)), collectors=sources, clock=make.FakeClock(seconds=-1.0))
    daemon.start()
    assert path.is_socket()
    daemon.stop()
    assert not path.exists()
    SocketLock(path).release()
