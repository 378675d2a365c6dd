"""Queries to a server that speaks Prometheus' HTTP API: Prometheus, Thanos, Mimir.

A query has a deadline and a size limit, so that no server can hold the thread or fill the memory."""

from __future__ import annotations

import re
from enum import Enum
from http.client import HTTPResponse
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import msgspec

from rankscope.common.http_client import body_of, requested, server_url
from rankscope.common.text import one_line

MAX_TOKEN_BYTES: Final = 8192
MAX_REASON_CHARACTERS: Final = 300
MAX_FAILURE_CHARACTERS: Final = 160
NO_SERIES: Final = "it has no series of Rankscope in this time"
_TOKEN: Final = re.compile(rb"[\x21-\x7e]{1,8192}")


class QueryError(Exception):
    """The server answers with something else than series. `status` is that of HTTP."""

    def __init__(self, text: str, status: int = 200) -> None:
        super().__init__(text)
        self.status = status


class Failure(Enum):
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    NO_API = "no API"  # the address is not one of Prometheus' API
    EMPTY = "empty"


class Series(msgspec.Struct):
    """`value` is that of an instant query, `values` those of a range."""

    metric: dict[str, str]
    values: list[tuple[float, str]] = []
    value: tuple[float, str] | None = None


class _Data(msgspec.Struct):
    result: list[Series]


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


_ANSWERS: Final = msgspec.json.Decoder(_Answer)


class PrometheusApi:
    """Thread-safe. Queries raise QueryError, or one of REQUEST_FAILURES. `tenant` is for Mimir and other servers of
    several tenants; the token is read for each query, since it may be replaced in place."""

    def __init__(
        self,
        url: str,
        request_seconds: float,
        max_answer_bytes: int,
        *,
        tenant: str = "",
        token_file: Path | None = None,
    ) -> None:
        """Raises ValueError for an address that is none."""
        self._paths = {name: server_url(f"{url.rstrip('/')}/api/v1/{name}") for name in ("query", "query_range")}
        self._request_seconds = request_seconds
        self._max_answer_bytes = max_answer_bytes
        self._tenant = tenant
        self._token_file = token_file

    def query(self, promql: str, at_unix_seconds: float) -> list[Series]:
        return self._ask("query", {"query": promql, "time": f"{at_unix_seconds:.3f}"})

    def query_range(self, promql: str, begin: float, end: float, step_seconds: float) -> list[Series]:
        form = {"query": promql, "start": f"{begin:.3f}", "end": f"{end:.3f}", "step": f"{step_seconds:g}"}
        return self._ask("query_range", form)

    def _ask(self, name: str, form: dict[str, str]) -> list[Series]:
        form["timeout"] = f"{max(1, round(self._request_seconds))}s"
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept-Encoding": "identity"}
        if self._tenant:
            headers["X-Scope-OrgID"] = self._tenant
        if self._token_file is not None:
            headers["Authorization"] = f"Bearer {read_token(self._token_file)}"
        with requested(
            "POST",
            self._paths[name],
            headers,
            urlencode(form).encode(),
            seconds=self._request_seconds,
            answer_bytes=self._max_answer_bytes,
        ) as answer:
            return _read(answer)


def read_token(path: Path) -> str:
    """Raises OSError, or ValueError for what is no token."""
    with path.open("rb") as file:
        token = file.read(MAX_TOKEN_BYTES + 1).strip()
    if _TOKEN.fullmatch(token) is None:
        raise ValueError("it holds no token; write one line of printable characters without spaces")
    return token.decode("ascii")


def may_answer_less(error: Exception) -> bool:
    """Whether a query that failed may be answered for half of its time. A server that refuses a query, or is gone, is
    not asked again."""
    return not isinstance(error, ConnectionError) and getattr(error, "status", 503) not in (400, 401, 403)


def failure_of(error: Exception) -> Failure:
    """Of a server that answers no query: its QueryError, or one of REQUEST_FAILURES."""
    if not isinstance(error, QueryError):
        return Failure.UNREACHABLE
    return Failure.REFUSED if error.status in (401, 403) else Failure.NO_API


def reason(error: Exception) -> str:
    return one_line(str(error) or type(error).__name__, MAX_FAILURE_CHARACTERS)


def _read(answer: HTTPResponse) -> list[Series]:
    try:
        read = _ANSWERS.decode(body_of(answer))
    except msgspec.DecodeError as error:  # or its subclass ValidationError
        text = f"it answers {answer.status} with what is no result of a query"
        raise QueryError(text, answer.status) from error
    if answer.status != 200 or read.data is None:
        text = f"it answers {answer.status}: {one_line(read.error, MAX_REASON_CHARACTERS)}"
        raise QueryError(text, answer.status)
    return read.data.result


def quoted(text: str) -> str:
    """A string of PromQL; `text` has no control character."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
