"""The operator: its parts, constructed in order, started and stopped together, and the pulse that drives them."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.common.tls import FollowedTls, Read, files
from rankscope.operator.access.api_server import UserApi
from rankscope.operator.access.token_review import MetricsGuard, Reviews
from rankscope.operator.alerts.alertmanager_webhook import AlertReceiver, read_token
from rankscope.operator.alerts.decision import AlertDecisions
from rankscope.operator.captures.alert_captures import AlertCaptures
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.captures.automatic import AutomaticCaptureMaker
from rankscope.operator.captures.controller import CapturesController
from rankscope.operator.captures.daemon_calls import DaemonCalls
from rankscope.operator.certificates.roles import API_SECRET, OPERATOR_SECRET
from rankscope.operator.certificates.rotation import CertificateRotation
from rankscope.operator.correlation.correlator import Correlator, JobState, LostSeconds
from rankscope.operator.correlation.daemon_windows import DaemonMessage
from rankscope.operator.http_endpoints import OperatorServer
from rankscope.operator.kube.api_client import Api
from rankscope.operator.kube.events import Events
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.kube.object_writer import ObjectWriter, Outbox
from rankscope.operator.kube.ownership import owners
from rankscope.operator.kube.watch_cache import Watched
from rankscope.operator.metrics import Exporter
from rankscope.operator.policies.controller import PoliciesController
from rankscope.operator.policies.policy import RunThresholds
from rankscope.operator.runs.controller import RunsController
from rankscope.operator.runs.daemon_streams import DaemonPod, DaemonPods, DaemonStreams, read_daemon_pod
from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.pods import Pod, read_pod
from rankscope.operator.runs.rank_binding import Binding
from rankscope.operator.runs.slow_nodes import SlowNodes
from rankscope.operator.settings import OperatorSettings
from rankscope.operator.webhooks.webhooks import Webhooks

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


class Operator:
    """Runs from `start` to `stop`. Everything is decided from the watches and the daemons' windows; what must outlive a
    restart is in the API server, never here."""

    def __init__(self, settings: OperatorSettings) -> None:
        self.settings = settings
        self.api = Api(settings.kubeconfig)
        self.outbox = Outbox()
        self.leases = ShardLeases(
            self.api,
            settings.namespace,
            settings.identity,
            settings.shards,
            on_change=self._shards_changed,
            owners=owners(),
            settling_seconds=settings.settling_seconds,
        )
        events = Events(self.api, self.outbox)
        writer = ObjectWriter(self.api, self.outbox, self.leases)
        self.audit = CaptureAudit(names_are_stamped=settings.webhooks is not None)

        # Certificates.
        self.certificates: CertificateRotation | None = None
        if settings.fleet_certificates is not None:
            self.certificates = CertificateRotation(self.api, settings.fleet_certificates, self.leases.leads)
        shown_to_daemons = self._shown_to_daemons()
        shown_to_callers = self._shown_to_callers()
        callers_tls = None if shown_to_callers is None else FollowedTls(shown_to_callers)

        # From pods and daemons to verdicts.
        self.inventory = Inventory()
        self.binding = Binding(self.inventory)
        self.daemons = DaemonPods()
        self.pods: Watched[Pod] = Watched(self.api, "/api/v1/pods", read_pod, self.inventory, settings.pod_selector)
        daemon_path = f"/api/v1/namespaces/{settings.namespace}/pods"
        self.daemon_watch: Watched[DaemonPod] = Watched(
            self.api, daemon_path, read_daemon_pod, self.daemons, settings.daemon_selector
        )
        thresholds = RunThresholds(replace(DEFAULT_POLICY, mfu_target_ratio=settings.mfu_target))
        self.correlator = Correlator(thresholds.base, policy_of=thresholds.policy_of)
        lost = LostSeconds()
        self.correlator.listen(lost)
        self.streams = DaemonStreams(self._accept, shown_to_daemons)

        # Our own kinds of objects.
        calls = DaemonCalls(shown_to_daemons)
        self.captures = CapturesController(
            self.api,
            writer,
            self.leases,
            calls,
            self.states_by_job,
            self.addresses,
            self.binding.daemon_job,
            audit=self.audit,
            policy_of=thresholds.policy_of,
        )
        self.runs = RunsController(
            self.api,
            writer,
            events,
            self.inventory,
            self.leases,
            self.states_by_job,
            self.captures.last_captures,
        )
        self.automatic = AutomaticCaptureMaker(
            self.api, events, self.leases, self.runs, self.captures.watched, self.states_by_job
        )
        self.policies = PoliciesController(
            self.api,
            writer,
            events,
            self.inventory,
            self.leases,
            self.runs,
            self.automatic,
            thresholds,
            calls.channel,
            self.addresses,
            self.connected,
        )
        self.slow_nodes: SlowNodes | None = None
        if settings.node_conditions:
            self.slow_nodes = SlowNodes(self.api, writer, self.leases, self.states_by_job)

        # Servers.
        self.alerts: AlertReceiver | None = None
        self.alert_desk: AlertDecisions | None = None
        if settings.alert_token_file is not None:
            by_alert = AlertCaptures(self.runs, self.automatic, self.leases)
            self.alert_desk = AlertDecisions(self.states, by_alert.start, is_elsewhere=by_alert.is_elsewhere)
            token = read_token(settings.alert_token_file)
            self.alerts = AlertReceiver(settings.alert_host, settings.alert_port, self.alert_desk, token, callers_tls)
        self.webhooks: Webhooks | None = None
        if settings.webhooks is not None:
            self.webhooks = Webhooks(self.api, settings.webhooks, self.leases.leads, self.audit)
        self.user_api: UserApi | None = None
        if settings.user_api is not None:
            self.user_api = UserApi(
                self.api,
                settings.user_api,
                self.captures.watched,
                self.runs,
                calls,
                self.addresses,
                self.audit,
                callers_tls,
            )
        # Prometheus shows the token that every pod has: one for the API server, so of its audience.
        guard = MetricsGuard(Reviews(self.api, audience="")) if settings.metrics_auth else None
        metrics_tls = None if guard is None else callers_tls
        alert_totals = None if self.alert_desk is None else self.alert_desk.totals
        exporter = Exporter(self.states, lost, thresholds.mfu_target_of, alert_totals, operator=self)
        self.server = OperatorServer(settings.listen_host, settings.listen_port, self, [exporter], metrics_tls, guard)
        self._pulse = _Pulse(self)

    @property
    def _watches(self) -> Sequence[Watched[Any]]:
        found: list[Watched[Any]] = [
            self.pods,
            self.daemon_watch,
            self.runs.watched,
            self.captures.watched,
            self.policies.watched,
        ]
        return found if self.slow_nodes is None else [*found, self.slow_nodes.watched]

    @property
    def _parts(self) -> Sequence[Part]:
        """In the order in which they are started. They are stopped in reverse: writes that wait in the outbox are sent
        while the leases are still held."""
        every: Sequence[Part | None] = (
            self.server,
            self.leases,
            self.outbox,
            self.alerts,
            self.certificates,
            self.webhooks,
            *self._watches,
            self.correlator,
            self.streams,
            self.user_api,
        )
        return [part for part in every if part is not None]

    def start(self) -> None:
        tune_garbage_collection()
        for part in self._parts:
            part.start()
        self._pulse.start()

    def stop(self) -> None:
        self._pulse.stop()
        for controller in (self.captures, self.automatic, self.policies):
            controller.stop()
        for part in reversed(self._parts):
            part.stop()

    @property
    def is_ready(self) -> bool:
        """Once it knows its pods and daemons. A later outage of the API server does not change that: it goes on."""
        is_serving = self.webhooks is None or self.webhooks.is_serving
        has_certificates = self.certificates is None or self.certificates.are_held
        return is_serving and has_certificates and self.pods.listed.is_set() and self.daemon_watch.listed.is_set()

    def states(self) -> tuple[JobState, ...]:
        return self.correlator.states

    def states_by_job(self) -> Mapping[str, JobState]:
        return {state.job: state for state in self.correlator.states}

    def addresses(self) -> Mapping[str, str]:
        """Node to its daemon's HOST:PORT."""
        return self.daemons.addresses

    def connected(self) -> frozenset[str]:
        """Nodes whose windows arrive."""
        return self.streams.connected

    def reconcile(self) -> None:
        parts = [self._follow_daemons, self.runs.reconcile, self.captures.reconcile, self.policies.reconcile]
        if self.slow_nodes is not None:
            parts.append(self.slow_nodes.reconcile)
        for reconcile in parts:
            try:
                reconcile()
            except Exception:  # of one part: the others go on
                log.exception("a part of the pulse failed; the next pulse tries again")

    def _follow_daemons(self) -> None:
        addresses = self.addresses()
        self.streams.follow(addresses, self._own_pods())
        self.binding.forget_all_but(set(self.inventory.runs()), set(addresses))

    def _accept(self, messages: Sequence[DaemonMessage]) -> None:
        """In the streams' thread. Windows of runs in shards that others hold are dropped."""
        heard = self.binding.bind(messages, self._is_held)
        if heard.windows or heard.departed:
            self.correlator.take(heard.windows, heard.departed)

    def _is_held(self, job: str) -> bool:
        # Not `holds`: while the API server is away nobody acts, but verdicts and metrics go on.
        return self.leases.keeps(job.partition("#")[0])

    def _own_pods(self) -> Mapping[str, frozenset[str]] | None:
        """The pods that daemons are asked about where replicas share the runs; None: all."""
        if self.settings.shards == 1:
            return None
        return self.inventory.pods_by_node(lambda key: self.leases.keeps(self.binding.run_name(key)))

    def _shards_changed(self, held: frozenset[int]) -> None:
        # Another replica has written meanwhile: our writes may have been replaced.
        self.outbox.forget_all()

    def _shown_to_daemons(self) -> Read | None:
        if self.settings.daemon_tls is not None:
            return files(*self.settings.daemon_tls)
        return None if self.certificates is None else self.certificates.client(OPERATOR_SECRET)

    def _shown_to_callers(self) -> Read | None:
        """To users, Alertmanager and Prometheus. None: there is no certificate, and there will be none."""
        if self.settings.serving_files is not None:
            return files(*self.settings.serving_files)
        return None if self.certificates is None else self.certificates.server(API_SECRET)


class _Pulse:
    """Calls `reconcile` once a second, in a thread of its own."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankscope-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._stopping.wait(PULSE_SECONDS):
            self._operator.reconcile()
