"""The operator's HTTP endpoints: /metrics, /healthz and /readyz."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prometheus_client.registry import Collector

from rankscope.common.http_server import HttpServer, Request, Response, Route
from rankscope.common.metrics_endpoint import MetricsPage
from rankscope.common.tls import FollowedTls
from rankscope.operator.access.token_review import MetricsGuard


class Readiness(Protocol):
    @property
    def is_ready(self) -> bool: ...


class OperatorServer:
    """With `guard`, /metrics is for tokens that it accepts; /healthz and /readyz are for everybody."""

    def __init__(
        self,
        host: str,
        port: int,
        operator: Readiness,
        collectors: Sequence[Collector],
        tls: FollowedTls | None = None,
        guard: MetricsGuard | None = None,
    ) -> None:
        self._page = MetricsPage(collectors)
        self._operator = operator
        self._guard = guard
        routes = {
            ("GET", "/metrics"): Route(self._metrics),
            ("GET", "/healthz"): Route(lambda request: Response(200, b"ok\n")),
            ("GET", "/readyz"): Route(self._readiness),
        }
        self._server = HttpServer(host, port, routes, tls)
        self.scheme = "http" if tls is None else "https"
        self.port = self._server.port

    def start(self) -> None:
        self._server.serve("rankscope-http")

    def stop(self) -> None:
        self._server.close()

    def _readiness(self, request: Request) -> Response:
        if self._operator.is_ready:
            return Response(200, b"ok\n")
        return Response(503, b"pods and daemons are not listed yet\n")

    def _metrics(self, request: Request) -> Response:
        refusal = None
        if self._guard is not None:
            refusal = self._guard.refusal(request.headers.get("Authorization", ""), request.address)
        return self._page.response(request) if refusal is None else refusal
