"""An existing dcgm-exporter as a source: its /metrics, read in a thread of its own. It is another program's text, so
its size and the time it may take are bounded, and what it says is checked like any other input."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rankscope.daemon.collectors.gpu.dcgm_names import parse_readings
from rankscope.daemon.collectors.gpu.readings import GpuSnapshot, SourceState

ANSWER_BYTES: Final = 8 << 20
ANSWER_SECONDS: Final = 5.0
CHUNK_BYTES: Final = 64 << 10
KEPT: Final = 64
NEXT_STEP: Final = "see that dcgm-exporter runs on this node and that dcgm_url is right"


class DcgmError(Exception):
    """Why there is nothing, with the next step."""


class DcgmSource:
    """Never takes a counter of its own: what the exporter last said is what there is."""

    def __init__(self, url: str, interval_seconds: float = 1.0) -> None:
        self._url = url
        self._interval_seconds = interval_seconds
        self._latest = GpuSnapshot("dcgm", SourceState.STARTING)
        self._kept: deque[GpuSnapshot] = deque(maxlen=KEPT)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rankscope-dcgm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()

    def latest(self) -> GpuSnapshot:
        return self._latest

    def since(self, unix_nanos: int) -> Sequence[GpuSnapshot]:
        return [snapshot for snapshot in tuple(self._kept) if snapshot.taken_unix_nanos > unix_nanos]

    def poll(self) -> None:
        started = time.monotonic()
        try:
            gpus = parse_readings(fetch(self._url))
            state = SourceState.OK if gpus else SourceState.NO_GPU
            reason = "" if gpus else f"{self._url}: no GPU in it; {NEXT_STEP}"
            snapshot = GpuSnapshot("dcgm", state, reason, gpus=gpus)
        except DcgmError as error:
            snapshot = GpuSnapshot("dcgm", SourceState.FAILED, str(error))
        except Exception as error:  # noqa: BLE001 - another program's text must not end the thread
            snapshot = GpuSnapshot("dcgm", SourceState.FAILED, f"{self._url}: {type(error).__name__}: {error}")
        self._latest = replace(
            snapshot,
            taken_unix_nanos=time.time_ns(),
            polls_total=self._latest.polls_total + 1,
            poll_seconds_total=self._latest.poll_seconds_total + time.monotonic() - started,
        )
        self._kept.append(self._latest)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.poll()
            self._stopping.wait(self._interval_seconds)


def fetch(url: str) -> str:
    """The body of a GET, straight from the host that is named: no proxy, no redirection."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DcgmError(f"dcgm_url = {url!r}: must be like http://127.0.0.1:9400/metrics")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    give_up_at = time.monotonic() + ANSWER_SECONDS
    try:
        connection = kind(parts.hostname, parts.port, timeout=ANSWER_SECONDS)
        try:
            path = parts.path or "/metrics"
            connection.request("GET", f"{path}?{parts.query}" if parts.query else path)
            answer = connection.getresponse()
            if answer.status != 200:
                raise DcgmError(f"{url}: status {answer.status}; {NEXT_STEP}")
            return _body(answer, url, give_up_at).decode("utf-8", "replace")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DcgmError(f"{url}: {error or type(error).__name__}; {NEXT_STEP}") from error


def _body(answer: http.client.HTTPResponse, url: str, give_up_at: float) -> bytes:
    body = bytearray()
    # read1 gives what has come, so that one byte now and then does not outlast the deadline.
    while chunk := answer.read1(CHUNK_BYTES):
        body += chunk
        if len(body) > ANSWER_BYTES:
            raise DcgmError(f"{url}: more than {ANSWER_BYTES >> 20} MiB; give it fewer fields")
        if time.monotonic() > give_up_at:
            raise DcgmError(f"{url}: took longer than {ANSWER_SECONDS:g} s; {NEXT_STEP}")
    return bytes(body)
