"""The operator's metrics: the table and the exporter. `rankscope up` exports those of jobs and alerts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rankscope.analysis.step_graph.step_breakdown import GROUP_KINDS, PARTS
from rankscope.analysis.verdicts.verdict import FINDINGS, Confidence, Kind, Severity, Verdict, named_line
from rankscope.common.metric_table import ANY, Counter, Gauge, Section, label
from rankscope.common.run_names import run_labels
from rankscope.operator.alerts.decision import Result
from rankscope.operator.correlation.correlator import JobState, LostSeconds

if TYPE_CHECKING:  # `rankscope up` has no Kubernetes client
    from rankscope.operator.access.api_server import UserApi
    from rankscope.operator.certificates.rotation import CertificateRotation
    from rankscope.operator.kube.leader_election import Leases
    from rankscope.operator.kube.object_writer import Outbox
    from rankscope.operator.runs.daemon_streams import DaemonStreams
    from rankscope.operator.runs.rank_binding import Binding
    from rankscope.operator.webhooks.webhooks import Webhooks

# Limits of one scrape. Jobs with findings come first; jobs that are cut are counted.
JOBS_SHOWN = 4096
CULPRITS_SHOWN = 16
REFUSAL_REASONS = ("jobs", "other_node", "rank", "rank_taken", "ranks", "rate", "size", "unknown_pod", "unreadable")
_SEVERITIES = {Severity.ALARM: 0, Severity.WARNING: 1, Severity.NONE: 2}


@dataclass(frozen=True)
class _Jobs:
    judged: int
    cut: int


# fmt: off
JOB_COUNTS: Section[_Jobs] = Section((), (
    Gauge("rankscope_jobs", "Jobs that are judged.", lambda jobs: jobs.judged),
    Gauge("rankscope_jobs_cut", "Jobs that are judged but have no series here.", lambda jobs: jobs.cut),
))
# fmt: on


@dataclass(frozen=True)
class _Job:
    state: JobState
    mfu_target_ratio: float | None
    lost_gpu_seconds: Mapping[Kind, float]
    hangs_total: int

    @property
    def verdict(self) -> Verdict:
        return self.state.verdict

    @property
    def hangs(self) -> bool:
        """The pace of a hanging job is not shown: the last known value would look like progress."""
        return self.verdict.kind is Kind.HANG

    @property
    def has_finding(self) -> bool:
        return self.verdict.kind.is_finding and self.verdict.severity is not Severity.NONE


# fmt: off
JOBS: Section[_Job] = Section(("run_namespace", "run"), (
    Gauge("rankscope_job_info",
        "Size of a job, what it runs and for whom, value 1. command: program and script of its lowest rank, without "
        "arguments. A label is empty where it is not known.", lambda job: _info(job.state),
        dict.fromkeys(("world_size", "team", "user", "image", "command"), ANY)),
    Gauge("rankscope_job_verdict", "The current verdict, value 1.",
        lambda job: {(job.verdict.kind.value, job.verdict.severity.value, job.verdict.confidence.value): 1},
        {
            "verdict": tuple(kind.value for kind in Kind),
            "severity": tuple(severity.value for severity in Severity),
            "confidence": tuple(confidence.value for confidence in Confidence),
        }),
    Gauge("rankscope_job_ranks", "Ranks of a job: expected, and reporting at the last tick.",
        lambda job: {"expected": job.state.world_size, "reporting": job.state.ranks_seen},
        {"state": ("expected", "reporting")}),
    Gauge("rankscope_job_step_seconds", "Step time, median of the ranks. Absent while the job hangs.",
        lambda job: None if job.hangs else job.state.step_seconds),
    Gauge("rankscope_job_mfu_ratio", "Model FLOPs utilisation, median of the ranks. Absent while the job hangs.",
        lambda job: None if job.hangs else job.state.mfu_ratio),
    Gauge("rankscope_job_exposed_communication_ratio",
        "Share of the step spent waiting on others, mean of the ranks. Absent while the job hangs.",
        lambda job: None if job.hangs else job.state.exposed_communication_ratio),
    Gauge("rankscope_job_step_part_seconds",
        "Parts of a step on the critical path, means of the last windows. They add up to the step. stage: of own work, "
        "where there are several; kind of the groups: of communication. Absent of a job that is judged by sums, and "
        "while the job hangs.",
        lambda job: None if job.hangs else _step_parts(job.state),
        {"part": PARTS, "stage": ANY, "kind": ANY}),
    Gauge("rankscope_job_communication_bus_bandwidth_bytes_per_second",
        "Bus bandwidth of groups of a kind while they transfer, as nccl-tests count it, mean of the last windows.",
        lambda job: None if job.hangs else _bus_bandwidths(job.state), {"kind": GROUP_KINDS}),
    Counter("rankscope_job_communication_bytes_total",
        "Bytes that a rank transfers in groups of a kind, mean of such ranks. Steps that were not looked at count as "
        "those before.", lambda job: _totals(job.state, "bytes"), {"kind": GROUP_KINDS}),
    Counter("rankscope_job_communication_transfer_seconds_total",
        "Time that a rank transfers in groups of a kind, after the last rank has arrived; hidden or not.",
        lambda job: _totals(job.state, "transfer_seconds"), {"kind": GROUP_KINDS}),
    Counter("rankscope_job_communication_exposed_seconds_total",
        "Time in which the critical path transfers in groups of a kind.",
        lambda job: _totals(job.state, "exposed_seconds"), {"kind": GROUP_KINDS}),
    Gauge("rankscope_job_mfu_target_ratio", "MFU below which low_mfu is raised, where it was given.",
        lambda job: job.mfu_target_ratio),
    Counter("rankscope_job_lost_gpu_seconds_total",
        "GPU time that findings cost since the job was first seen, by kind of finding: their impact times ranks and "
        "time. Restarts of the job do not reset it.",
        lambda job: {kind.value: lost for kind, lost in job.lost_gpu_seconds.items()},
        {"verdict": tuple(kind.value for kind in FINDINGS)}),
    Counter("rankscope_job_hangs_total",
        "Hangs since the job was first seen. `rankscope hangs` shows the reports.", lambda job: job.hangs_total),
    Gauge("rankscope_job_impact_ratio",
        "Share of the job's time that the current finding costs.",
        lambda job: job.verdict.impact_ratio if job.has_finding else None),
    Gauge("rankscope_job_culprit_stage", "Number of the pipeline stage that the verdict names.",
        lambda job: job.verdict.stage if job.has_finding else None),
    Gauge("rankscope_job_culprit",
        f"A rank that the verdict names, value 1, while it warns or alarms; at most {CULPRITS_SHOWN} of a job. "
        "`bound`: `host` or `device`, where steps are timed on a GPU.",
        lambda job: _culprits(job.state) if job.has_finding else None,
        dict.fromkeys(("rank", "node", "run_pod", "phase", "bound", "verdict"), ANY)),
    Gauge("rankscope_job_source_line",
        "The line of code that the verdict names, as in `model.py:88 (normalize)`, value 1, while it warns or alarms; "
        "at most one of a job. Absent where a GPU, a lack of CPU or the network is the cause.",
        lambda job: _source_line(job.verdict) if job.has_finding else None, {"line": ANY}),
))

ALERTS: Section[Mapping[Result, int]] = Section((), (
    Counter("rankscope_alert_captures_total", "Alerts that request a capture, by result.",
        lambda totals: {result.value: total for result, total in totals.items()},
        {"result": tuple(result.value for result in Result)}),
))
# fmt: on


class Addresses(Protocol):
    @property
    def addresses(self) -> Collection[str]: ...


class OperatorView(Protocol):
    """What is exported of the operator. A part that is turned off is None."""

    @property
    def leases(self) -> Leases: ...

    @property
    def daemons(self) -> Addresses: ...

    streams: DaemonStreams
    outbox: Outbox
    binding: Binding
    webhooks: Webhooks | None
    certificates: CertificateRotation | None
    user_api: UserApi | None


# fmt: off
OPERATOR: Section[OperatorView] = Section((), (
    Gauge("rankscope_operator_shards_held", "Shards of runs that this replica acts for.", lambda o: len(o.leases.held)),
    Gauge("rankscope_operator_daemons", "Daemons in the cluster.", lambda o: len(o.daemons.addresses)),
    Gauge("rankscope_operator_daemons_connected", "Daemons that send windows.",
        lambda o: len(o.streams.connected)),
    Gauge("rankscope_operator_writes_waiting", "Writes that wait for the API server.", lambda o: o.outbox.waiting),
    Counter("rankscope_operator_messages_total", "Messages received from daemons.", lambda o: o.streams.messages_total),
    Counter("rankscope_operator_writes_total", "Objects written to the API server.", lambda o: o.outbox.written_total),
    Counter("rankscope_operator_writes_failed_total", "Writes that the API server refused.",
        lambda o: o.outbox.failed_total),
    Counter("rankscope_operator_windows_refused_total",
        "Windows that were refused: of a pod on another node, of no pod, or too many.",
        lambda o: dict(sorted(o.binding.refusals.counts.items())), {"reason": REFUSAL_REASONS}),
))

WEBHOOKS: Section[Webhooks] = Section((), (
    Counter("rankscope_operator_reviews_total",
        "Admission reviews, by webhook (inject, stamp, status, validate) and result.",
        lambda webhooks: webhooks.admission.counts.copy(), {"webhook": ANY, "result": ANY}),
    Gauge("rankscope_operator_certificate_expiry_timestamp_seconds",
        "When the webhook certificate expires.", lambda webhooks: webhooks.expires_unix),
))

CERTIFICATES: Section[CertificateRotation] = Section((), (
    Gauge("rankscope_operator_fleet_certificate_expiry_timestamp_seconds",
        "When the first of this replica's certificates for daemons and callers expires.",
        lambda certificates: certificates.expires_unix),
))

API: Section[UserApi] = Section((), (
    Counter("rankscope_operator_api_calls_total",
        "Calls of the user API, by method and gRPC status code. Each refused caller is logged once.",
        lambda api: api.calls.copy(), {"method": ANY, "code": ANY}),
))
# fmt: on

TABLE = (JOB_COUNTS, JOBS, ALERTS, OPERATOR, WEBHOOKS, CERTIFICATES, API)


class Exporter(Collector):
    """`lost` has to be called after every evaluation, or changes between scrapes are missed. `alert_totals` and
    `operator` are None if there is no alert receiver or no operator."""

    def __init__(
        self,
        states: Callable[[], Sequence[JobState]],
        lost: LostSeconds,
        mfu_target_of: Callable[[str], float | None],
        hangs_of: Callable[[str], int],
        alert_totals: Callable[[], Mapping[Result, int]] | None = None,
        operator: OperatorView | None = None,
    ) -> None:
        self._states = states
        self._lost = lost
        self._mfu_target_of = mfu_target_of
        self._hangs_of = hangs_of
        self._alert_totals = alert_totals
        self._operator = operator

    def collect(self) -> Iterable[Family]:
        states = self._states()
        jobs: dict[tuple[str, ...], JobState] = {}
        for state in sorted(states, key=lambda state: _SEVERITIES[state.verdict.severity]):
            # Of two names with the same label, the first is shown.
            if len(jobs) < JOBS_SHOWN:
                jobs.setdefault(tuple(map(label, run_labels(state.job).values())), state)
        yield from JOB_COUNTS.of(_Jobs(len(states), len(states) - len(jobs)))
        yield from JOBS.families((labels, self._job(state)) for labels, state in jobs.items())
        if self._alert_totals is not None:
            yield from ALERTS.of(self._alert_totals())
        if self._operator is not None:
            yield from OPERATOR.of(self._operator)
            yield from WEBHOOKS.of(self._operator.webhooks)
            yield from CERTIFICATES.of(self._operator.certificates)
            yield from API.of(self._operator.user_api)

    def _job(self, state: JobState) -> _Job:
        job = state.job
        return _Job(state, self._mfu_target_of(job), self._lost.by_verdict(job), self._hangs_of(job))

    def describe(self) -> Iterable[Family]:
        return ()  # registering must not scrape


def _info(state: JobState) -> Mapping[tuple[str, ...], float]:
    program = state.program
    return {(str(state.world_size), program.team, program.user, program.image, program.command): 1}


def _step_parts(state: JobState) -> Mapping[tuple[str, ...], float]:
    parts = state.breakdown.parts if state.breakdown is not None else ()
    return {(p.part, "" if p.stage is None else str(p.stage), p.group_kind): p.seconds for p in parts}


def _bus_bandwidths(state: JobState) -> Mapping[str, float | None]:
    traffic = state.breakdown.traffic if state.breakdown is not None else ()
    return {each.group_kind: each.bus_bytes_per_second for each in traffic}


def _totals(state: JobState, name: str) -> Mapping[str, float]:
    totals = state.breakdown.totals if state.breakdown is not None else {}
    return {kind: getattr(total, name) for kind, total in totals.items()}


def _source_line(verdict: Verdict) -> Mapping[str, float]:
    line = named_line(verdict)
    return {line: 1} if line else {}


def _culprits(state: JobState) -> Mapping[tuple[str, ...], float]:
    verdict, identities = state.verdict, state.identities
    culprits: dict[tuple[str, ...], float] = {}
    for rank in islice(dict.fromkeys(verdict.culprits), CULPRITS_SHOWN):
        identity = identities.get(rank)
        place = (identity.node, identity.pod_name or identity.pod) if identity else ("", "")
        labels = (str(rank), *place, verdict.cause.phase, verdict.cause.bound, verdict.kind.value)
        culprits[labels] = 1
    return culprits
