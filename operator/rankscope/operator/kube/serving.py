"""The operator's HTTP side: /metrics, /healthz and /readyz."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.operator.kube.binding import Binding
from rankscope.operator.kube.daemon_pods import DaemonPods
from rankscope.operator.kube.daemon_streams import DaemonStreams
from rankscope.operator.kube.electing import ShardLeases
from rankscope.operator.kube.writing import Outbox

REQUEST_SECONDS = 10.0


class Shown(Protocol):
    """What of the operator is exported."""

    binding: Binding
    daemons: DaemonPods
    streams: DaemonStreams
    leases: ShardLeases
    outbox: Outbox

    @property
    def is_ready(self) -> bool: ...


class OperatorServer:
    def __init__(self, host: str, port: int, operator: Shown, collectors: Sequence[Collector]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        for collector in (*collectors, OperatorExporter(operator)):
            registry.register(collector)
        self._server = ThreadingHTTPServer((host, port), _handler(registry, operator))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, name="rankscope-http", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _handler(registry: CollectorRegistry, operator: Shown) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            kind = "text/plain; charset=utf-8"
            if self.path == "/metrics":
                status, body, kind = 200, generate_latest(registry), CONTENT_TYPE_LATEST
            elif self.path == "/healthz":
                status, body = 200, b"ok\n"
            elif self.path == "/readyz":
                ready = operator.is_ready
                status, body = (200, b"ok\n") if ready else (503, b"pods and daemons are not listed yet\n")
            else:
                status, body = 404, b"rankscope operator: /metrics, /healthz, /readyz\n"
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name the standard library gave it
            """A probe every few seconds is not news."""

    return Handler


class OperatorExporter(Collector):
    """The operator's view of itself."""

    def __init__(self, operator: Shown) -> None:
        self._operator = operator

    def collect(self) -> Iterable[Metric]:
        shown = self._operator
        gauges = [
            ("shards_held", "Shards of runs that this replica acts for.", len(shown.leases.held)),
            ("daemons", "Daemons that there are.", len(shown.daemons.addresses)),
            ("daemons_connected", "Daemons whose windows are heard.", len(shown.streams.connected)),
            ("writes_waiting", "Writes that wait for the API server.", shown.outbox.waiting),
        ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"rankscope_operator_{name}", text, value=value)
        counters = [
            ("messages", "Messages of daemons.", shown.streams.messages_total),
            ("writes", "Objects written to the API server.", shown.outbox.written_total),
            ("writes_failed", "Writes that the API server did not take.", shown.outbox.failed_total),
        ]
        for name, text, value in counters:
            yield CounterMetricFamily(f"rankscope_operator_{name}", text, value=value)
        refused = CounterMetricFamily(
            "rankscope_operator_windows_refused",
            "Windows of daemons that were not believed: of another node's pod, of none, or too many.",
            labels=["reason"],
        )
        for reason, number in sorted(shown.binding.refusals.counts.items()):
            refused.add_metric([reason], number)
        yield refused

    def describe(self) -> Iterable[Metric]:
        return ()
