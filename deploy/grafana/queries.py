"""PromQL that several panels share. In a join, the side that must be unique is always an aggregation: a container that
claims to be somebody else's rank must not make a panel fail (many-to-many matching)."""

from __future__ import annotations

from deploy.grafana.panels import BAD, GOOD, NOTICE, WARN, Threshold
from rankscope.analysis.verdicts.thresholds import ALERT_THRESHOLDS, DEFAULT_POLICY

RATE = "[$__rate_interval]"
RUN = "cluster, run_namespace, run"  # the labels that tell runs apart
# What the variable chooses, or no label: outside Kubernetes there is no namespace, and often there is no cluster.
CLUSTER = 'cluster=~"$cluster|"'
JOBS = f'{CLUSTER},run_namespace=~"$run_namespace|"'
JOB = f'{JOBS},run="$run"'
ONE_RANK = f'{JOB},rank="$rank"'

AGAINST_COHORT: tuple[Threshold, ...] = (
    (None, GOOD),
    (DEFAULT_POLICY.device_rank_ratio, NOTICE),
    (DEFAULT_POLICY.rank_ratio, WARN),
    (DEFAULT_POLICY.starved_rank_ratio, BAD),
)
IMPACT: tuple[Threshold, ...] = (
    (None, GOOD),
    (DEFAULT_POLICY.impact_ratio, WARN),
    (ALERT_THRESHOLDS.paging_impact_ratio, BAD),
)
EXPOSED: tuple[Threshold, ...] = (
    (None, GOOD),
    (0.2, NOTICE),
    (ALERT_THRESHOLDS.exposed_communication_ratio, WARN),
    (0.5, BAD),
)
SEVERITIES = {"none": GOOD, "warning": WARN, "alarm": BAD}
# The parts that make up a step and do not overlap.
PARTS = "input|forward|backward|optimizer|checkpoint|other|wait"


def with_cohort(value: str, ranks: str = JOB) -> str:
    """`value`, of which every rank has one, with the pipeline stage as a label."""
    info = f"group by ({RUN}, rank, pipeline) (rankscope_rank_info{{{ranks}}})"
    return f"({info} * on ({RUN}, rank) group_left () max by ({RUN}, rank) ({value}))"


def self_seconds(values: str = JOB, members: str = JOB) -> str:
    """Self time of each rank; of one that does not know it, the step less what its groups say that it waits."""
    known = f'max by ({RUN}, rank) (rankscope_rank_self_seconds{{{values},stat="p50"}})'
    return f"({known} or clamp_min({_step_seconds(values)} - {_group_wait(values, members)}, 0))"


def _step_seconds(values: str) -> str:
    return f'max by ({RUN}, rank) (rankscope_rank_step_seconds{{{values},stat="p50"}})'


def _group_wait(values: str, members: str) -> str:
    """What each rank that is timed on a device waits in a step, as rules/recording.yaml has it. `members` chooses all
    ranks of the groups."""
    spans = 'rankscope_rank_group_seconds{%s,kind=~"%s"}'
    counted = f"max by ({RUN}, rank, group, kind) ({spans % (values, 'exposed|ddp|point_to_point')})"
    compared = f"max by ({RUN}, rank, group, kind) ({spans % (values, 'overlapped|recorder|nccl')})"
    least = f"min by ({RUN}, group, kind) ({spans % (members, 'overlapped|recorder|nccl')})"
    return f"sum by ({RUN}, rank) ({counted} or ({compared} - on ({RUN}, group, kind) group_left () {least}))"


def self_ratio(values: str = JOB, ranks: str = JOB) -> str:
    """Self time of each rank against the median of its pipeline stage, or of the job where stages are not known."""
    own = with_cohort(self_seconds(values, values), ranks)
    return f"{own} / on ({RUN}, pipeline) group_left () quantile by ({RUN}, pipeline) (0.5, {own})"


def cohort_of_rank(value: str) -> str:
    """`value` of the ranks that are in the same pipeline stage as the chosen one, itself included."""
    return f"{with_cohort(value)} and on ({RUN}, pipeline) rankscope_rank_info{{{ONE_RANK}}}"


def wait_ratio(values: str = JOB, members: str = JOB) -> str:
    """Share of its time that each rank waits for others."""
    wait = f'max by ({RUN}, rank) (rate(rankscope_rank_cause_seconds_total{{{values},cause="wait"}}{RATE}))'
    own = f'max by ({RUN}, rank) (rate(rankscope_rank_cause_seconds_total{{{values},cause="self"}}{RATE}))'
    on_device = f"clamp_max({_group_wait(values, members)} / {_step_seconds(values)}, 1)"
    return f"({wait} / ({wait} + {own}) or {on_device})"


def seconds_per_step(labels: str) -> str:
    """Of each part of the step, on the average over the ranks that the labels choose."""
    causes = f'sum by (cause) (rate(rankscope_rank_cause_seconds_total{{{labels},cause=~"{PARTS}"}}{RATE}))'
    return f"{causes} / on () group_left () (sum (rate(rankscope_rank_steps_total{{{labels}}}{RATE})) > 0)"


def judged(name: str, alone: str, job: str = JOB) -> str:
    """What the correlation says about a job; where there is none, what the daemons' metrics alone tell."""
    return f"max by ({RUN}) (rankscope_job_{name}{{{job}}}) or {alone}"


def with_place(value: str) -> str:
    """`value` of runs, with a cluster and a namespace even where there are none: a link cannot pass on a label that is
    missing, and "none" chooses what has none."""
    for label in ("run_namespace", "cluster"):
        value = f'label_replace({value}, "{label}", "none", "{label}", "")'
    return value


def gpu_of_rank(value: str) -> str:
    return f'{value} and on (cluster, gpu) rankscope_rank_info{{{ONE_RANK},gpu!=""}}'


def gpus_of_job(value: str) -> str:
    return f'{value} and on (cluster, gpu) rankscope_rank_info{{{JOB},gpu!=""}}'
