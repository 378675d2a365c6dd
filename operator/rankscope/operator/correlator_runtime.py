"""A correlator without Kubernetes: the operator's correlation, captures, alerts and API for daemons that are listed.

Runs have the names that the daemons report. Captures are the same objects under the same controller; they are kept in a
folder, so that a restart continues those under way and lists those that ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.common.http_server import is_loopback
from rankscope.common.tls import FollowedTls, files
from rankscope.operator.access.api_server import UserApi, UserApiSettings
from rankscope.operator.access.guard import CertificateAuthentication, CertificateMetricsGuard
from rankscope.operator.access.profile_relay import JobNodes, ProfileRelay
from rankscope.operator.access.run_service import UserJobs
from rankscope.operator.alerts.alert import Wanted
from rankscope.operator.captures.alert_captures import AlertCaptures
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.captures.automatic import CaptureMaker
from rankscope.operator.captures.controller import CapturesController
from rankscope.operator.captures.daemon_calls import DaemonCalls
from rankscope.operator.console.history import History
from rankscope.operator.console_access import Console, ConsoleSettings
from rankscope.operator.correlation.hang_store import FolderFiles, HangStore
from rankscope.operator.job_watch import AlertSettings, JobWatch
from rankscope.operator.kube.leader_election import SETTLING_SECONDS, SoleReplica
from rankscope.operator.kube.local_objects import LocalObjects
from rankscope.operator.kube.object_writer import ObjectWriter, Outbox
from rankscope.operator.kube.objects import RunObject
from rankscope.operator.kube.resources import TrainingRunStatus
from rankscope.operator.process import Part, Pulse, operator_server, tune_garbage_collection
from rankscope.operator.runs.daemon_sources import DaemonList, DaemonSource
from rankscope.operator.runs.inventory import RunNodes
from rankscope.v1.profile_service_pb2 import DumpStacksResponse

if TYPE_CHECKING:
    from rankscope.operator.certificates.rotation import CertificateRotation
    from rankscope.operator.webhooks.webhooks import Webhooks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorrelatorSettings:
    sources: Sequence[DaemonSource]
    state_folder: Path
    api_host: str = "127.0.0.1"
    api_port: int = 0
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    # Certificate, key and authority: for daemons and for callers. Without them, everything is on this machine.
    tls_files: tuple[Path, Path, Path] | None = None
    metrics_tls: bool = False
    console: ConsoleSettings | None = None
    alert_host: str = "127.0.0.1"
    alert_port: int = 0
    alert_token: bytes = b""  # none: no receiver
    mfu_target: float | None = None
    settling_seconds: float = SETTLING_SECONDS


class CorrelatorRuntime:
    """Runs from `start` to `stop`. Raises ValueError or OSError for settings that cannot be used."""

    def __init__(self, settings: CorrelatorSettings) -> None:
        self.settings = settings
        shown = None if settings.tls_files is None else files(*settings.tls_files)
        tls = None if shown is None else FollowedTls(shown)
        self._has_tls = tls is not None
        self._refused: frozenset[str] = frozenset()
        self._objects = LocalObjects(settings.state_folder)
        self.leases = SoleReplica(settings.settling_seconds)
        self.outbox = Outbox()
        self.audit = CaptureAudit(names_are_stamped=True)

        # From the list of daemons to verdicts.
        self.listed = DaemonList(settings.sources)
        alerts = None
        if settings.alert_token:
            alerts = AlertSettings(settings.alert_host, settings.alert_port, settings.alert_token, tls)
        policy = replace(DEFAULT_POLICY, mfu_target_ratio=settings.mfu_target)
        hangs = HangStore(FolderFiles(settings.state_folder / "hangs"))
        self.jobs = JobWatch(policy, self._capture, self._dump, hangs, alerts, shown)
        self.daemons, self.streams, self.binding = self.jobs.daemons, self.jobs.streams, self.jobs.binding

        # Captures.
        calls = DaemonCalls(shown)
        self.captures = CapturesController(
            self._objects,
            ObjectWriter(self._objects, self.outbox, self.leases),
            self.leases,
            calls,
            self.jobs.states_by_job,
            self._addresses,
            audit=self.audit,
            policy_of=lambda job: policy,
        )
        self._runs = runs = ReportedRuns(self.jobs)
        self._relay = ProfileRelay(calls, self._addresses)
        self._by_alert = AlertCaptures(runs, CaptureMaker(self._objects, self.captures.watched), self.leases)

        # Servers.
        authentication = CertificateAuthentication(self._has_tls)
        self.user_api: UserApi | None = UserApi(
            self._objects,
            UserApiSettings(settings.api_host, settings.api_port, needs_certificates=self._has_tls),
            authentication,
            self.captures.watched,
            runs,
            UserJobs(lambda: self.jobs.correlator.states, hangs, self.jobs.reports, self.audit, has_namespaces=False),
            calls,
            self._addresses,
            self._relay,
            self.audit,
            tls,
            has_namespaces=False,
            plain_runs=lambda: self.jobs.states_by_job().keys(),
        )
        self.webhooks: Webhooks | None = None
        self.certificates: CertificateRotation | None = None
        metrics_tls = tls if settings.metrics_tls else None
        guard = None if metrics_tls is None else CertificateMetricsGuard()
        exporter = self.jobs.exporter(self)
        host, port = settings.listen_host, settings.listen_port
        try:
            self.server = operator_server(host, port, self, [exporter], metrics_tls, guard)
        except OSError as error:
            raise ValueError(f"--listen {host}:{port}: {error.strerror or error}; pass another address") from error
        self.console: Console | None = None
        if settings.console is not None:
            history = History(self.jobs.lost)
            self.jobs.correlator.listen(history)
            self.jobs.reports.use(settings.console.prometheus_url)
            self.console = Console(
                settings.console,
                history,
                authentication,
                self.audit,
                self.user_api.handlers,
                shown,
                needs_certificates=True,
            )
        self._pulse = Pulse([self._follow, self.captures.reconcile])

    @property
    def is_ready(self) -> bool:
        return self.listed.is_complete and self.captures.watched.listed.is_set()

    @property
    def api_address(self) -> str:
        assert self.user_api is not None
        return self.user_api.server.address

    @property
    def addresses(self) -> str:
        named = {
            "metrics": f"{self.server.url}/metrics",
            "api": self.api_address,
            "console": None if self.console is None else self.console.url,
            "alerts": self.jobs.alerts_url,
        }
        return ", ".join(f"{name} {what}" for name, what in named.items() if what)

    @property
    def _parts(self) -> Sequence[Part]:
        """In the order in which they are started. They are stopped in reverse."""
        assert self.user_api is not None
        every = (self.server, self.jobs, self.listed, self.captures.watched, self.user_api, self.console)
        return [part for part in every if part is not None]

    def start(self) -> None:
        tune_garbage_collection()
        for part in self._parts:
            part.start()
        self._pulse.start()

    def stop(self) -> None:
        self._pulse.stop()
        self.captures.stop()
        for part in reversed(self._parts):
            part.stop()
        self._objects.close()

    def _capture(self, wanted: Wanted) -> str:
        return self._by_alert.start(wanted)

    def _dump(self, job: str) -> DumpStacksResponse:
        return self._relay.dump_hang(JobNodes(job, self._runs.nodes_of(job)))

    def _addresses(self) -> Mapping[str, str]:
        """Node to its daemon's HOST:PORT."""
        return self.daemons.addresses

    def _follow(self) -> None:
        addresses = self.listed.addresses
        if not self._has_tls:
            # Nobody knows who answers there.
            refused = frozenset(each for each in addresses if not is_loopback(each.rpartition(":")[0].strip("[]")))
            if refused - self._refused:
                log.warning(
                    "%d daemons are not on this machine, and there is no TLS: they are left out; pass "
                    "--tls-certificate, --tls-key and --tls-authority",
                    len(refused),
                )
            self._refused, addresses = refused, addresses - refused
        self.jobs.follow(addresses)


class ReportedRuns:
    """Runs that report now, in place of TrainingRun objects."""

    is_listed = True

    def __init__(self, jobs: JobWatch) -> None:
        self._jobs = jobs

    def nodes_of(self, job: str) -> RunNodes:
        state = self._jobs.states_by_job().get(job)
        owners = {} if state is None else {rank: identity.node for rank, identity in state.identities.items()}
        return RunNodes(dict.fromkeys(owners.values(), frozenset()), owners)

    def object_of(self, namespace: str, name: str) -> RunObject | None:
        if namespace or name not in self._jobs.states_by_job():
            return None
        return RunObject(
            namespace="",
            name=name,
            uid=name,
            generation=0,
            version="",
            deleting=False,
            is_ours=True,
            workload_uid="",
            mfu_target=None,
            status=TrainingRunStatus(),
        )
