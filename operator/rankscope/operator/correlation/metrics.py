"""What the correlation says about each job, as Prometheus metrics. What was not measured has no series."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.analysis.verdicts.verdict import Kind, Severity
from rankscope.common.text import printable
from rankscope.operator.correlation.correlator import JobState, LostSeconds

# What one scrape may hold. Jobs with findings are shown before the others; what is cut is counted.
JOBS_SHOWN = 4096
CULPRITS_SHOWN = 16
LABEL_CHARACTERS = 128

_SEVERITIES = {Severity.ALARM: 0, Severity.WARNING: 1, Severity.NONE: 2}


class JobExporter(Collector):
    """`states` gives all jobs; `lost` has to be told of every evaluation, or what happens between scrapes is missed."""

    def __init__(
        self,
        states: Callable[[], tuple[JobState, ...]],
        lost: LostSeconds,
        mfu_target_ratio: float | None = None,
        mfu_target_of: Callable[[str], float | None] | None = None,
    ) -> None:
        """`mfu_target_of` gives each job its own, in place of the one for all."""
        self._states = states
        self._lost = lost
        self._mfu_target_of = mfu_target_of or (lambda job: mfu_target_ratio)

    def collect(self) -> Iterable[Metric]:
        states = self._states()
        families = _Families()
        shown: set[str] = set()
        for state in sorted(states, key=lambda state: _SEVERITIES[state.verdict.severity]):
            job = label(state.job)
            # One series twice makes Prometheus refuse the whole scrape, so the first of two names that look alike wins.
            if job not in shown and len(shown) < JOBS_SHOWN:
                shown.add(job)
                self._add(families, state, {"job": job, "namespace": label(_namespace(state))})
        yield GaugeMetricFamily("rankscope_jobs", "Jobs that are judged.", value=len(states))
        yield GaugeMetricFamily(
            "rankscope_jobs_cut", "Jobs that are judged but have no series here.", value=len(states) - len(shown)
        )
        yield from families.made.values()

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not scrape

    def _add(self, families: _Families, state: JobState, job: Mapping[str, str]) -> None:
        verdict = state.verdict
        families.gauge("info", "Size of a job, value 1.", {**job, "world_size": str(state.world_size)}, 1)
        opinion = {
            "verdict": verdict.kind.value,
            "severity": verdict.severity.value,
            "confidence": verdict.confidence.value,
        }
        families.gauge("verdict", "The verdict that stands, value 1.", {**job, **opinion}, 1)
        for expectation, ranks in (("expected", state.world_size), ("reporting", state.ranks_seen)):
            text = "Ranks of a job: how many there should be, and how many the last tick heard of."
            families.gauge("ranks", text, {**job, "state": expectation}, ranks)
        # A job that hangs has no pace; what was last known would read as if it went on.
        pace = state if verdict.kind is not Kind.HANG else None
        for name, text in (
            ("step_seconds", "Step time, median of the ranks. Absent while the job hangs."),
            ("mfu_ratio", "Model FLOPs utilisation, median of the ranks. Absent while the job hangs."),
            (
                "exposed_communication_ratio",
                "Share of the step spent waiting on others, mean of the ranks. Absent while the job hangs.",
            ),
        ):
            families.gauge(name, text, job, None if pace is None else getattr(pace, name))
        text = "MFU below which low_mfu is raised, where it was given."
        families.gauge("mfu_target_ratio", text, job, self._mfu_target_of(state.job))
        text = (
            "GPU time that findings cost since the job was first seen: their impact times ranks and time. Restarts of "
            "the job do not reset it."
        )
        families.counter("lost_gpu_seconds", text, job, self._lost.of(state.job))
        if verdict.kind.is_finding and verdict.severity is not Severity.NONE:
            _add_finding(families, state, job)


def _add_finding(families: _Families, state: JobState, job: Mapping[str, str]) -> None:
    verdict = state.verdict
    text = "Share of the job's time that would come back without the finding, while one stands."
    families.gauge("impact_ratio", text, job, verdict.impact_ratio)
    families.gauge("culprit_stage", "Number of the pipeline stage that the verdict names.", job, verdict.stage)
    identities = state.identities
    for rank in islice(dict.fromkeys(verdict.culprits), CULPRITS_SHOWN):
        identity = identities.get(rank)
        labels = {
            **job,
            "rank": str(rank),
            "node": label(identity.node) if identity else "",
            "pod": label(identity.pod) if identity else "",
            "phase": label(verdict.cause.phase),
            "bound": label(verdict.cause.bound),
            "verdict": verdict.kind.value,
        }
        text = (
            f"A rank that the verdict names, value 1, while it warns or alarms; at most {CULPRITS_SHOWN} of a job. "
            "`bound`: `host` or `device`, where steps are timed on a GPU."
        )
        families.gauge("culprit", text, labels, 1)


def _namespace(state: JobState) -> str:
    return next((identity.namespace for identity in state.identities.values() if identity.namespace), "")


def label(text: str) -> str:
    """One printable line of limited length: names of jobs, nodes and pods are other people's words."""
    return printable(text, LABEL_CHARACTERS)


class _Families:
    """Metric families of jobs, made when the first sample comes."""

    def __init__(self) -> None:
        self.made: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def gauge(self, name: str, text: str, labels: Mapping[str, str], value: float | None) -> None:
        if value is not None:
            family = self.made.get(name) or GaugeMetricFamily(f"rankscope_job_{name}", text, labels=list(labels))
            self._add(name, family, labels, value)

    def counter(self, name: str, text: str, labels: Mapping[str, str], value: float) -> None:
        family = self.made.get(name) or CounterMetricFamily(f"rankscope_job_{name}", text, labels=list(labels))
        self._add(name, family, labels, value)

    def _add(
        self, name: str, family: GaugeMetricFamily | CounterMetricFamily, labels: Mapping[str, str], value: float
    ) -> None:
        self.made[name] = family
        family.add_metric(list(labels.values()), value)
