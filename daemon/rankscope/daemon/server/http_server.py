"""The HTTP side: /metrics for Prometheus and /healthz for whoever keeps the daemon alive."""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from rankscope.common.http_server import BoundedHandler, BoundedHttpServer
from rankscope.common.tls import FollowedTls
from rankscope.daemon.server.certificates import CertificateError, names
from rankscope.daemon.server.sockets import ListenError, in_use

log = logging.getLogger(__name__)

# Whose certificates open /metrics where it has TLS: a scraper's own opens nothing else.
READERS = frozenset({"rankscope-metrics", "rankscope-operator"})
CALLERS_REMEMBERED = 256


class MetricsServer:
    """Serves from the moment it is made until `close`. Port 0 chooses a free one; `url` tells which."""

    def __init__(
        self,
        host: str,
        port: int,
        collectors: Iterable[Collector],
        is_alive: Callable[[], bool],
        tls: FollowedTls | None = None,
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            registry.register(collector)
        try:
            self._server = BoundedHttpServer(host, port, _handler(registry, is_alive, _Guard()), tls)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise in_use(port, "--metrics-listen") from error
            reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise ListenError(f"{reason}; pass another --metrics-listen") from error
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"{'http' if tls is None else 'https'}://{shown_host}:{self._server.port}/metrics"
        self._server.serve("rankscope-metrics")

    def close(self) -> None:
        self._server.close()


def _handler(registry: CollectorRegistry, is_alive: Callable[[], bool], guard: _Guard) -> type[BoundedHandler]:
    metrics: Callable[[Any, Any], Iterable[bytes]] = make_wsgi_app(registry)

    class Handler(BoundedHandler):
        def get(self) -> None:
            path, _, query = self.path.partition("?")
            if path == "/healthz":
                alive = is_alive()
                text = b"ok\n" if alive else b"no window was closed for a while; see the daemon's log\n"
                self.answer(200 if alive else 503, text)
            elif path != "/metrics":
                self.answer(404, b"rankscope daemon: /metrics, /healthz\n")
            elif not guard.admits(self.connection, self.client_address[0]):
                self.answer(403, b"a certificate of rankscope-metrics is needed\n")
            else:
                self._answer_metrics(query)

        def _answer_metrics(self, query: str) -> None:
            told: dict[str, Any] = {}

            def start_response(status: str, headers: list[tuple[str, str]]) -> None:
                told.update(status=int(status.split()[0]), headers=dict(headers))

            environ = {
                "REQUEST_METHOD": "GET",
                "PATH_INFO": "/metrics",
                "QUERY_STRING": query,
                "HTTP_ACCEPT": self.headers.get("Accept", ""),
                "HTTP_ACCEPT_ENCODING": self.headers.get("Accept-Encoding", ""),
            }
            body = b"".join(metrics(environ, start_response))
            kind = told["headers"].pop("Content-Type", "text/plain")
            self.answer(told["status"], body, kind, **told["headers"])

    return Handler


class _Guard:
    """Without TLS everybody is let in: the address is the guard then."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def admits(self, connection: object, address: str) -> bool:
        if not isinstance(connection, ssl.SSLSocket):
            return True
        try:
            shown = names(connection.getpeercert(binary_form=True) or b"")
        except CertificateError:
            shown = frozenset()
        if shown & READERS:
            return True
        told = (address, ", ".join(sorted(shown))[:200])
        if told not in self._told and len(self._told) < CALLERS_REMEMBERED:
            self._told.add(told)
            log.warning(
                "refused /metrics to %s: its certificate is of %r, not of %s", *told, ", ".join(sorted(READERS))
            )
        return False
