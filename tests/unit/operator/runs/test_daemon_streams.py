from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from rankscope.common.tls import Read, files
from rankscope.daemon.loop import Daemon
from rankscope.operator.captures.daemon_calls import DaemonAwayError, DaemonCalls, DaemonRefusedError
from rankscope.operator.correlation.daemon_windows import DaemonMessage
from rankscope.operator.runs import daemon_streams
from rankscope.operator.runs.daemon_streams import DaemonStreams
from rankscope.v1.rank_service_pb2 import WatchRanksRequest, WatchRanksResponse
from rankscope.v1.rank_service_pb2_grpc import RankServiceServicer, add_RankServiceServicer_to_server
from tests.certificates import Authority, Pair
from tests.support.waiting import wait_until
from tests.unit.daemon import window_makers as make


class Ears:
    def __init__(self) -> None:
        self.messages: list[DaemonMessage] = []

    def __call__(self, messages: Sequence[DaemonMessage]) -> None:
        self.messages.extend(messages)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_streams, "FIRST_BACKOFF_SECONDS", 0.05)
    monkeypatch.setattr(daemon_streams, "LAST_BACKOFF_SECONDS", 0.2)


@pytest.fixture
def streams() -> Iterator[Callable[..., DaemonStreams]]:
    made: list[DaemonStreams] = []

    def make_streams(*arguments: Any) -> DaemonStreams:
        made.append(DaemonStreams(*arguments))
        made[-1].start()
        return made[-1]

    yield make_streams
    for one in made:
        one.stop()


class Servicer(RankServiceServicer):
    """Says one thing, then nothing forever."""

    def __init__(self) -> None:
        self.calls = 0
        self.asked: list[str] | None = None
        self.over = threading.Event()

    def WatchRanks(self, request: WatchRanksRequest, context: grpc.ServicerContext) -> Iterator[WatchRanksResponse]:
        self.calls += 1
        self.asked = list(request.pods)
        yield WatchRanksResponse(node="x")
        while context.is_active() and not self.over.wait(0.05):
            pass


@pytest.fixture
def silent() -> Iterator[tuple[Servicer, str]]:
    servicer = Servicer()
    server = grpc.server(ThreadPoolExecutor(8))
    add_RankServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    servicer.over.set()
    server.stop(0).wait()


def test_a_daemon_that_went_silent_without_closing_is_asked_again(
    silent: tuple[Servicer, str], streams: Callable[..., DaemonStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_streams, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr(daemon_streams, "SWEEP_SECONDS", 0.1)
    servicer, address = silent
    heard = streams(Ears())
    heard.follow({"node-a": address})
    wait_until(lambda: servicer.calls >= 3)
    heard.follow({})
    wait_until(lambda: not heard.following and not heard.connected)
    assert not heard._received_at


def test_an_unacceptable_message_does_not_affect_the_others() -> None:
    heard: list[str] = []

    def accept(messages: Sequence[DaemonMessage]) -> None:
        if any(message.node == "liar" for message in messages):
            raise IndexError("whatever it was")
        heard.extend(message.node for message in messages)

    streams = DaemonStreams(accept)
    streams._gathered = [DaemonMessage(node, b"") for node in ("a", "liar", "b")]
    streams._hand_on()
    assert heard == ["a", "b"]
    assert streams._gathered == []


class Talker(RankServiceServicer):
    """Says the same thing again and again, by default half as often as it may."""

    def __init__(self, pause_seconds: float = 0.1) -> None:
        self.calls = 0
        self.pause_seconds = pause_seconds

    def WatchRanks(self, request: WatchRanksRequest, context: grpc.ServicerContext) -> Iterator[WatchRanksResponse]:
        self.calls += 1
        while context.is_active():
            yield WatchRanksResponse(node="x")
            time.sleep(self.pause_seconds)


def test_messages_are_batched_and_garbage_or_floods_end_their_stream(
    streams: Callable[..., DaemonStreams], caplog: pytest.LogCaptureFixture
) -> None:
    talker, server = Talker(), grpc.server(ThreadPoolExecutor(4))
    add_RankServiceServicer_to_server(talker, server)
    flood, flooding = Talker(pause_seconds=0.0), grpc.server(ThreadPoolExecutor(4))
    add_RankServiceServicer_to_server(flood, flooding)
    garbage = grpc.method_handlers_generic_handler(
        "rankscope.v1.RankService",
        {"WatchRanks": grpc.unary_stream_rpc_method_handler(lambda request, context: iter([b"\xff\xff"] * 3))},
    )
    liar = grpc.server(ThreadPoolExecutor(4), handlers=[garbage])
    batches: list[Sequence[DaemonMessage]] = []
    addresses = {
        "node-a": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}",
        "node-b": f"127.0.0.1:{liar.add_insecure_port('127.0.0.1:0')}",
        "node-c": f"127.0.0.1:{flooding.add_insecure_port('127.0.0.1:0')}",
    }
    for one in (server, liar, flooding):
        one.start()
    heard = streams(batches.append)
    heard.follow(addresses)
    wait_until(lambda: caplog.text.count("daemon of node-b: it sent what is no message") > 1 and len(batches) > 20)
    wait_until(lambda: caplog.text.count("daemon of node-c: it sends more than 20 messages a second") > 1)
    assert max(map(len, batches)) > 1
    assert {message.node for batch in batches for message in batch} == {"node-a", "node-c"}
    assert "node-a" in heard.connected and "node-b" not in heard.connected
    assert talker.calls == 1 and flood.calls > 1
    heard.follow({})
    for one in (server, liar, flooding):
        one.stop(0).wait()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def daemon(tmp_path: Path, authority: Authority) -> Iterator[Daemon]:
    own = authority.issue("daemon", "rankscope-daemon")
    config = make.config(
        grpc_listen="127.0.0.1:0",
        capture_dir=str(tmp_path / "captures"),
        profile_dir=str(tmp_path / "profiles"),
        tls_certificate=str(own.certificate),
        tls_key=str(own.key),
        tls_client_authority=str(authority.certificate),
    )
    made = Daemon(config, collectors=make.collectors(make.rank(0)), clock=make.FakeClock(seconds=-1.0))
    made.start()
    made.tick(make.span(0))
    yield made
    made.stop()


def tls(pair: Pair, authority: Authority) -> Read:
    return files(pair.certificate, pair.key, authority.certificate)


def test_a_daemon_is_heard_over_tls_across_certificate_changes(
    daemon: Daemon, authority: Authority, streams: Callable[..., DaemonStreams], tmp_path: Path
) -> None:
    ears = Ears()
    wrong = authority.issue("files", "somebody")
    heard = streams(ears, tls(wrong, authority))
    heard.follow({"node-a": daemon.addresses.grpc_targets[0]})
    wait_until(lambda: heard.following == 1)
    with pytest.raises(DaemonRefusedError, match="not an operator's"):
        DaemonCalls(tls(wrong, authority)).get(daemon.addresses.grpc_targets[0], "x")
    assert not ears.messages
    right = authority.issue("operator", "rankscope-operator")
    shutil.copy(right.key, wrong.key)
    shutil.copy(right.certificate, wrong.certificate)
    wait_until(lambda: bool(ears.messages))
    assert DaemonCalls(tls(wrong, authority)).get(daemon.addresses.grpc_targets[0], "x") is None
    message = ears.messages[0]
    assert (message.node, len(message.windows), len(message.ranks)) == ("node-a", 1, 1)


def test_a_server_in_a_daemons_place_is_not_followed(
    daemon: Daemon, authority: Authority, streams: Callable[..., DaemonStreams], tmp_path: Path
) -> None:
    """Another operator's certificate, and one of another authority: neither is a daemon's."""
    impostors = [
        authority.issue("impostor", "rankscope-operator"),
        Authority(tmp_path / "other").issue("x", "rankscope-daemon"),
    ]
    operator = tls(authority.issue("operator", "rankscope-operator"), authority)
    ears = Ears()
    heard = streams(ears, operator)
    for impostor in impostors:
        shutil.copy(impostor.certificate, daemon.config.tls_certificate)
        shutil.copy(impostor.key, daemon.config.tls_key)
        heard.follow({"node-a": daemon.addresses.grpc_targets[0]})
        with pytest.raises(DaemonAwayError):
            DaemonCalls(operator).get(daemon.addresses.grpc_targets[0], "x")
        heard.follow({})
        wait_until(lambda: not heard.following)
    assert not ears.messages


def test_a_replica_follows_only_nodes_and_pods_of_its_runs(
    silent: tuple[Servicer, str], streams: Callable[..., DaemonStreams], monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = silent
    heard = streams(Ears())
    for pods, asked in (({"node-a": frozenset({"p2", "p1"})}, ["p1", "p2"]), ({"node-a": frozenset({"p1"})}, ["p1"])):
        heard.follow({"node-a": address, "node-b": address}, pods)
        wait_until(lambda asked=asked: servicer.asked == asked)  # type: ignore[misc]
        assert heard.following == 1
    monkeypatch.setattr(daemon_streams, "MAX_PODS", 1)
    heard.follow({"node-a": address}, {"node-a": frozenset({"p1", "p2"})})
    wait_until(lambda: servicer.asked == [])
    heard.follow({"node-a": address}, {})
    wait_until(lambda: heard.following == 0)
