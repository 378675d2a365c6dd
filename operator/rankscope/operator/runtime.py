"""The operator: its settings, its parts, constructed in order, started and stopped together, and the pulse that drives
them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.common.tls import FollowedTls, Read, files
from rankscope.operator.access.api_server import UserApi, UserApiSettings
from rankscope.operator.access.guard import TokenAuthentication
from rankscope.operator.access.profile_relay import JobNodes, ProfileRelay
from rankscope.operator.access.run_service import UserJobs
from rankscope.operator.access.token_review import MetricsGuard, Reviews
from rankscope.operator.alerts.alertmanager_webhook import AlertReceiver, read_token
from rankscope.operator.alerts.decision import AlertDecisions
from rankscope.operator.captures.alert_captures import AlertCaptures
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.captures.automatic import AutomaticCaptureMaker
from rankscope.operator.captures.controller import CapturesController
from rankscope.operator.captures.daemon_calls import DaemonCalls
from rankscope.operator.certificates.roles import API_SECRET, OPERATOR_SECRET
from rankscope.operator.certificates.rotation import CertificateRotation, RotationSettings
from rankscope.operator.console.history import History
from rankscope.operator.console_access import Console, ConsoleSettings
from rankscope.operator.correlation.correlator import Correlator, JobState, LostSeconds
from rankscope.operator.correlation.daemon_windows import DaemonMessage
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.operator.correlation.fleet_usage import FleetUsage
from rankscope.operator.correlation.hang_reporter import HangReporter
from rankscope.operator.correlation.hang_store import HangStore
from rankscope.operator.kube.api_client import Api, owners
from rankscope.operator.kube.leader_election import SETTLING_SECONDS, ShardLeases
from rankscope.operator.kube.object_writer import Events, ObjectWriter, Outbox
from rankscope.operator.kube.report_maps import ReportMaps
from rankscope.operator.kube.watch_cache import Watched
from rankscope.operator.metrics import Exporter
from rankscope.operator.policies.controller import PoliciesController
from rankscope.operator.policies.policy import RunThresholds
from rankscope.operator.process import Part, Pulse, operator_server, tune_garbage_collection
from rankscope.operator.runs.controller import RunsController
from rankscope.operator.runs.daemon_streams import SELECTOR, DaemonPod, DaemonPods, DaemonStreams, read_daemon_pod
from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.pods import Pod, read_pod
from rankscope.operator.runs.rank_binding import Binding
from rankscope.operator.runs.slow_nodes import SlowNodes
from rankscope.operator.webhooks.webhooks import Webhooks, WebhookSettings
from rankscope.v1.profile_service_pb2 import DumpStacksResponse

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "rankscope"


@dataclass(frozen=True)
class OperatorSettings:
    kubeconfig: Path | None = None  # None: the pod's service account
    namespace: str = field(default_factory=own_namespace)  # of the operator and the daemons
    identity: str = field(default_factory=lambda: os.environ.get("POD_NAME") or socket.gethostname())
    shards: int = 1
    settling_seconds: float = SETTLING_SECONDS
    pod_selector: str = ""
    daemon_selector: str = SELECTOR
    listen_host: str = "127.0.0.1"
    listen_port: int = 9466
    # Our certificate and key for the daemons, and the authority that signs theirs.
    daemon_tls: tuple[Path, Path, Path] | None = None
    fleet_certificates: RotationSettings | None = None  # made and renewed by us, instead of `daemon_tls`
    # Certificate and key for callers; without them, ours of `fleet_certificates`.
    serving_files: tuple[Path, Path] | None = None
    metrics_auth: bool = False
    mfu_target: float | None = None
    node_conditions: bool = False
    # Alertmanager may ask for captures with this token; without one there is no receiver.
    alert_token_file: Path | None = None
    alert_host: str = "127.0.0.1"
    alert_port: int = 9467
    webhooks: WebhookSettings | None = None
    user_api: UserApiSettings | None = None
    console: ConsoleSettings | None = None  # needs `user_api`: the tokens are the same


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
        usage = FleetUsage(lost, thresholds.mfu_target_of, self._elsewhere)
        self.correlator.listen(usage)  # before `lost`
        self.correlator.listen(lost)
        reports = HangStore(ReportMaps(self.api, settings.namespace, owners()))
        self.hangs = HangReporter(reports, self._dump, self._report_hang)
        self.correlator.listen(self.hangs)
        prometheus_url = "" if settings.console is None else settings.console.prometheus_url
        self.reports = FleetReports(usage, prometheus_url)
        self.streams = DaemonStreams(self._accept, shown_to_daemons)

        # Our own kinds of objects.
        calls = DaemonCalls(shown_to_daemons)
        self._relay = ProfileRelay(calls, self._addresses)
        self.captures = CapturesController(
            self.api,
            writer,
            self.leases,
            calls,
            self.states_by_job,
            self._addresses,
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
            self._addresses,
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
        self.console: Console | None = None
        history = History(lost, keeps=self._is_held)
        if settings.user_api is not None:
            if not settings.user_api.audience:
                raise ValueError("--api-audience is empty: tokens for the API server are not for us to see")
            authentication = TokenAuthentication(Reviews(self.api, settings.user_api.audience))
            self.user_api = UserApi(
                self.api,
                settings.user_api,
                authentication,
                self.captures.watched,
                self.runs,
                UserJobs(
                    self.states,
                    self.hangs.store,
                    self.reports,
                    self.audit,
                    lambda: self.runs.watched.objects.values(),
                ),
                calls,
                self._addresses,
                self._relay,
                self.audit,
                callers_tls,
            )
            if settings.console is not None:
                self.correlator.listen(history)
                self.console = Console(
                    settings.console,
                    history,
                    authentication,
                    self.audit,
                    self.user_api.handlers,
                    shown_to_callers,
                    self._elsewhere,
                )
        # Prometheus shows the token that every pod has: one for the API server, so of its audience.
        guard = MetricsGuard(Reviews(self.api, audience="")) if settings.metrics_auth else None
        metrics_tls = None if guard is None else callers_tls
        alert_totals = None if self.alert_desk is None else self.alert_desk.totals
        exporter = Exporter(
            self.states, lost, thresholds.mfu_target_of, self.hangs.hangs_of, alert_totals, operator=self
        )
        self.server = operator_server(settings.listen_host, settings.listen_port, self, [exporter], metrics_tls, guard)
        reconciled = [self._follow_daemons, self.runs.reconcile, self.captures.reconcile, self.policies.reconcile]
        reconciled.append(history.forget_lost_runs)
        if self.slow_nodes is not None:
            reconciled.append(self.slow_nodes.reconcile)
        self._pulse = Pulse(reconciled)

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
            self.pods,
            self.daemon_watch,
            self.runs.watched,
            self.captures.watched,
            self.policies.watched,
            None if self.slow_nodes is None else self.slow_nodes.watched,
            self.correlator,
            self.streams,
            self.user_api,
            self.console,
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
        self.hangs.stop()
        self.reports.close()

    @property
    def is_ready(self) -> bool:
        """Once it knows its pods and daemons. A later outage of the API server does not change that: it goes on."""
        is_serving = self.webhooks is None or self.webhooks.is_serving
        has_certificates = self.certificates is None or self.certificates.are_held
        return is_serving and has_certificates and self.pods.listed.is_set() and self.daemon_watch.listed.is_set()

    @property
    def addresses(self) -> str:
        """Where it serves what."""
        named = {
            "alerts": None if self.alerts is None else self.alerts.url,
            "api": None if self.user_api is None else self.user_api.server.address,
            "console": None if self.console is None else self.console.url,
        }
        return " ".join([self.server.url, *(f"{name} {what}" for name, what in named.items() if what)])

    def states(self) -> tuple[JobState, ...]:
        return self.correlator.states

    def states_by_job(self) -> Mapping[str, JobState]:
        return {state.job: state for state in self.correlator.states}

    def connected(self) -> Mapping[str, int]:
        """Nodes whose windows arrive, with the number of the connection."""
        return self.streams.connected

    def _addresses(self) -> Mapping[str, str]:
        """Node to its daemon's HOST:PORT."""
        return self.daemons.addresses

    def _dump(self, job: str) -> DumpStacksResponse:
        return self._relay.dump_hang(JobNodes(job, self.runs.nodes_of(job)))

    def _report_hang(self, report: HangReport) -> None:
        self.runs.report_hang(report)

    def _follow_daemons(self) -> None:
        addresses = self._addresses()
        self.streams.follow(addresses, self._own_pods())
        self.binding.forget_all_but(set(self.inventory.runs()), set(addresses))

    def _accept(self, messages: Sequence[DaemonMessage]) -> None:
        """In the streams' thread. Windows of runs in shards that others hold are dropped."""
        accepted = self.binding.bind(messages, self._is_held)
        if accepted.windows or accepted.departed:
            self.correlator.take(accepted.windows, accepted.departed)

    def _is_held(self, job: str) -> bool:
        # Not `holds`: while the API server is away nobody acts, but verdicts and metrics go on.
        return self.leases.keeps(job.partition("#")[0])

    def _elsewhere(self) -> Mapping[str, str]:
        """Runs that another replica correlates, with its name."""
        running = [thing.place for thing in self.runs.watched.objects.values() if thing.status.phase == "Running"]
        return {place: self.leases.holder_of(place) for place in running if not self.leases.keeps(place)}

    def _own_pods(self) -> Mapping[str, frozenset[str]] | None:
        """The pods that daemons are asked about where replicas share the runs; None: all."""
        if self.settings.shards == 1:
            return None
        return self.inventory.pods_by_node(lambda key: self.leases.keeps(key.full_name))

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
