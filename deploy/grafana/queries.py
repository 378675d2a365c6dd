"""PromQL that several panels share. In a join, the side that must be unique is always an aggregation: a container that
claims to be somebody else's rank must not make a panel fail (many-to-many matching)."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

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
_GROUPS = yaml.safe_load((Path(__file__).resolve().parents[2] / "rules" / "recording.yaml").read_text())["groups"]
_RULES = {rule["record"]: " ".join(rule["expr"].split()) for group in _GROUPS for rule in group["rules"]}
# The parts that make up a step and do not overlap.
PARTS = "input|forward|backward|optimizer|checkpoint|other|wait"


def recorded(name: str, ranks: str = JOB) -> str:
    """What a recording rule computes, of the chosen ranks, from their latest samples instead of two minutes of them. So
    dashboards do not need the rules."""

    def chosen(found: re.Match[str]) -> str:
        labels = ",".join(filter(None, (ranks, found[2])))
        return f"({recorded(found[1], labels)})" if ":" in found[1] else f"{found[1]}{{{labels}}}"

    latest = re.sub(r"(?:quantile_over_time\(0\.5, |last_over_time\()([^\[]+)\[\w+\]\)", r"\1", _RULES[name])
    return re.sub(r"([a-z]+:\w+:\w+|rankscope_\w+)(?:\{([^}]*)\})?", chosen, latest)


def self_seconds(ranks: str = JOB) -> str:
    """Self time of each rank, with its pipeline stage as a label."""
    return f"({recorded('rank:rankscope_rank_self_seconds:median2m', ranks)})"


def self_ratio(ranks: str = JOB) -> str:
    """Self time of each rank against the median of its pipeline stage, or of the job where stages are not known."""
    own = self_seconds(ranks)
    return f"{own} / on ({RUN}, pipeline) group_left () quantile by ({RUN}, pipeline) (0.5, {own})"


def of_rank(value: str) -> str:
    """`value` of the chosen rank, where the other ranks are needed to compute it."""
    return f"({value} and on ({RUN}, rank) rankscope_rank_info{{{ONE_RANK}}})"


def cohort_of_rank(value: str) -> str:
    """`value` of the ranks that are in the same pipeline stage as the chosen one, itself included."""
    info = f"group by ({RUN}, rank, pipeline) (rankscope_rank_info{{{JOB}}})"
    with_stage = f"({info} * on ({RUN}, rank) group_left () max by ({RUN}, rank) ({value}))"
    return f"{with_stage} and on ({RUN}, pipeline) rankscope_rank_info{{{ONE_RANK}}}"


def wait_ratio(ranks: str = JOB) -> str:
    """Share of its time that each rank waits for others."""
    wait = f'max by ({RUN}, rank) (rate(rankscope_rank_cause_seconds_total{{{ranks},cause="wait"}}{RATE}))'
    own = f'max by ({RUN}, rank) (rate(rankscope_rank_cause_seconds_total{{{ranks},cause="self"}}{RATE}))'
    step = f'max by ({RUN}, rank) (rankscope_rank_step_seconds{{{ranks},stat="p50"}})'
    on_device = f"clamp_max({recorded('rank:rankscope_rank_group_wait_seconds:sum', ranks)} / {step}, 1)"
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
