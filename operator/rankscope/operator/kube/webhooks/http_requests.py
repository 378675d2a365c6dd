"""The little of HTTP/1.1 that an API server's webhook calls need: POST with a length."""

from __future__ import annotations

from dataclasses import dataclass

HEADERS_LIMIT = 100


class BadRequestError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Head:
    path: str
    length: int
    keeps_alive: bool


def read_head(raw: bytes, body_limit: int) -> Head:
    """`raw` ends with the empty line. What two readers could understand differently is refused."""
    try:
        first, *lines = raw.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
        method, path, version = first.split(" ")
    except ValueError:
        raise BadRequestError(400, "no HTTP request") from None
    if version not in ("HTTP/1.1", "HTTP/1.0") or not path.startswith("/"):
        raise BadRequestError(400, "no HTTP/1.1 request")
    headers = _headers(lines)
    if method != "POST":
        raise BadRequestError(405, "webhooks are called by POST")
    if "transfer-encoding" in headers or "content-length" not in headers:
        raise BadRequestError(411, "a body has to tell its length")
    text = headers["content-length"]
    if not text.isdigit() or len(text) > 12:
        raise BadRequestError(400, "its length is no number")
    if int(text) > body_limit:
        raise BadRequestError(413, f"a review may have {body_limit} bytes")
    keeps = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return Head(path, int(text), keeps)


def _headers(lines: list[str]) -> dict[str, str]:
    if len(lines) > HEADERS_LIMIT:
        raise BadRequestError(400, "too many headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name == "content-length" and name in headers):
            raise BadRequestError(400, "a header cannot be read")
        headers[name] = value.strip()
    return headers
