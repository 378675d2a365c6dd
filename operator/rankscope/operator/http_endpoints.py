"""The operator's HTTP endpoints: /metrics, /healthz and /readyz."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.common.http_server import HttpServer, Request, Response, Route
from rankscope.common.metrics_endpoint import metrics_response, registry_of
from rankscope.common.tls import FollowedTls
from rankscope.operator.access.token_review import MetricsGuard
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.kube.object_writer import Outbox
from rankscope.operator.runs.daemon_streams import DaemonPods, DaemonStreams
from rankscope.operator.runs.rank_binding import Binding


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
    """With `guard`, /metrics is for tokens that it accepts; /healthz and /readyz are for everybody."""

    def __init__(
        self,
        host: str,
        port: int,
        operator: Shown,
        collectors: Sequence[Collector],
        tls: FollowedTls | None = None,
        guard: MetricsGuard | None = None,
    ) -> None:
        self._registry = registry_of((*collectors, OperatorExporter(operator)))
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
        return metrics_response(self._registry, request) if refusal is None else refusal


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
