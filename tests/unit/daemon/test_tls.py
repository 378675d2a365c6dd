from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import grpc
import pytest

from rankscope.daemon.config import ConfigError, resolve
from rankscope.daemon.doctor_checks import Level, certificates_are_good
from rankscope.daemon.loop import Daemon
from rankscope.daemon.server import grpc_server
from rankscope.daemon.server.certificates import CertificateError, names, validity
from rankscope.daemon.server.grpc_server import NOT_AN_OPERATOR
from rankscope.daemon.server.sockets import ListenError
from rankscope.v1.rank_service_pb2 import ListRanksRequest, WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.certificates import Authority, Pair
from tests.unit.daemon import window_makers as make

CALL_SECONDS = 180.0
OPERATOR = "rankscope-operator"
DAEMON = "rankscope-daemon"


@dataclass(frozen=True)
class Served:
    daemon: Daemon
    authority: Authority
    operator: Pair

    @property
    def port(self) -> int:
        return int(self.daemon.addresses.grpc_targets[1].rpartition(":")[2])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    authority = Authority(tmp_path / "ca")
    own = authority.issue("daemon", DAEMON)
    config = make.config(
        socket=str(tmp_path / "d.sock"),
        grpc_listen="127.0.0.1:0",
        tls_certificate=str(own.certificate),
        tls_key=str(own.key),
        tls_client_authority=str(authority.certificate),
    )
    daemon = Daemon(config, collectors=make.collectors(make.rank(0)), clock=make.FakeClock(seconds=-1.0))
    daemon.start()
    daemon.tick(make.span(0))
    yield Served(daemon, authority, authority.issue("operator", OPERATOR))
    daemon.stop()


@contextlib.contextmanager
def connected(served: Served, pair: Pair | None, authority: Path | None = None) -> Iterator[grpc.Channel]:
    root = (authority or served.authority.certificate).read_bytes()
    own = (None, None) if pair is None else (pair.key.read_bytes(), pair.certificate.read_bytes())
    options = [("grpc.ssl_target_name_override", DAEMON), ("grpc.use_local_subchannel_pool", 1)]
    target = f"127.0.0.1:{served.port}"
    with grpc.secure_channel(target, grpc.ssl_channel_credentials(root, *own), options) as channel:
        yield channel


@contextlib.contextmanager
def stub(served: Served, pair: Pair | None, authority: Path | None = None) -> Iterator[RankServiceStub]:
    with connected(served, pair, authority) as channel:
        yield RankServiceStub(channel)


def refusal(stub: RankServiceStub) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        stub.ListRanks(ListRanksRequest(), timeout=CALL_SECONDS)
    return raised.value


def test_an_operator_is_answered_and_so_is_the_unix_socket(served: Served) -> None:
    with stub(served, served.operator) as operator:
        assert len(operator.ListRanks(ListRanksRequest(), timeout=CALL_SECONDS).ranks) == 1
        assert next(operator.WatchRanks(WatchRanksRequest(), timeout=CALL_SECONDS)).node == "node-a"
    with grpc.insecure_channel(served.daemon.addresses.grpc_targets[0]) as local:
        assert RankServiceStub(local).ListRanks(ListRanksRequest(), timeout=CALL_SECONDS).ranks


def test_missing_expired_or_foreign_certificates_get_no_connection(served: Served, tmp_path: Path) -> None:
    expired = served.authority.issue("expired", OPERATOR, lasts=timedelta(days=-1))
    foreign = Authority(tmp_path / "other").issue("operator", OPERATOR)
    for pair in (None, expired, foreign):
        with stub(served, pair) as caller:
            assert refusal(caller).code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("common_name", "names"),
    [
        (DAEMON, (DAEMON,)),
        (OPERATOR, (DAEMON,)),  # the common name counts only where nothing else is said
        ("rankscope-operator.example.com", ("rankscope-operator.example.com",)),
        (OPERATOR.upper(), ()),
        ("\N{CYRILLIC SMALL LETTER ER}ankscope-operator", ()),
    ],
)
def test_another_role_is_denied_and_logged_once(
    served: Served, caplog: pytest.LogCaptureFixture, common_name: str, names: tuple[str, ...]
) -> None:
    with caplog.at_level(logging.WARNING), stub(served, served.authority.issue("x", common_name, names)) as caller:
        for _ in range(3):
            error = refusal(caller)
            assert (error.code(), error.details()) == (grpc.StatusCode.PERMISSION_DENIED, NOT_AN_OPERATOR)
        with pytest.raises(grpc.RpcError) as raised:
            next(caller.WatchRanks(WatchRanksRequest(), timeout=CALL_SECONDS))
        assert raised.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert len([record for record in caplog.records if "not of rankscope-operator" in record.message]) == 1
    assert served.daemon.publisher.readers == 0


def test_a_common_name_is_enough_without_other_names(served: Served) -> None:
    with stub(served, served.authority.issue("plain", OPERATOR, names=())) as caller:
        assert caller.ListRanks(ListRanksRequest(), timeout=CALL_SECONDS).ranks


def test_plain_text_on_the_tls_port_gets_nothing(served: Served) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        assert refusal(RankServiceStub(channel)).code() == grpc.StatusCode.UNAVAILABLE
    with socket.create_connection(("127.0.0.1", served.port), CALL_SECONDS) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"rankscope" not in plain.recv(4096)


def test_methods_that_do_not_exist_are_not_told_to_strangers(served: Served) -> None:
    for pair, code in (
        (served.authority.issue("x", DAEMON), grpc.StatusCode.PERMISSION_DENIED),
        (served.operator, grpc.StatusCode.UNIMPLEMENTED),
    ):
        with connected(served, pair) as channel, pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary("/no/Such")(b"", timeout=CALL_SECONDS)
        assert raised.value.code() == code


def certificate_shown(served: Served) -> bytes:
    """What a new connection gets to see."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(served.operator.certificate, served.operator.key)
    with socket.create_connection(("127.0.0.1", served.port), CALL_SECONDS) as plain, context.wrap_socket(plain) as tls:
        shown = tls.getpeercert(binary_form=True)
        assert shown is not None
        return shown


def test_new_certificates_apply_to_new_connections_only(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = certificate_shown(served)
    with stub(served, served.operator) as old:
        stream = old.WatchRanks(WatchRanksRequest(), timeout=CALL_SECONDS)
        next(stream)
        # Another authority altogether, as after a leak: the old operator's certificate is good for nothing now.
        authority = Authority(tmp_path / "new")
        fresh = authority.issue("daemon", DAEMON)
        files = served.daemon.config
        shutil.copy(fresh.certificate, files.tls_certificate)
        with caplog.at_level(logging.WARNING):  # half of the change is no change
            assert certificate_shown(served) == before
        assert any("the old ones stay" in record.message for record in caplog.records)
        shutil.copy(fresh.key, files.tls_key)
        shutil.copy(authority.certificate, files.tls_client_authority)
        assert certificate_shown(served) != before
        with stub(served, authority.issue("operator", OPERATOR), authority.certificate) as new:
            assert new.ListRanks(ListRanksRequest(), timeout=CALL_SECONDS).ranks
        with stub(served, served.operator, authority.certificate) as stale:
            assert refusal(stale).code() == grpc.StatusCode.UNAVAILABLE
        served.daemon.tick(make.span(1))
        assert [window.sequence for window in next(stream).windows] == [2]
        stream.cancel()


def test_oversized_messages_are_refused_and_others_are_served_meanwhile(served: Served) -> None:
    limit = dict(grpc_server.OPTIONS)["grpc.max_receive_message_length"]
    with stub(served, served.operator) as operator:
        with pytest.raises(grpc.RpcError) as raised:
            operator.ListRanks(ListRanksRequest(job="x" * (limit + 1)), timeout=CALL_SECONDS)
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert operator.ListRanks(ListRanksRequest(), timeout=CALL_SECONDS).ranks


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {"grpc.server_handshake_timeout_ms": 1000, "grpc.max_allowed_incoming_connections": 100}
    monkeypatch.setattr(grpc_server, "OPTIONS", tuple({**dict(grpc_server.OPTIONS), **quick}.items()))


def test_a_silent_connection_is_closed_and_delays_nobody(hasty: None, served: Served) -> None:
    silent = [socket.create_connection(("127.0.0.1", served.port), CALL_SECONDS) for _ in range(90)]
    try:
        for one in silent[::2]:
            with contextlib.suppress(ConnectionError):  # closed by now, on a machine that stood still
                one.sendall(b"\x16\x03\x01")  # the beginning of a handshake
        # One whose own handshake takes too long on such a machine comes back. One after the other would take 90 s.
        with stub(served, served.operator) as operator:
            assert operator.ListRanks(ListRanksRequest(), timeout=60.0, wait_for_ready=True).ranks
        for one in silent:
            one.settimeout(CALL_SECONDS)
            with contextlib.suppress(ConnectionResetError):
                while one.recv(4096):
                    pass
    finally:
        for one in silent:
            one.close()


def test_more_connections_than_a_daemon_needs_are_closed_at_once(hasty: None, served: Served) -> None:
    many = [socket.create_connection(("127.0.0.1", served.port), CALL_SECONDS) for _ in range(150)]
    try:
        many[-1].settimeout(CALL_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert many[-1].recv(1) == b""
    finally:
        for one in many:
            one.close()


def test_a_routable_address_needs_all_three_tls_files(tmp_path: Path) -> None:
    files = {"tls_certificate": "/a", "tls_key": "/b", "tls_client_authority": "/c"}
    assert resolve({"grpc_listen": "0.0.0.0:9465", **files}, {}).config.grpc_listen
    with pytest.raises(ConfigError, match="belong together"):
        resolve({**files, "tls_key": "none"}, {})


def test_a_daemon_does_not_start_with_files_it_cannot_use(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    own, other = authority.issue("daemon", DAEMON), authority.issue("other", DAEMON)
    good = {
        "tls_certificate": str(own.certificate),
        "tls_key": str(own.key),
        "tls_client_authority": str(authority.certificate),
    }
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\xff\x00nothing")
    for wrong, complaint in (
        ({"tls_key": str(tmp_path / "missing")}, "missing cannot be read"),
        ({"tls_key": str(other.key)}, "not a usable pair"),
        ({"tls_client_authority": str(garbage)}, "garbage is not PEM"),
    ):
        config = make.config(grpc_listen="127.0.0.1:0", **{**good, **wrong})
        with pytest.raises(ListenError, match=complaint):
            Daemon(config, collectors=make.collectors(), clock=make.FakeClock(seconds=-1.0)).start()


def test_doctor_reports_missing_wrong_and_expiring_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")

    def levels(pair: Pair) -> list[tuple[Level, str]]:
        config = make.config(
            tls_certificate=str(pair.certificate),
            tls_key=str(pair.key),
            tls_client_authority=str(authority.certificate),
        )
        return [(finding.level, finding.text) for finding in certificates_are_good(config)]

    good = authority.issue("good", DAEMON)
    assert [level for level, _ in levels(good)] == [Level.OK, Level.OK]
    assert "expires in 2.0 days" in levels(authority.issue("soon", DAEMON, lasts=timedelta(days=2)))[0][1]
    assert levels(authority.issue("late", DAEMON, lasts=timedelta(days=-1)))[0][0] is Level.PROBLEM
    assert levels(Pair(good.certificate, authority.issue("other", DAEMON).key))[0][0] is Level.PROBLEM
    assert "cannot be read" in levels(Pair(good.certificate, tmp_path / "missing"))[0][1]
    good.key.chmod(0o644)
    assert levels(good)[-1] == (Level.WARNING, f"{good.key} can be read by everybody")
    assert not list(certificates_are_good(make.config()))


def test_a_certificates_expiry_is_read_in_both_time_formats(tmp_path: Path) -> None:
    for days in (1, 400, 10_000, 40_000):  # times beyond 2049 are written in another way
        pair = Authority(tmp_path).issue("x", DAEMON, lasts=timedelta(days=days))
        end = validity(pair.certificate.read_bytes()).end
        assert abs(end - datetime.now(timezone.utc) - timedelta(days=days)) < timedelta(minutes=5)
    for damaged in (b"", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"):
        with pytest.raises(CertificateError):
            validity(damaged)


def test_names_are_read_to_the_last_byte(tmp_path: Path) -> None:
    issue = Authority(tmp_path).issue
    for common_name, given, found in (
        (OPERATOR, (DAEMON, "b.example.com"), {DAEMON, "b.example.com"}),
        (OPERATOR, (), {OPERATOR}),
        ("x", (f"{OPERATOR}\x00.example.com",), {f"{OPERATOR}\x00.example.com"}),
        (f"{OPERATOR}\x00", (), {f"{OPERATOR}\x00"}),
    ):
        assert names(issue("x", common_name, given).certificate.read_bytes()) == found
