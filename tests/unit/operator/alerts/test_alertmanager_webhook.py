"""The endpoint over real HTTP: who may speak, what is understood, and what Alertmanager is told."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rankscope.operator.alerts import alertmanager_webhook
from rankscope.operator.alerts.alertmanager_webhook import (
    BODY_BYTES,
    LIMITS,
    PATH,
    AlertReceiver,
    TokenError,
    make_token,
    read_token,
)
from rankscope.operator.alerts.decision import FailedError
from tests.unit.operator.alerts.notifications import entry, notification
from tests.unit.operator.alerts.test_decision import Played

TOKEN = b"0123456789abcdef0123456789abcdef"


class Endpoint:
    def __init__(self, receiver: AlertReceiver, play: Played) -> None:
        self.address = (urlsplit(receiver.url).hostname or "", urlsplit(receiver.url).port or 0)
        self.play = play

    def ask(
        self,
        body: bytes = b"",
        method: str = "POST",
        path: str = PATH,
        authorization: str | None = f"Bearer {TOKEN.decode()}",
        **headers: str,
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        if authorization is not None:
            headers["Authorization"] = authorization
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            is_json = answer.headers["Content-Type"] == "application/json"
            return answer.status, json.loads(content) if is_json else {"error": content.decode()}
        finally:
            connection.close()

    def raw(self, text: bytes) -> bytes:
        """What comes back for these bytes, until the endpoint hangs up."""
        with socket.create_connection(self.address, timeout=30) as connection:
            connection.sendall(text)
            return connection.makefile("rb").read()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    play = Played()
    receiver = AlertReceiver("127.0.0.1", 0, play.desk, TOKEN)
    receiver.start()
    yield Endpoint(receiver, play)
    receiver.stop()


def test_a_firing_alert_starts_a_capture_and_get_reports_it(endpoint: Endpoint) -> None:
    status, told = endpoint.ask(notification(entry(rank="1")))
    assert status == 200
    [outcome] = told["outcomes"]
    assert (outcome["result"], outcome["job"], outcome["text"]) == ("started", "j", "capture c-1")
    assert 1 in outcome["ranks"]
    assert endpoint.ask(notification(entry(rank="1")))[1]["outcomes"][0]["result"] == "duplicate"
    status, recent = endpoint.ask(method="GET")
    assert (status, [each["result"] for each in recent["outcomes"]]) == (200, ["duplicate", "started"])


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        f"Basic {TOKEN.decode()}",
        f"Bearer {TOKEN.decode()[:-1]}",
        f"Bearer {TOKEN.decode()}x",
        "Bearer \xe9" * 3,
    ],
)
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_without_the_token_nothing_is_done_nor_told(endpoint: Endpoint, authorization: str | None, method: str) -> None:
    status, told = endpoint.ask(notification(entry(rank="1")), method, authorization=authorization)
    assert status == 401
    assert "outcomes" not in told
    assert endpoint.play.started == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"alerts": 3}',
        b'{"alerts": [3]}',
        b'{"alerts": [{"status": "firing", "labels": []}]}',
        b"[" * 200_000,
        json.dumps({"alerts": [{}] * 2000}).encode(),
        notification({**entry(), "labels": {"alertname": 3}}),
        notification({**entry(), "labels": {"alertname": "x" * 100_000}}),
        notification({**entry(), "status": "perhaps"}),
        notification(entry(name="half a pair: \ud800", rank="1")),
        notification({**entry(), "startsAt": None}),
        notification({**entry(), "fingerprint": ""}),
    ],
    ids=range(15),
)
def test_what_is_no_notification_is_a_400_that_says_where(endpoint: Endpoint, body: bytes) -> None:
    status, told = endpoint.ask(body)
    assert status == 400
    assert told["error"]
    assert endpoint.play.started == []


def test_a_body_of_excessive_or_unknown_length_is_not_read(endpoint: Endpoint) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nAuthorization: Bearer {TOKEN.decode()}\r\n".encode()
    assert b" 413 " in endpoint.raw(head + f"Content-Length: {BODY_BYTES + 1}\r\n\r\n".encode())
    assert b" 411 " in endpoint.raw(head + b"Transfer-Encoding: chunked\r\n\r\n")
    assert b" 400 " in endpoint.raw(head + b"Content-Length: -5\r\n\r\n")


def test_elsewhere_there_is_nothing(endpoint: Endpoint) -> None:
    assert endpoint.ask(notification(entry(rank="1")), path="/metrics")[0] == 404


def test_a_refusal_is_final_and_an_unreachable_daemon_is_retried(endpoint: Endpoint) -> None:
    """Alertmanager drops a notification after a 4xx and repeats it after a 5xx."""
    status, told = endpoint.ask(notification(entry(rank="99")))
    assert (status, told["outcomes"][0]["result"]) == (200, "refused")
    endpoint.play.trouble = FailedError("away")
    assert endpoint.ask(notification(entry(rank="1")))[0] == 503
    endpoint.play.trouble = None
    assert endpoint.ask(notification(entry(rank="1")))[0] == 200
    assert len(endpoint.play.started) == 1


def test_the_same_alert_from_several_alertmanagers_makes_one_capture(endpoint: Endpoint) -> None:
    endpoint.play.start_seconds = 0.3
    answers: list[tuple[int, Any]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(endpoint.ask(notification(entry(rank="1"))))) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told["outcomes"][0]["result"] for _, told in answers) == ["duplicate"] * 4 + ["started"]


def test_callers_that_say_nothing_keep_nobody_out(endpoint: Endpoint) -> None:
    silent = [socket.create_connection(endpoint.address) for _ in range(3 * LIMITS.connections)]
    assert endpoint.ask(notification(entry(rank="1")))[0] == 200
    for connection in silent:
        connection.close()


def test_a_plain_text_token_is_refused_on_a_reachable_address() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "127.example.com"):
        with pytest.raises(ValueError, match="others can reach this address and there is no TLS"):
            AlertReceiver(host, 0, Played().desk, TOKEN)


def test_there_is_no_receiver_without_a_token() -> None:
    with pytest.raises(ValueError, match="token"):
        AlertReceiver("127.0.0.1", 0, Played().desk, b"")


def test_a_new_token_is_owner_only_and_overwrites_no_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = make_token(path)
    assert (path.stat().st_mode & 0o777, len(token)) == (0o600, 64)
    assert read_token(path) == token
    with pytest.raises(FileExistsError):
        make_token(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_token_others_can_access_is_refused_with_a_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    make_token(path)
    path.chmod(mode)
    with pytest.raises(TokenError, match=r"next: chmod 600 /"):
        read_token(path)


@pytest.mark.parametrize(
    ("mode", "group", "is_refused"),
    [(0o440, 2000, False), (0o440, 2001, True), (0o444, 2000, True), (0o460, 2000, True)],
)
def test_a_mounted_root_secret_is_readable_through_our_group(
    monkeypatch: pytest.MonkeyPatch, mode: int, group: int, is_refused: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65532)
    monkeypatch.setattr(os, "getgroups", lambda: [2000])
    status = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, 0, group, 65, 0, 0, 0))
    with pytest.raises(TokenError, match="chmod 600") if is_refused else nullcontext():
        alertmanager_webhook._check_owner(Path("/secret/token"), status)


@pytest.mark.parametrize("content", [b"", b"\n", b"short", b"two words of sixteen", b"x" * 5000, b"\xe9" * 40])
def test_a_token_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(TokenError, match="one word of 16 to 4096"):
        read_token(path)


def test_a_token_file_missing_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenError, match="No such file"):
        read_token(tmp_path / "absent")
    with pytest.raises(TokenError, match="not a regular file"):
        read_token(tmp_path)
