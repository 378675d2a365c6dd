"""What the operator and the correlator have in common as processes: HTTP endpoints (/metrics, /healthz, /readyz),
the pulse that drives controllers once a second, and the pace of the garbage collection."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from prometheus_client.registry import Collector

from rankscope.common.http_server import HttpServer, Request, Response, Route
from rankscope.common.metric_table import MetricsPage
from rankscope.common.tls import FollowedTls


class MetricsAccess(Protocol):
    def check(self, request: Request) -> Response | None:
        """None: the caller may read the metrics."""


class Readiness(Protocol):
    @property
    def is_ready(self) -> bool: ...


def operator_server(
    host: str,
    port: int,
    operator: Readiness,
    collectors: Sequence[Collector],
    tls: FollowedTls | None = None,
    guard: MetricsAccess | None = None,
) -> HttpServer:
    """With `guard`, /metrics is for callers that it accepts; /healthz and /readyz are for everybody."""
    page = MetricsPage(collectors)

    def metrics(request: Request) -> Response:
        refusal = None if guard is None else guard.check(request)
        return page.response(request) if refusal is None else refusal

    def readiness(request: Request) -> Response:
        if operator.is_ready:
            return Response(200, b"ok\n")
        return Response(503, b"pods and daemons are not listed yet\n")

    routes = {
        ("GET", "/metrics"): Route(metrics),
        ("GET", "/healthz"): Route(lambda request: Response(200, b"ok\n")),
        ("GET", "/readyz"): Route(readiness),
    }
    return HttpServer(host, port, routes, tls)


log = logging.getLogger(__name__)

PULSE_SECONDS = 1.0
# New objects before a garbage collection of the youngest generation, and how many of those before one of the older
# generations. Windows live for seconds and are in no cycle: Python's own pace took a tenth of the operator's time.
COLLECTION_THRESHOLDS = (20_000, 20, 20)


def tune_garbage_collection() -> None:
    """Once everything is imported."""
    gc.collect()
    gc.freeze()  # everything until now stays
    gc.set_threshold(*COLLECTION_THRESHOLDS)


class Part(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


class Pulse:
    """Calls each of `parts` once a second, in a thread of its own. One that fails does not affect the others."""

    def __init__(self, parts: Sequence[Callable[[], None]]) -> None:
        self._parts = parts
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankscope-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(5.0)

    def beat(self) -> None:
        for part in self._parts:
            try:
                part()
            except Exception:
                log.exception("a part of the pulse failed; the next pulse tries again")

    def _run(self) -> None:
        while not self._stopping.wait(PULSE_SECONDS):
            self.beat()
