"""The fleet's certificates on a real API server, with the operator's roles and a real daemon that reads the files."""

from __future__ import annotations

import base64
import logging
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from rankscope.common.tls import TlsMaterial
from rankscope.operator.alerts.alertmanager_webhook import make_token
from rankscope.operator.certificates.authority import Lifetimes, authorities
from rankscope.operator.certificates.roles import DAEMON_NAME_OPTION, OPERATOR_SECRET, daemon_credentials
from rankscope.operator.certificates.rotation import OURS, CertificateRotation, fleet_rotation
from rankscope.operator.kube.api_client import Api
from rankscope.operator.runs.daemon_streams import DaemonStreams
from rankscope.v1.rank_service_pb2 import ListRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.free_ports import free_port
from tests.kube.accounts import OPERATOR, VIEWER, granted, wait_until_allowed
from tests.kube.api_server import ApiError, ApiServer, User
from tests.kube.fleet import DAEMON_LABELS, MAIN, OPERATOR_NAMESPACE, delete_pod, make_pod
from tests.kube.kubelet import MountedSecret
from tests.kube.operator_process import OperatorProcess
from tests.listening_sockets import listening
from tests.support.waiting import wait_until

SECRETS = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets"
NAMES = (
    "rankscope-authority",
    "rankscope-daemon-tls",
    "rankscope-operator-tls",
    "rankscope-metrics-tls",
    "rankscope-api-tls",
)
HOUR_SECONDS = 3600.0


@pytest.fixture
def secrets(server: ApiServer) -> Iterator[None]:
    """Empty, as the chart makes them."""
    for name in NAMES:
        server.admin.create(SECRETS, {"metadata": {"name": name, "labels": OURS}, "type": "Opaque"})
    yield
    for name in NAMES:
        server.admin.delete(f"{SECRETS}/{name}")


class RealDaemon:
    def __init__(self, user: User, folder: Path) -> None:
        self.mounted = MountedSecret(user, f"{SECRETS}/rankscope-daemon-tls", folder / "tls")
        self.mounted.sync()
        self.port = free_port()
        self._log = folder / "daemon.log"
        files = {"certificate": "tls.crt", "key": "tls.key", "client-authority": "ca.crt"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(*MAIN, "daemon", "--node", "n", "--grpc-listen", f"127.0.0.1:{self.port}"),
                    *("--socket", "none", "--metrics-listen", "none", "--captures", "false", "--window-seconds", "0.5"),
                    *(word for name, file in files.items() for word in (f"--tls-{name}", str(folder / "tls" / file))),
                ],
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: "grpc 127" in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def answer(self, pair: TlsMaterial | None) -> grpc.StatusCode:
        """To a connection of its own."""
        options = [DAEMON_NAME_OPTION, ("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(f"127.0.0.1:{self.port}", daemon_credentials(lambda: pair), options) as channel:
            try:
                RankServiceStub(channel).ListRanks(ListRanksRequest(), timeout=60)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK


@pytest.fixture
def start_daemon(server: ApiServer, tmp_path: Path) -> Iterator[Callable[[], RealDaemon]]:
    started: list[RealDaemon] = []

    def start() -> RealDaemon:
        started.append(RealDaemon(server.admin, tmp_path))
        return started[-1]

    yield start
    for daemon in started:
        daemon.process.terminate()
        daemon.process.wait(180)


def test_certificates_and_authority_rotate_without_breaking_a_stream(
    server: ApiServer,
    operator_user: User,
    secrets: None,
    start_daemon: Callable[[], RealDaemon],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = Api(operator_user.kubeconfig(tmp_path / "operator.kubeconfig"))
    short = Lifetimes(authority_seconds=24 * HOUR_SECONDS, serving_seconds=HOUR_SECONDS)
    settings = replace(fleet_rotation(OPERATOR_NAMESPACE), lifetimes=short, settle_seconds=0.0)
    first = CertificateRotation(api, settings, lambda: True)
    first.round()
    daemon = start_daemon()

    # The next leader lets them live longer: for it all of them are due.
    long = Lifetimes(authority_seconds=720 * HOUR_SECONDS, serving_seconds=240 * HOUR_SECONDS)
    leader = CertificateRotation(api, replace(settings, lifetimes=long), lambda: True)
    follower = CertificateRotation(api, settings, lambda: False)
    shown = follower.client(OPERATOR_SECRET)
    follower.round()
    heard: list[object] = []
    streams = DaemonStreams(heard.extend, shown)
    streams.start()

    def goes_on() -> None:
        count = len(heard)
        wait_until(lambda: len(heard) > count + 1)
        assert daemon.answer(shown()) is grpc.StatusCode.OK

    try:
        with caplog.at_level(logging.INFO, DaemonStreams.__module__):
            streams.follow({"n": f"127.0.0.1:{daemon.port}"})
            goes_on()
            old = shown()
            leader.round()  # a new authority is told
            follower.round()
            assert shown() is not None
            assert old is not None
            assert shown().certificate == old.certificate
            assert len(authorities(shown().authorities)) == 2
            goes_on()  # the kubelet has not come by yet
            daemon.mounted.sync()
            goes_on()
            leader.round()  # and what it signed is shown
            follower.round()
            assert shown().certificate != old.certificate
            goes_on()  # the daemon still shows what the old one signed
            daemon.mounted.sync()
            goes_on()
            stale = replace(old, authorities=shown().authorities)
            assert daemon.answer(stale) is grpc.StatusCode.OK  # of an authority that is still trusted
            # After a leak: nothing of the old authorities holds from now on.
            server.admin.merge(f"{SECRETS}/rankscope-authority", {"data": None})
            leader.round()
            follower.round()
            daemon.mounted.sync()
            goes_on()
            stale = replace(old, authorities=shown().authorities)
            assert daemon.answer(stale) is grpc.StatusCode.UNAVAILABLE
        assert not [record.message for record in caplog.records if record.message.startswith("daemon of n")]
        assert daemon.log.count("certificates were read again") == 3
    finally:
        streams.stop()

    # A certificate of a daemon, stolen from a node, is no operator's and no other daemon's client.
    stolen = [server.admin.get(f"{SECRETS}/rankscope-{name}-tls")["data"] for name in ("daemon", "metrics", "api")]
    for data in stolen:
        pair = TlsMaterial(*(_decoded(data[key]) for key in ("tls.crt", "tls.key", "ca.crt")))
        assert daemon.answer(pair) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED)


def _decoded(text: str) -> bytes:
    return base64.b64decode(text)


def test_the_operators_role_reaches_these_secrets_and_no_other(
    server: ApiServer, operator_user: User, daemon_user: User, secrets: None
) -> None:
    server.admin.create(SECRETS, {"metadata": {"name": "of-somebody-else"}})
    try:
        for user, method, path, body in (
            (operator_user, "GET", f"{SECRETS}/of-somebody-else", None),
            (operator_user, "GET", SECRETS, None),
            (operator_user, "DELETE", f"{SECRETS}/rankscope-authority", None),
            (operator_user, "GET", "/api/v1/namespaces/default/secrets/rankscope-authority", None),
            (daemon_user, "GET", f"{SECRETS}/rankscope-authority", None),
            (daemon_user, "GET", f"{SECRETS}/rankscope-daemon-tls", None),
        ):
            with pytest.raises(ApiError) as raised:
                user.request(method, path, body)
            assert raised.value.status == 403, (user.name, method, path)
        assert operator_user.get(f"{SECRETS}/rankscope-authority")["metadata"]["name"] == "rankscope-authority"
    finally:
        server.admin.delete(f"{SECRETS}/of-somebody-else")


def test_an_operator_makes_certificates_reaches_its_daemon_and_guards_metrics(
    server: ApiServer,
    operator_user: User,
    secrets: None,
    start_daemon: Callable[[], RealDaemon],
    tmp_path: Path,
) -> None:
    make_token(tmp_path / "token")
    flags = ("--fleet-certificates", "--metrics-auth", "--listen", "0.0.0.0:0", "--api-listen", "0.0.0.0:0")
    flags += ("--alerts-listen", "0.0.0.0:0", "--alerts-token", str(tmp_path / "token"))
    operator = OperatorProcess(operator_user, tmp_path, flags=flags)
    scraper = _scraper(server)
    with granted(server, "api"):
        try:
            operator.start()
            wait_until(lambda: server.admin.get(f"{SECRETS}/rankscope-daemon-tls").get("data"))
            daemon = start_daemon()
            ports = [{"name": "grpc", "containerPort": daemon.port}]
            make_pod(server, OPERATOR_NAMESPACE, "d", "n", DAEMON_LABELS, ports=ports, address="127.0.0.1")
            authority = _decoded(server.admin.get(f"{SECRETS}/rankscope-api-tls")["data"]["ca.crt"]).decode()

            def scraped() -> str:
                status, text = _get(operator.url, "/metrics", authority, scraper.token)
                assert status == 200
                return text

            wait_until(lambda: "rankscope_operator_daemons_connected 1.0" in scraped())
            assert "rankscope_operator_fleet_certificate_expiry_timestamp_seconds" in scraped()
            assert _get(operator.url, "/readyz", authority)[0] == 200
            for _ in range(2):
                assert _get(operator.url, "/metrics", authority)[0] == 401
                assert _get(operator.url, "/metrics", authority, "stolen")[0] == 401
                assert _get(operator.url, "/metrics", authority, server.user(VIEWER).token)[0] == 403
            assert operator.log.count("refused /metrics") == 2
            assert "stolen" not in operator.log
            wait_until(lambda: len(listening(operator.process.pid)) == 3)
            for _, port in listening(operator.process.pid):
                assert ssl.get_server_certificate(("127.0.0.1", port), timeout=20)
            with pytest.raises(OSError):
                urllib.request.urlopen(operator.url.replace("https", "http") + "/metrics", timeout=20)
        finally:
            operator.stop()
            delete_pod(server, OPERATOR_NAMESPACE, "d")


def _scraper(server: ApiServer) -> User:
    """Prometheus: the operator's own account will do, once it may get the path."""
    rule = {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}
    role: dict[str, Any] = {"metadata": {"name": "scraper"}, "rules": [rule]}
    root = "/apis/rbac.authorization.k8s.io/v1"
    server.admin.create(f"{root}/clusterroles", role)
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "scraper"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": OPERATOR}
    body = {"metadata": {"name": "scraper"}, "roleRef": reference, "subjects": [subject]}
    server.admin.create(f"{root}/clusterrolebindings", body)
    wait_until_allowed(server, OPERATOR, [rule])
    return server.user(OPERATOR)


def _get(url: str, path: str, authority: str, token: str = "") -> tuple[int, str]:
    context = ssl.create_default_context(cadata=authority)
    context.check_hostname = False  # we come by an address, not by the Service
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
