"""The daemon's HTTP endpoints: /metrics for Prometheus and /healthz for the kubelet."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable

from prometheus_client.registry import Collector

from rankscope.common.http_server import HttpServer, Limits, Request, Response, Route
from rankscope.common.metric_table import MetricsPage
from rankscope.common.tls import FollowedTls
from rankscope.daemon.server.certificates import CertificateError, names
from rankscope.daemon.server.sockets import ListenError, in_use

log = logging.getLogger(__name__)

# Roles that may read /metrics where it has TLS. A scraper's certificate is good for nothing else.
READERS = frozenset({"rankscope-metrics", "rankscope-operator"})
MAX_CALLERS = 256
# Of a core, for all callers: some tens of scrapes a second. Callers beyond that wait.
CORE_RATIO = 0.01


class MetricsServer:
    """Serves from construction until `close`. Port 0 chooses a free one; `url` has it. Without TLS everybody may read:
    the address is the protection then."""

    def __init__(
        self,
        host: str,
        port: int,
        collectors: Iterable[Collector],
        is_alive: Callable[[], bool],
        tls: FollowedTls | None = None,
        version: Callable[[], object] | None = None,
    ) -> None:
        """`version` returns an object that is replaced when the metrics change."""
        self._page = MetricsPage(collectors, version)
        self._is_alive = is_alive
        self._needs_certificate = tls is not None
        self._logged: set[tuple[str, str]] = set()
        routes = {("GET", "/metrics"): Route(self._metrics), ("GET", "/healthz"): Route(self._health)}
        try:
            self._server = HttpServer(host, port, routes, tls, Limits(core_ratio=CORE_RATIO))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise in_use(port, "--metrics-listen") from error
            reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise ListenError(f"{reason}; pass another --metrics-listen") from error
        self.url = f"{self._server.url}/metrics"
        self._server.start()

    @property
    def cpu_seconds(self) -> float:
        """Taken by all requests since the start."""
        return self._server.cpu_seconds

    def close(self) -> None:
        self._server.stop()

    def _health(self, request: Request) -> Response:
        if self._is_alive():
            return Response(200, b"ok\n")
        return Response(503, b"no window was closed for a while; see the daemon's log\n")

    def _metrics(self, request: Request) -> Response:
        if self._needs_certificate and not self._may_read(request):
            return Response(403, b"a certificate of rankscope-metrics is needed\n")
        return self._page.response(request)

    def _may_read(self, request: Request) -> bool:
        try:
            shown = names(request.certificate)
        except CertificateError:
            shown = frozenset()
        if shown & READERS:
            return True
        refusal = (request.address, ", ".join(sorted(shown))[:200])
        if refusal not in self._logged and len(self._logged) < MAX_CALLERS:
            self._logged.add(refusal)
            wanted = ", ".join(sorted(READERS))
            log.warning("refused /metrics to %s: its certificate is of %r, not of %s", *refusal, wanted)
        return False
