"""Pyroscope's API for profiles: `push.v1.PusherService/Push`, as JSON over HTTP/1.1. It is the API that its
documentation declares stable, and open-source servers, Grafana Cloud and Grafana Alloy all have it. The older `/ingest`
takes labels in a text without quotes, in which the name of a run could pass for further labels.

A request has a deadline and a size limit, so that no server can hold the thread or fill the memory."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import math
import re
import ssl
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.phases import phase_of
from rankscope.analysis.profiles.pprof import pprof
from rankscope.analysis.profiles.profile import Profile, SampledStack
from rankscope.common.http_client import REQUEST_FAILURES, requested
from rankscope.common.run_names import run_labels
from rankscope.common.text import one_line, printable
from rankscope.daemon.profiles.database import RankInterval
from rankscope.daemon.profiles.segment import MAX_FRAMES_PER_STACK, MAX_SAMPLES, NAME_CHARACTERS, clean_name

PATH: Final = "/push.v1.PusherService/Push"
# With the units of our profiles this is the type wall:wall:nanoseconds:wall:nanoseconds, which Grafana knows.
PROFILE_NAME: Final = "wall"
ANSWER_BYTES: Final = 256 << 10  # with its headers
REASON_BYTES: Final = 4096
REASON_CHARACTERS: Final = 300
MAX_RETRY_AFTER_SECONDS: Final = 600.0
FILE_BYTES: Final = 1 << 20
TOKEN: Final = re.compile(r"[\x20-\x7e]{1,8192}")

CONNECTION: Final = "connection"
THROTTLED: Final = "throttled"
SERVER: Final = "server"
REFUSED: Final = "refused"
FILES: Final = "files"
FAILURES: Final = (CONNECTION, THROTTLED, SERVER, REFUSED, FILES)


class PushError(Exception):
    """Why a request failed, with the next step. A refused one would be refused again."""

    def __init__(self, reason: str, text: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(text)
        self.reason = reason  # of FAILURES
        self.retry_after_seconds = retry_after_seconds


def push_request(interval: RankInterval, node: str) -> bytes:
    """The body for one rank and interval: a series for each phase. Empty if there are no samples.

    Threads are added up: each label is a series on the server, and the process chooses the names of its threads. For
    the same reason the samples have no labels of their own."""
    stacks: defaultdict[str, list[SampledStack]] = defaultdict(list)
    for recording in interval.recordings:
        for stack, samples in recording.stacks.items():
            count = min(samples, MAX_SAMPLES)
            cleaned = tuple(map(_clean, stack[:MAX_FRAMES_PER_STACK]))
            stacks[phase_of(stack)].append(SampledStack(cleaned, count, count * recording.period_nanos))
    span = interval.span
    labels = {
        "__name__": PROFILE_NAME,
        "service_name": interval.run or "rankscope",
        **run_labels(interval.run),
        "rank": str(interval.rank),
        "node": printable(node, NAME_CHARACTERS),
    }
    series = []
    for phase, sampled in stacks.items():
        content = pprof(
            Profile.of(sampled),
            span.start_unix_nanos,
            span.end_unix_nanos - span.start_unix_nanos,
            with_labels=False,
        )
        pairs = [{"name": name, "value": value} for name, value in {**labels, "phase": phase}.items() if value]
        raw = base64.b64encode(content).decode("ascii")
        series.append({"labels": pairs, "samples": [{"ID": str(uuid.uuid4()), "rawProfile": raw}]})
    return json.dumps({"series": series}, separators=(",", ":")).encode() if series else b""


class Pyroscope:
    """A server, for one thread. Files are read for each request: tokens and authorities are replaced in place."""

    def __init__(
        self,
        url: str,
        tenant: str = "",
        token_file: Path | None = None,
        authority: Path | None = None,
        request_seconds: float = 10.0,
    ) -> None:
        self.url = url
        self._parts = urlsplit(url.rstrip("/") + PATH)
        self._tenant = tenant
        self._token_file = token_file
        self._authority = authority
        self._request_seconds = request_seconds
        self._context: ssl.SSLContext | None = None
        self._context_authority: bytes | None = None

    def push(self, body: bytes) -> None:
        """Raises PushError."""
        headers = {"Content-Type": "application/json", "User-Agent": "rankscope"}
        if self._tenant:
            headers["X-Scope-OrgID"] = self._tenant
        secrets = self._secrets()
        if secrets:
            headers["Authorization"] = secrets[0]
        context = self._tls() if self._parts.scheme == "https" else None
        try:
            with requested(
                "POST",
                self._parts,
                headers,
                body,
                seconds=self._request_seconds,
                answer_bytes=ANSWER_BYTES,
                context=context,
            ) as answer:
                if 200 <= answer.status < 300:
                    return
                status, reason, head = answer.status, _reason(answer), answer.headers
        except REQUEST_FAILURES as error:
            cause = _shown(str(error) or type(error).__name__, secrets)
            step = "see that it runs, that profile_push_url is right and that this node can reach it"
            raise PushError(CONNECTION, f"{self.url} does not take profiles: {cause}; {step}") from error
        place = _shown(head.get("Location", "nowhere"), secrets)
        raise _failure(self.url, status, _shown(reason, secrets), place, _retry_after_seconds(head))

    def _secrets(self) -> tuple[str, ...]:
        """The header first, then what else must not be shown. A bearer token cannot have a colon."""
        if self._token_file is None:
            return ()
        token = _text(self._content(self._token_file, "profile_push_token_file")).strip()
        if TOKEN.fullmatch(token) is None:
            text = f"{self._token_file} has no token; write the bearer token or USER:PASSWORD into it, in one line"
            raise PushError(FILES, text)
        if ":" not in token:
            return f"Bearer {token}", token
        encoded = base64.b64encode(token.encode("ascii")).decode("ascii")
        return f"Basic {encoded}", encoded, token, token.partition(":")[2] or token

    def _tls(self) -> ssl.SSLContext:
        """Made once, and again when the authority changes: it takes some milliseconds."""
        content = b"" if self._authority is None else self._content(self._authority, "profile_push_authority")
        if self._context is None or content != self._context_authority:
            try:
                self._context = ssl.create_default_context(cadata=content.decode("ascii") if self._authority else None)
            except (ssl.SSLError, ValueError) as error:
                text = f"{self._authority} has no certificates in PEM: {one_line(str(error), 200)}"
                raise PushError(FILES, f"{text}; set another file as profile_push_authority") from error
            self._context_authority = content
        return self._context

    def _content(self, path: Path, setting: str) -> bytes:
        try:
            with path.open("rb") as file:
                return file.read(FILE_BYTES)
        except OSError as error:
            text = f"{path} cannot be read: {error.strerror}; set another file as {setting}, or make it readable"
            raise PushError(FILES, text) from error


def _reason(answer: http.client.HTTPResponse) -> str:
    """As much of it as comes: the status counts, even if the text does not end."""
    content = bytearray()
    with contextlib.suppress(OSError, http.client.HTTPException):
        while len(content) < REASON_BYTES and (chunk := answer.read1(REASON_BYTES - len(content))):
            content += chunk
    return _text(content)


def _shown(text: str, secrets: Iterable[str]) -> str:
    """What the server says, safe for a log, even if it repeats what it was sent."""
    for secret in secrets:
        text = text.replace(secret, "(secret)")
    return one_line(text, REASON_CHARACTERS)


def _failure(url: str, status: int, reason: str, place: str, retry_after_seconds: float) -> PushError:
    said = f"{url} answers {status}{f': {reason}' if reason else ''}"
    if status == 429:
        text = f"{said}; profiles wait: raise the ingestion limits of the tenant, or lower stack_rate_hertz"
        return PushError(THROTTLED, text, retry_after_seconds)
    if status >= 500:
        return PushError(SERVER, f"{said}; profiles wait: see the server's log", retry_after_seconds)
    if 300 <= status < 400:
        return PushError(REFUSED, f"{said}, a redirection to {place}; set the final address as profile_push_url")
    steps = {
        401: "check profile_push_token_file",
        403: "check profile_push_token_file and profile_push_tenant",
        404: "check profile_push_url: it is the server's address, without the path of its API",
    }
    step = steps.get(status, "profiles like this one are lost: check the server's limits")
    return PushError(REFUSED, f"{said}; {step}")


def _retry_after_seconds(headers: http.client.HTTPMessage) -> float:
    """0: the server does not say, or not in a way that can be read."""
    text = headers.get("Retry-After", "").strip()
    try:
        seconds = float(text) if text[:1].isdigit() else parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS) if math.isfinite(seconds) else 0.0


@lru_cache(maxsize=16_384)
def _clean(frame: Frame) -> Frame:
    return frame._replace(function=clean_name(frame.function), file=clean_name(frame.file))


def _text(content: bytes | bytearray) -> str:
    return content.decode("utf-8", "replace")
