"""From the addresses of daemons to verdicts, metrics, alerts and reports of hangs, without Kubernetes.

`rankscope up` watches the daemon of its own process, `rankscope correlator` those of many nodes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.common.text import printable
from rankscope.common.tls import FollowedTls, Read
from rankscope.operator.alerts.alertmanager_webhook import AlertReceiver
from rankscope.operator.alerts.decision import AlertDecisions, Start
from rankscope.operator.correlation.correlator import Correlator, JobState, LostSeconds
from rankscope.operator.correlation.daemon_windows import DaemonMessage
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.operator.correlation.fleet_usage import FleetUsage
from rankscope.operator.correlation.hang_reporter import Dump, HangReporter
from rankscope.operator.correlation.hang_store import HangStore
from rankscope.operator.metrics import Exporter, OperatorView
from rankscope.operator.runs.daemon_streams import DaemonStreams
from rankscope.operator.runs.rank_binding import Binding

log = logging.getLogger(__name__)

NODE_CHARACTERS = 253


@dataclass(frozen=True)
class AlertSettings:
    """Where Alertmanager's notifications are taken, and the token they must show."""

    host: str
    port: int
    token: bytes
    tls: FollowedTls | None = None  # needed where others can reach the address


class DaemonNodes:
    """The nodes by the names that their daemons report, and the address of each. Thread-safe.

    A name belongs to the first daemon that reports it, while that is connected: a second one has the wrong name, or is
    the same daemon at another address."""

    def __init__(self, connected: Callable[[], Collection[str]]) -> None:
        """`connected` are the addresses whose daemons send windows."""
        self._connected = connected
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}  # by node
        self._logged: set[tuple[str, str]] = set()

    @property
    def addresses(self) -> Mapping[str, str]:
        with self._lock:
            return dict(self._addresses)

    def name(self, address: str, reported: str) -> str | None:
        """None: the name is another daemon's."""
        node = printable(reported, NODE_CHARACTERS) or address
        with self._lock:
            holder = self._addresses.setdefault(node, address)
            if holder == address:
                return node
            if holder not in self._connected():
                self._addresses[node] = address
                return node
            is_new = (node, address) not in self._logged
            self._logged.add((node, address))
        if is_new:
            log.warning(
                "the daemons at %s and %s both call their node %r: the second is ignored; give each its own --node, "
                "or list each once",
                holder,
                address,
                node,
            )
        return None

    def forget_all_but(self, addresses: Collection[str]) -> None:
        with self._lock:
            self._addresses = {node: at for node, at in self._addresses.items() if at in addresses}
            self._logged = {(node, at) for node, at in self._logged if at in addresses}


class JobWatch:
    """Runs from `start` to `stop`; `follow` sets the daemons. `start` raises OSError if the address for alerts is
    taken, and ValueError if their token could be read in transit."""

    def __init__(
        self,
        policy: Policy,
        start_capture: Start,
        dump: Dump,
        hangs: HangStore,
        alerts: AlertSettings | None = None,
        tls: Read | None = None,
    ) -> None:
        """`start_capture` is called for alerts, `dump` for hangs; `tls` is what daemons are shown."""
        self.correlator = Correlator(policy)
        self.binding = Binding()
        self.streams = DaemonStreams(self._accept, tls)
        self.daemons = DaemonNodes(lambda: self.streams.connected)
        self._policy = policy
        self.lost = LostSeconds()
        usage = FleetUsage(self.lost, lambda job: policy.mfu_target_ratio)
        self.correlator.listen(usage)  # before `lost`
        self.correlator.listen(self.lost)
        self.hangs = HangReporter(hangs, dump)
        self.correlator.listen(self.hangs)
        self.reports = FleetReports(usage)
        self._alerts = alerts
        self._decisions = AlertDecisions(lambda: self.correlator.states, start_capture)
        self._receiver: AlertReceiver | None = None

    @property
    def alerts_url(self) -> str | None:
        return None if self._receiver is None else self._receiver.url

    def states_by_job(self) -> Mapping[str, JobState]:
        return {state.job: state for state in self.correlator.states}

    def exporter(self, operator: OperatorView | None = None) -> Exporter:
        return Exporter(
            lambda: self.correlator.states,
            self.lost,
            mfu_target_of=lambda job: self._policy.mfu_target_ratio,
            hangs_of=self.hangs.hangs_of,
            alert_totals=None if self._alerts is None else self._decisions.totals,
            operator=operator,
        )

    def start(self) -> None:
        if self._alerts is not None:
            alerts = self._alerts
            self._receiver = AlertReceiver(alerts.host, alerts.port, self._decisions, alerts.token, alerts.tls)
            self._receiver.start()
        self.correlator.start()
        self.streams.start()

    def follow(self, addresses: Collection[str]) -> None:
        """Daemons as gRPC targets; those that are missing are disconnected."""
        self.daemons.forget_all_but(addresses)
        self.binding.forget_all_but(set(), set(self.daemons.addresses))
        self.streams.follow({address: address for address in addresses})

    def stop(self) -> None:
        if self._receiver is not None:
            self._receiver.stop()
            self._receiver = None
        self.streams.stop()
        self.correlator.stop()
        self.hangs.stop()
        self.reports.close()

    def _accept(self, messages: Sequence[DaemonMessage]) -> None:
        """In the streams' thread."""
        for message in messages:
            node = self.daemons.name(message.node, message.reported_node)
            if node is None:
                self.binding.refusals.add("other_node", len(message.windows))
                continue
            message.node = node
            accepted = self.binding.bind([message])
            self.correlator.take(accepted.windows, accepted.departed)
