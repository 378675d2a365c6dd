"""The operator's HTTP side: /metrics, /healthz and /readyz."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from rankscope.common.http_server import BoundedHandler, BoundedHttpServer
from rankscope.common.tls import FollowedTls
from rankscope.operator.access.token_review import MetricsGuard


class Readiness(Protocol):
    @property
    def is_ready(self) -> bool: ...


class OperatorServer:
    """With `guard`, /metrics is for those it admits; /healthz and /readyz are for everybody."""

    def __init__(
        self,
        host: str,
        port: int,
        operator: Readiness,
        collectors: Sequence[Collector],
        tls: FollowedTls | None = None,
        guard: MetricsGuard | None = None,
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            registry.register(collector)
        self.scheme = "http" if tls is None else "https"
        self._server = BoundedHttpServer(host, port, _handler(registry, operator, guard), tls)
        self.port = self._server.port

    def start(self) -> None:
        self._server.serve("rankscope-http")

    def stop(self) -> None:
        self._server.close()


def _handler(registry: CollectorRegistry, operator: Readiness, guard: MetricsGuard | None) -> type[BoundedHandler]:
    class Handler(BoundedHandler):
        def get(self) -> None:
            if self.path == "/metrics":
                self._answer_metrics()
            elif self.path == "/healthz":
                self.answer(200, b"ok\n")
            elif self.path == "/readyz":
                ready = operator.is_ready
                self.answer(200 if ready else 503, b"ok\n" if ready else b"pods and daemons are not listed yet\n")
            else:
                self.answer(404, b"rankscope operator: /metrics, /healthz, /readyz\n")

        def _answer_metrics(self) -> None:
            if guard is not None:
                # Asking about a token takes as long as the API server takes.
                self.server.stop_clock()
                refusal = guard.refusal(self.headers.get("Authorization", ""), self.client_address[0])
                if refusal is not None:
                    headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
                    self.answer(refusal.status, refusal.text.encode() + b"\n", **headers)
                    return
            self.answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)

    return Handler
