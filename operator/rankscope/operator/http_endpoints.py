"""The operator's HTTP side: /metrics, /healthz and /readyz."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.common.http_server import BoundedHandler, BoundedHttpServer
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
    """With `guard`, /metrics is for those it admits; /healthz and /readyz are for everybody."""

    def __init__(
        self,
        host: str,
        port: int,
        operator: Shown,
        collectors: Sequence[Collector],
        tls: FollowedTls | None = None,
        guard: MetricsGuard | None = None,
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        for collector in (*collectors, OperatorExporter(operator)):
            registry.register(collector)
        self.scheme = "http" if tls is None else "https"
        self._server = BoundedHttpServer(host, port, _handler(registry, operator, guard), tls)
        self.port = self._server.port

    def start(self) -> None:
        self._server.serve("rankscope-http")

    def stop(self) -> None:
        self._server.close()


def _handler(registry: CollectorRegistry, operator: Shown, guard: MetricsGuard | None) -> type[BoundedHandler]:
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
