"""The console of an operator, as its users and attackers see it: a running server, a cluster in memory."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import pytest

from rankscope.common.tls import Read, files
from rankscope.operator import console_access
from rankscope.operator.access import guard, token_review
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.console import server
from rankscope.operator.console.api import ENDPOINTS, PREFIX
from rankscope.operator.console.endpoints import FORM
from rankscope.operator.console_access import Console, ConsoleSettings
from rankscope.operator.kube.api_client import UnreachableError
from tests.certificates import Authority, Pair
from tests.support.audit_records import Audited
from tests.support.waiting import wait_until
from tests.unit.operator.access.fake_cluster import Cluster, begun
from tools.played_runs import Played

PATIENCE_SECONDS = 120.0
LOOPBACK = ConsoleSettings("127.0.0.1", 0)
MINE, THEIRS, UNKNOWN = "lab/llama", "other/secret-run", "other/no-such-run"
QUERIES = {"/run": "", "/rank": "&rank=0", "/heatmap": "", "/step": ""}
PATHS = [PREFIX + each.path for each in ENDPOINTS]


@pytest.fixture
def played() -> Played:
    made = Played()
    made.tick(run=MINE)
    made.tick(run=THEIRS)
    return made


@contextmanager
def served(
    cluster: Cluster,
    played: Played,
    settings: ConsoleSettings = LOOPBACK,
    shown: Read | None = None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[int]:
    """The port."""
    console = Console(
        settings, played.history, cluster.authentication, CaptureAudit(), cluster.handlers, shown, lambda: elsewhere
    )
    console.start()
    try:
        yield urlsplit(console.url).port or 0
    finally:
        console.stop()


class Answer:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = answer.status, answer.headers, answer.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def runs(self) -> list[str]:
        assert self.status == 200, self.body
        return [run["run"] for run in self.json["runs"]]


def opened(
    port: int, path: str, token: str = "", tls: ssl.SSLContext | None = None, **headers: str
) -> http.client.HTTPConnection:
    made = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
        if tls is None
        else http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_SECONDS, context=tls)
    )
    sent = {name.replace("_", "-"): text for name, text in headers.items()}
    made.request("GET", path, headers=sent | ({"Authorization": f"Bearer {token}"} if token else {}))
    return made


def ask(port: int, path: str, token: str = "", tls: ssl.SSLContext | None = None, **headers: str) -> Answer:
    connection = opened(port, PREFIX + path, token, tls, **headers)
    try:
        return Answer(connection.getresponse())
    finally:
        connection.close()


class Events:
    def __init__(self, port: int, token: str) -> None:
        self._connection = opened(port, f"{PREFIX}/events", token)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200

    def next(self) -> Any:
        """None at the end."""
        while line := self._answer.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        return None

    def close(self) -> None:
        self._connection.close()


# Tokens.


def test_without_an_accepted_token_only_the_page_is_served(
    cluster: Cluster, played: Played, audited: Audited, caplog: pytest.LogCaptureFixture
) -> None:
    with served(cluster, played) as port:
        for path in [*PATHS, f"{PREFIX}/openapi.json", f"{PREFIX}/nothing"]:
            for token in ("", "forged"):
                answer = ask(port, path.removeprefix(PREFIX), token)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert "kubectl create token" in answer.json["error"] and answer.json["next"]
        assert ask(port, "/runs", Authorization="Basic YWRhOmFkYQ==").status == 401
        page = opened(port, "/").getresponse()
        assert page.status == 200 and b"console" in page.read()
    assert {record["result"] for record in audited()} == {"Unauthenticated"}
    assert "forged" not in caplog.text


def test_a_caller_sees_only_the_runs_of_its_namespaces(cluster: Cluster, played: Played, audited: Audited) -> None:
    ada, root = cluster.may("ada", "list"), cluster.may("root", "list", namespace="")
    with served(cluster, played) as port:
        assert (ask(port, "/runs", ada).runs, ask(port, "/runs", root).runs) == ([MINE], [MINE, THEIRS])
        assert not audited()
        for path, more in QUERIES.items():
            hidden, missing = (ask(port, f"{path}?run={run}{more}", ada) for run in (THEIRS, UNKNOWN))
            assert hidden.status == missing.status == 404
            assert hidden.body.replace(THEIRS.encode(), b"") == missing.body.replace(UNKNOWN.encode(), b"")
            assert ask(port, f"{path}?run={MINE}{more}", ada).status == 200
            assert ask(port, f"{path}?run={THEIRS}{more}", root).status == 200
        events = Events(port, ada)
        assert [run["run"] for run in events.next()["runs"]] == [MINE]
        played.tick(run=THEIRS)
        assert events.next()["runs"] == []
        events.close()
    refused = audited()
    assert refused and {(each["user"], each["namespace"], each["result"]) for each in refused} == {
        ("ada", "other", "PermissionDenied")
    }


def test_a_token_that_ends_is_refused_and_ends_the_events(
    cluster: Cluster, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_review, "YES_SECONDS", 0.0)
    monkeypatch.setattr(console_access, "RECHECK_SECONDS", 0.0)
    token = cluster.may("ada", "list")
    with served(cluster, played) as port:
        events = Events(port, token)
        assert [run["run"] for run in events.next()["runs"]] == [MINE]
        played.tick(run=MINE)
        assert [run["run"] for run in events.next()["runs"]] == [MINE]
        cluster.tokens.clear()
        played.tick(run=MINE)
        assert events.next() is None
        assert ask(port, "/runs", token).status == 401
        events.close()


def test_rights_that_are_taken_back_end_in_open_events(
    cluster: Cluster, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_review, "YES_SECONDS", 0.0)
    monkeypatch.setattr(console_access, "RECHECK_SECONDS", 0.0)
    with served(cluster, played) as port:
        events = Events(port, cluster.may("ada", "list"))
        assert events.next()["runs"]
        cluster.rights.clear()
        played.tick(run=MINE)
        assert events.next()["runs"] == []
        events.close()


def test_without_the_api_server_the_console_answers_unavailable(
    cluster: Cluster, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = cluster.may("ada", "list")
    with served(cluster, played) as port:
        cluster.error = UnreachableError("away")
        assert ask(port, "/runs", token).status == 503
        cluster.error = None
        assert ask(port, "/signals", token).status == 200  # now the caller is known
        cluster.error = UnreachableError("away")
        for path in ("/runs", f"/run?run={MINE}"):
            answer = ask(port, path, token)
            assert answer.status == 503 and "API server" in answer.json["error"]


def test_a_tenant_has_a_limited_number_of_requests_under_way(
    cluster: Cluster, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "CALLS_OF_ONE", 1)
    with served(cluster, played) as port:
        ada, bob = cluster.may("ada", "list"), cluster.may("bob", "list")
        events = Events(port, ada)
        events.next()
        assert (ask(port, "/runs", ada).status, ask(port, "/runs", bob).status) == (429, 200)
        events.close()


# Browsers.


def test_other_origins_and_host_names_are_refused_despite_a_token(cluster: Cluster, played: Played) -> None:
    token = cluster.may("ada", "list")
    with served(cluster, played) as port:
        assert ask(port, "/runs", token, Origin="https://evil.example").status == 403
        assert ask(port, "/runs", token, Sec_Fetch_Site="cross-site").status == 403
        assert ask(port, "/runs", token, Host="evil.example").status == 421
        allowed = ask(port, "/runs", token)
        assert allowed.status == 200 and not [name for name in allowed.headers if name.lower().startswith("access-")]


# Downloads and frames.

RECORDING = "/capture/artifact?id=lab/mine&rank=0"


def submit(port: int, path: str, body: str, content_type: str = FORM, **headers: str) -> Answer:
    """As a form of the page."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    sent = {"Origin": f"http://127.0.0.1:{port}", **headers, "Content-Type": content_type}
    connection.request("POST", PREFIX + path, body, {name.replace("_", "-"): text for name, text in sent.items()})
    try:
        return Answer(connection.getresponse())
    finally:
        connection.close()


def recorded(cluster: Cluster) -> str:
    """Ada has a recording in her namespace; her token."""
    token = begun(cluster)
    rank = {
        "rank": 0,
        "node": "n",
        "state": "analysed",
        "bytes": len(cluster.traces.content),
        "uri": "/r/rank0.json.gz",
    }
    cluster.write_status("mine", phase="Succeeded", ranks=[rank])
    return token


def test_a_form_with_the_token_opens_what_a_header_would(
    cluster: Cluster,
    played: Played,
    audited: Audited,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_review, "YES_SECONDS", 0.0)
    ada, bob = recorded(cluster), cluster.may("bob", "list", "get", "get/artifacts", namespace="other")
    with served(cluster, played) as port:
        answer = submit(port, RECORDING, f"token={ada}")
        assert (answer.status, answer.body) == (200, cluster.traces.content)
        assert answer.headers["content-disposition"].startswith("attachment")
        assert [(each["event"], each["user"]) for each in audited()][-1] == ("downloaded", "ada")

        for path in (RECORDING, f"/flame?run={MINE}"):
            assert submit(port, path, f"token={bob}").status in (403, 404)
        cluster.tokens.clear()
        for body in (f"token={ada}", "token=forged", "token=", "", "other=1"):
            answer = submit(port, RECORDING, body)
            assert answer.status == 401 and "kubectl create token" in answer.json["error"] and answer.json["next"]
    assert ada not in caplog.text and bob not in caplog.text


def test_a_form_opens_nothing_for_another_origin_and_changes_nothing(cluster: Cluster, played: Played) -> None:
    token = recorded(cluster)
    with served(cluster, played) as port:
        foreign = ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"})
        assert [submit(port, RECORDING, f"token={token}", **each).status for each in foreign] == [403] * 3
        for path in ("/captures", "/capture/cancel", "/runs", f"/run?run={MINE}"):
            assert submit(port, path, f"token={token}").status == 415
        assert submit(port, RECORDING, json.dumps({"token": token}), "application/json").status == 415


def test_a_form_is_bounded_in_size_and_time(cluster: Cluster, played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    token = recorded(cluster)
    with served(cluster, played) as port:
        for body in (f"token={token}{'x' * server.HEAD_BYTES}", f"token={token}&token={token}", "token=\xe9"):
            assert submit(port, RECORDING, body).status == 400
        monkeypatch.setattr(server, "HEAD_SECONDS", 0.1)
        answer = submit(port, RECORDING, "token=", Content_Length="100")  # the rest never comes
        assert answer.status == 400 and "again" in answer.json["next"]


# Replicas.


def test_a_run_of_another_replica_is_named_and_not_missing(cluster: Cluster, played: Played) -> None:
    with served(cluster, played, elsewhere=dict.fromkeys(("lab/far", "other/far", MINE), "operator-1")) as port:
        token = cluster.may("ada", "list")
        assert ask(port, "/runs", token).json["elsewhere"] == {"lab/far": "operator-1"}
        for path, more in QUERIES.items():
            answer = ask(port, f"{path}?run=lab/far{more}", token)
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert "another replica" in answer.json["error"] and "pod/operator-1" in answer.json["next"]
            assert ask(port, f"{path}?run=other/far{more}", token).status == 404


def test_a_run_taken_over_by_another_replica_is_not_shown(cluster: Cluster) -> None:
    """After a failover: the former leader gets no windows, and what it has is old."""
    held = {MINE, "lab/stays"}
    played = Played(keeps=held.__contains__)
    for run in (MINE, "lab/stays", "lab/never-ours"):
        played.tick(run=run)
    elsewhere: dict[str, str] = {"lab/never-ours": "operator-1"}
    with served(cluster, played, elsewhere=elsewhere) as port:
        token = cluster.may("ada", "list")
        events = Events(port, token)
        assert {run["run"] for run in events.next()["runs"]} == held
        held.remove(MINE)
        elsewhere[MINE] = "operator-1"
        played.history.forget_lost_runs()
        told = events.next()
        assert told["is_complete"] and [run["run"] for run in told["runs"]] == ["lab/stays"]
        assert told["elsewhere"].keys() == {MINE, "lab/never-ours"}
        played.tick(run=MINE)  # the correlator still has its last state
        for path, more in QUERIES.items():
            assert ask(port, f"{path}?run={MINE}{more}", token).status == 503
        del elsewhere[MINE]  # it has ended there: what was known here would be a wrong end
        assert ask(port, f"/run?run={MINE}", token).status == 404
        held.add(MINE)
        played.tick(run=MINE)
        assert ask(port, f"/run?run={MINE}", token).status == 200
        events.close()


# Proxies.

ADA = {"X_Forwarded_User": "ada", "X_Forwarded_Groups": "team"}


def test_proxy_headers_are_trusted_only_with_a_configured_proxy(cluster: Cluster, played: Played) -> None:
    cluster.may("ada", "list")
    with served(cluster, played) as port:
        assert ask(port, "/runs", **ADA).status == 401
        # Nor do they change who shows a token.
        assert ask(port, "/runs", cluster.may("eve", "list", namespace="theirs"), **ADA).runs == []
    with served(cluster, played, replace(LOOPBACK, proxy_on_loopback=True)) as port:
        assert ask(port, "/runs", **ADA).runs == [MINE]
        assert ask(port, "/runs").status == 401


def test_a_proxy_cannot_make_a_caller_a_part_of_kubernetes(
    cluster: Cluster, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    create = cluster.create

    def noted(path: str, body: Any) -> dict[str, Any]:
        asked.append(body["spec"])
        return create(path, body)

    monkeypatch.setattr(cluster, "create", noted)
    with served(cluster, played, replace(LOOPBACK, proxy_on_loopback=True)) as port:
        for user in ("system:admin", "", "a" * 300):
            assert ask(port, "/runs", X_Forwarded_User=user).status == 401
        groups = "team, system:masters,,system:nodes"
        assert ask(port, "/runs", X_Forwarded_User="ada", X_Forwarded_Groups=groups).runs == []
    assert {tuple(spec["groups"]) for spec in asked} == {("team", "system:authenticated")}


def client(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


def test_a_proxy_is_known_by_its_certificate(cluster: Cluster, played: Played, tmp_path: Path) -> None:
    ours, proxies, others = (Authority(tmp_path / name, name) for name in ("ours", "proxies", "others"))
    pair = ours.issue("serving", "localhost")
    settings = replace(LOOPBACK, proxy_name="login-proxy", proxy_authority=proxies.certificate)
    with served(cluster, played, settings, files(pair.certificate, pair.key)) as port:
        token = cluster.may("ada", "list")
        proxy = proxies.issue("proxy", "login-proxy")
        assert ask(port, "/runs", tls=client(ours, proxy), **ADA).runs == [MINE]
        for shown in (None, proxies.issue("app", "some-app")):
            assert ask(port, "/runs", tls=client(ours, shown), **ADA).status == 401
            assert ask(port, "/runs", token, client(ours, shown), X_Forwarded_User="root").runs == [MINE]
        with pytest.raises((ssl.SSLError, ConnectionError)):
            ask(port, "/runs", tls=client(ours, others.issue("forged", "login-proxy")), **ADA)


# TLS.


def test_new_connections_get_the_certificate_of_now_and_its_names(
    cluster: Cluster, played: Played, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("serving", "localhost", ("localhost", "a.example", "*.b.example"))
    settings = replace(LOOPBACK, names=("Console.example",))
    with served(cluster, played, settings, files(pair.certificate, pair.key)) as port:
        token, trust = cluster.may("ada", "list"), client(authority)

        def status(host: str) -> int:
            return ask(port, "/runs", token, trust, Host=host).status

        hosts = ("localhost", "a.example:443", "x.b.example", "console.example", "c.example", "x.y.b.example")
        assert [status(host) for host in hosts] == [200, 200, 200, 200, 421, 421]
        authority.issue("serving", "localhost", ("localhost", "c.example"))
        assert [status(host) for host in ("c.example", "a.example")] == [200, 421]
        pair.certificate.write_bytes(b"broken")  # the one before stays
        assert status("c.example") == 200


def test_connections_without_a_handshake_are_bounded(
    cluster: Cluster, played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SOCKETS", 8)
    authority = Authority(tmp_path)
    pair = authority.issue("serving", "localhost")
    with served(cluster, played, shown=files(pair.certificate, pair.key)) as port:
        silent = [socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) for _ in range(9)]
        assert silent[-1].recv(1) == b""  # closed
        silent[0].settimeout(0.1)
        with pytest.raises(TimeoutError):
            silent[0].recv(1)
        for connection in silent:
            connection.close()
        token = cluster.may("ada", "list")

        def is_served() -> bool:
            with suppress(OSError, http.client.HTTPException):
                return ask(port, "/runs", token, client(authority)).status == 200
            return False

        wait_until(is_served)


def test_tokens_are_not_taken_in_plain_text_where_others_listen(cluster: Cluster, played: Played) -> None:
    with pytest.raises(ValueError, match="no TLS"), served(cluster, played, ConsoleSettings("0.0.0.0", 0)):
        pass
