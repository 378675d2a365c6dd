"""The HTTP side: /metrics for Prometheus and /healthz for whoever keeps the daemon alive."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from rankscope.daemon.listening import ListenError, in_use

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

CONCURRENT_REQUESTS = 8
REQUEST_SECONDS = 10


class MetricsServer:
    """Serves from the moment it is made until `close`. Port 0 chooses a free one; `url` tells which."""

    def __init__(self, host: str, port: int, collectors: Iterable[Collector], is_alive: Callable[[], bool]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            registry.register(collector)
        try:
            self._server = _Server((host, port), _Handler, ipv6=":" in host)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise in_use(port, "--metrics-listen") from error
            reason = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise ListenError(f"{reason}; pass another --metrics-listen") from error
        self._server.set_app(_application(registry, is_alive))
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown_host}:{self._server.server_port}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="rankscope-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _application(registry: CollectorRegistry, is_alive: Callable[[], bool]) -> Any:
    metrics: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]] = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/metrics":
            return metrics(environ, start_response)
        if path == "/healthz":
            alive = is_alive()
            start_response("200 OK" if alive else "503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"ok\n" if alive else b"no window was closed for a while; see the daemon's log\n"]
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"rankscope daemon: /metrics, /healthz\n"]

    return answer


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name the standard library gave it
        """A scrape every few seconds is not news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler], ipv6: bool) -> None:
        if ipv6:
            self.address_family = socket.AF_INET6
        self._slots = threading.BoundedSemaphore(CONCURRENT_REQUESTS)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer would look up the host's full name here, which can take seconds where DNS is broken.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        # Each request is a thread; whoever opens more than a scraper needs is turned away.
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that hangs up is its own affair."""
