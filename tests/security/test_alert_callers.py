"""The receiver of alerts, as somebody sees it who has no token, or has one and bad manners."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl

import pytest

from tests.security.attacked import DAEMON, PATIENCE_SECONDS, Attacked

PATH = "/api/v1/alerts"


def ask(attacked: Attacked, request: bytes) -> bytes:
    context = ssl.create_default_context(cafile=str(attacked.authority.certificate))
    with (
        socket.create_connection(("127.0.0.1", attacked.alerts_port), PATIENCE_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=DAEMON) as wrapped,
    ):
        wrapped.sendall(request)
        said = b""
        while part := wrapped.recv(65536):
            said += part
    return said


def post(attacked: Attacked, body: bytes, authorization: str, path: str = PATH, length: str | None = None) -> bytes:
    held = str(len(body)) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nAuthorization: {authorization}\r\nContent-Length: {held}\r\n\r\n"
    return ask(attacked, head.encode() + body)


def test_without_the_token_nothing_is_taken_and_nothing_is_told(attacked: Attacked) -> None:
    token = attacked.token.decode()
    lines = attacked.lines
    wrong = (
        "",
        "Bearer",
        f"Basic {token}",
        f"Bearer {token[:-1]}",
        f"Bearer {token}x",
        "Bearer \xff",
        f"Bearer x{token}",
    )
    for authorization in wrong:
        answer = post(attacked, b'{"alerts": []}', authorization)
        assert b" 401 " in answer, authorization
        assert b"WWW-Authenticate: Bearer" in answer
        attacked.check_manners(answer.decode(errors="replace"))
        assert token[:8].encode() not in answer
    assert b" 200 " in post(attacked, b'{"alerts": []}', f"Bearer {token}")
    assert attacked.lines == lines
    assert token not in attacked.log


def test_the_token_is_not_taken_in_plain_text(attacked: Attacked) -> None:
    with socket.create_connection(("127.0.0.1", attacked.alerts_port), PATIENCE_SECONDS) as plain:
        plain.sendall(f"GET {PATH} HTTP/1.1\r\nAuthorization: Bearer {attacked.token.decode()}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionResetError):  # it hangs up, and has not read all
            assert b"HTTP/" not in plain.recv(4096)
    attacked.wait_for_line(f"port {attacked.alerts_port}: refused 127.0.0.1: http request")


@pytest.mark.parametrize("path", [f"{PATH}/../../etc/passwd", "//etc/passwd", f"{PATH}%00", "/metrics", f"{PATH}/"])
def test_other_paths_lead_nowhere(attacked: Attacked, path: str) -> None:
    answer = post(attacked, b"{}", f"Bearer {attacked.token.decode()}", path)
    assert b" 404 " in answer
    attacked.check_manners(answer.decode())


def test_bodies_with_missing_false_or_excessive_length_are_refused(attacked: Attacked) -> None:
    bearer = f"Bearer {attacked.token.decode()}"
    for length, code in (("", b"400"), ("-1", b"400"), ("1e9", b"400"), ("99999999999999", b"413"), ("\u0661", b"400")):
        assert b" " + code + b" " in post(attacked, b"", bearer, length=length), length


def test_names_in_alerts_that_lead_elsewhere_capture_nothing(attacked: Attacked) -> None:
    bearer = f"Bearer {attacked.token.decode()}"
    tricks = ("../../etc/passwd", "a\x00b", "a\n2000-01-01T00:00:00 error forged: x", "\u202eevil", "x" * 1000, "$(id)")
    for number, trick in enumerate(tricks):
        for label in ("run", "run_namespace", "rank", "alertname", "node"):
            labels = {"alertname": "A", "run": "j", "capture": "true", "rank": "0"} | {label: trick}
            alert = {"status": "firing", "labels": labels, "startsAt": f"t{number}", "fingerprint": f"{label}{number}"}
            answer = post(attacked, json.dumps({"alerts": [alert]}).encode(), bearer)
            assert b" 200 " in answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["outcomes"][0]["result"] == "refused"
            attacked.check_manners(answer.decode())
