"""The operator as one thing: what it watches, what it hears, what it says, and the pulse that drives it."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.common.tls import FollowedTls, Read, TlsMaterial, files
from rankscope.operator.access.api_server import People
from rankscope.operator.access.token_review import MetricsGuard, Reviews
from rankscope.operator.alerts.alertmanager_webhook import AlertReceiver, read_token
from rankscope.operator.alerts.decision import AlertDecisions
from rankscope.operator.captures.alert_captures import AlertCaptures
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.captures.automatic import AutomaticCaptureMaker
from rankscope.operator.captures.controller import CapturesController
from rankscope.operator.captures.daemon_calls import DaemonCalls
from rankscope.operator.certificates.daemon_credentials import DaemonTls, HeldTls
from rankscope.operator.certificates.fleet_secrets import FleetCertificates
from rankscope.operator.correlation.correlator import Correlator, JobState, LostSeconds
from rankscope.operator.correlation.daemon_windows import DaemonMessage
from rankscope.operator.http_endpoints import OperatorServer
from rankscope.operator.kube.api_client import Api
from rankscope.operator.kube.events import Events
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.kube.object_writer import Outbox
from rankscope.operator.kube.ownership import owners
from rankscope.operator.kube.watch_cache import Watched
from rankscope.operator.metrics import Exporter
from rankscope.operator.policies.controller import Daemons, PoliciesController
from rankscope.operator.policies.rates import PolicyPusher
from rankscope.operator.runs.controller import RunsController
from rankscope.operator.runs.daemon_streams import DaemonPod, DaemonPods, DaemonStreams, read_daemon_pod
from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.pods import Pod, read_pod
from rankscope.operator.runs.rank_binding import Binding
from rankscope.operator.runs.slow_nodes import SlowNodes
from rankscope.operator.settings import OperatorSettings
from rankscope.operator.webhooks.webhooks import Webhooks

# How Python looks for garbage in a process that is sent thousands of windows a second.

# Objects made before the youngest are looked through, and how often that is done before the older ones are. Windows
# live for seconds and are in no cycle: looking through them at Python's own pace took a tenth of the operator's time.
THRESHOLDS = (20_000, 20, 20)


def settle() -> None:
    """Once everything is imported."""
    gc.collect()
    gc.freeze()  # what is there now stays
    gc.set_threshold(*THRESHOLDS)


# Which certificates each side of the operator has: files that somebody else renews, or those it keeps itself.


def towards_daemons(settings: OperatorSettings, kept: FleetCertificates | None) -> DaemonTls | None:
    if settings.tls is not None or kept is None:
        return settings.tls
    return HeldTls(lambda: kept.operator)


def towards_callers(settings: OperatorSettings, kept: FleetCertificates | None) -> FollowedTls | None:
    """For alerts and, if asked for, /metrics. None: there is no certificate, and there will be none."""
    read = serving_pair(settings, kept)
    return None if read is None else FollowedTls(read)


def serving_pair(settings: OperatorSettings, kept: FleetCertificates | None) -> Read | None:
    if settings.serving_files is not None:
        return files(*settings.serving_files)
    if kept is None:
        return None

    def read() -> TlsMaterial | None:
        leaf = kept.serving
        return None if leaf is None else TlsMaterial(leaf.certificate, leaf.key)

    return read


def metrics_guard(settings: OperatorSettings, api: Api) -> MetricsGuard | None:
    # Prometheus shows the token that every pod has: one for the API server.
    return MetricsGuard(Reviews(api, audience="")) if settings.metrics_auth else None


log = logging.getLogger(__name__)

PULSE_SECONDS = 1.0


class Operator:
    """Runs from `start` to `stop`. Everything is decided from the watches and the daemons' windows; what must outlive a
    restart is in the API server, never here."""

    def __init__(self, settings: OperatorSettings) -> None:
        self.settings = settings
        self.api = Api(settings.kubeconfig)
        self.outbox = Outbox()
        self.events = Events(self.api, self.outbox)
        self.inventory = Inventory()
        self.binding = Binding(self.inventory)
        self.daemons = DaemonPods()
        self.leases = ShardLeases(
            self.api,
            settings.namespace,
            settings.identity,
            settings.shards,
            on_change=self._shards_changed,
            owners=owners(),
            settling_seconds=settings.settling_seconds,
        )
        base = replace(DEFAULT_POLICY, mfu_target_ratio=settings.mfu_target)
        self.correlator = Correlator(base, policy_of=lambda job: self.policies.policy_of(job))
        self.lost = LostSeconds()
        kept = settings.fleet_certificates
        self.certificates = None if kept is None else FleetCertificates(self.api, kept, lambda: 0 in self.leases.held)
        daemon_tls = towards_daemons(settings, self.certificates)
        self.streams = DaemonStreams(self._accept, daemon_tls)
        self.runs = RunsController(
            self.api,
            self.outbox,
            self.events,
            self.inventory,
            self.leases,
            self.states_by_job,
            lambda: self.captures.last_captures(),  # made below
        )
        calls = DaemonCalls(daemon_tls)
        self.audit = CaptureAudit(names_are_stamped=settings.webhooks is not None)
        self.captures = CapturesController(
            self.api,
            self.leases,
            calls,
            self.states_by_job,
            lambda: self.daemons.addresses,
            self.binding.daemon_job,
            audit=self.audit,
            policy_of=lambda job: self.policies.policy_of(job),  # made below
        )
        self.automatic = AutomaticCaptureMaker(
            self.api, self.events, self.leases, self.runs, self.captures.watched, self.states_by_job
        )
        self.policies = PoliciesController(
            self.api,
            self.outbox,
            self.events,
            self.inventory,
            self.leases,
            self.runs,
            self.automatic,
            lambda: Daemons(self.daemons.addresses, self.streams.connected),
            lambda told: PolicyPusher(calls.channel, told),
            base,
        )
        by_alert = AlertCaptures(self.runs, self.automatic, self.leases)
        self.alert_desk = AlertDecisions(
            lambda: self.correlator.states, by_alert.start, is_elsewhere=by_alert.is_elsewhere
        )
        self._alert_token = None if settings.alert_token_file is None else read_token(settings.alert_token_file)
        self.alerts: AlertReceiver | None = None  # once started, if there is a token
        self.pods: Watched[Pod] = Watched(self.api, "/api/v1/pods", read_pod, self.inventory, settings.pod_selector)
        daemon_path = f"/api/v1/namespaces/{settings.namespace}/pods"
        self.daemon_watch: Watched[DaemonPod] = Watched(
            self.api, daemon_path, read_daemon_pod, self.daemons, settings.daemon_selector
        )
        self._watches: tuple[Watched[Any], ...] = (
            self.pods,
            self.daemon_watch,
            self.runs.watched,
            self.captures.watched,
            self.policies.watched,
        )
        self.slow_nodes: SlowNodes | None = None
        if settings.node_conditions:
            self.slow_nodes = SlowNodes(self.api, self.outbox, self.leases, self.states_by_job)
            self._watches = (*self._watches, self.slow_nodes.watched)
        self.webhooks: Webhooks | None = None
        if settings.webhooks is not None:
            self.webhooks = Webhooks(self.api, settings.webhooks, lambda: 0 in self.leases.held, self.audit)
        self._serving_tls = towards_callers(settings, self.certificates)
        self.people: People | None = None
        if settings.people is not None:
            read = serving_pair(settings, self.certificates)
            watches = (self.captures.watched, self.runs)
            self.people = People(
                self.api, settings.people, *watches, calls, lambda: self.daemons.addresses, self.audit, read
            )
        guard = metrics_guard(settings, self.api)
        metrics_tls = None if guard is None else self._serving_tls
        alert_totals = None if self._alert_token is None else lambda: self.alert_desk.totals
        exporter = Exporter(
            lambda: self.correlator.states, self.lost, self.policies.mfu_target_of, alert_totals, operator=self
        )
        self.server = OperatorServer(settings.listen_host, settings.listen_port, self, [exporter], metrics_tls, guard)
        self._stopping = threading.Event()
        self._pulse_thread = threading.Thread(target=self._pulse, name="rankscope-pulse", daemon=True)

    def start(self) -> None:
        settle()
        self.server.start()
        if self._alert_token is not None:
            address = self.settings.alert_host, self.settings.alert_port
            self.alerts = AlertReceiver(*address, self.alert_desk, self._alert_token, self._serving_tls)
        self.outbox.start()
        self.leases.start()
        if self.certificates is not None:
            self.certificates.start()
        if self.webhooks is not None:
            self.webhooks.start()
        for watched in self._watches:
            watched.start()
        self.correlator.listen(self.lost)
        self.correlator.start()
        self.streams.start()
        if self.people is not None:
            self.people.start()
        self._pulse_thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self.certificates is not None:
            self.certificates.stop()
        if self.webhooks is not None:
            self.webhooks.stop()
        if self.people is not None:
            self.people.stop()
        if self.alerts is not None:
            self.alerts.close()
        self._pulse_thread.join(5.0)
        for watched in self._watches:
            watched.stop()
        self.captures.stop()
        self.automatic.stop()
        self.policies.stop()
        self.streams.stop()
        self.correlator.stop()
        self.outbox.stop()
        self.leases.stop()
        self.server.stop()

    @property
    def is_ready(self) -> bool:
        """Once it knows its pods and daemons. An outage of the API server later does not change that: it goes on."""
        is_serving = self.webhooks is None or self.webhooks.is_serving
        if self.certificates is not None and not self.certificates.are_held:
            return False
        return is_serving and self.pods.listed.is_set() and self.daemon_watch.listed.is_set()

    def states_by_job(self) -> Mapping[str, JobState]:
        return {state.job: state for state in self.correlator.states}

    def _accept(self, messages: Sequence[DaemonMessage]) -> None:
        """In the streams' thread. Of the runs in shards that others hold, nothing is kept."""
        heard = self.binding.bind(messages, self._is_held)
        if heard.windows or heard.departed:
            self.correlator.take(heard.windows, heard.departed)

    def _is_held(self, job: str) -> bool:
        # Not `holds`: while the API server is away nobody acts, and verdicts and metrics go on.
        return self.leases.keeps(job.partition("#")[0])

    def _pods_of_ours(self) -> Mapping[str, frozenset[str]] | None:
        """What the daemons are asked about where replicas share the runs; None: everything."""
        if self.settings.shards == 1:
            return None
        return self.inventory.pods_by_node(lambda key: self.leases.keeps(self.binding.run_name(key)))

    def _shards_changed(self, held: frozenset[int]) -> None:
        # Whoever held them meanwhile has written too: what we believe to stand may not.
        self.outbox.forget_all()

    def _pulse(self) -> None:
        while not self._stopping.wait(PULSE_SECONDS):
            try:
                addresses = self.daemons.addresses
                self.streams.follow(addresses, self._pods_of_ours())
                self.binding.forget_all_but(set(self.inventory.runs()), set(addresses))
                self.runs.reconcile()
                self.captures.reconcile()
                if self.slow_nodes is not None:
                    self.slow_nodes.reconcile()
                self.policies.reconcile()
            except Exception:
                log.exception("a pulse failed; the next one tries again")
