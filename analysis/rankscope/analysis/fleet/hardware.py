"""Nodes and GPUs that are culprits again and again.

A verdict that names a rank once says little about its machine: the job may be at fault. A node is listed if it is the
culprit of several runs, of a larger share of its runs than other nodes of theirs, and more often than by chance. Only
verdicts that blame a device count: late input, a slow line of code and a process without CPU are not the hardware's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.analysis.fleet.facts import CULPRIT_LABELS, RUN_LABELS, Figures, FleetFacts, RunKey, run_title
from rankscope.analysis.verdicts.thresholds import FleetThresholds
from rankscope.analysis.verdicts.verdict import DEVICE

THROTTLED = "throttled"
Node = tuple[str, str]  # cluster, node


@dataclass(frozen=True)
class Evidence:
    """Verdicts of one kind and cause."""

    verdict: str
    phase: str
    bound: str
    gpu_hours: float


@dataclass(frozen=True)
class Suspect:
    cluster: str
    node: str
    gpu: str  # of the node, if one has nearly all of the time; else empty
    culprit_of: tuple[str, ...]  # runs
    runs: int  # of the node
    named_gpu_hours: float  # in which verdicts name its devices
    lost_gpu_hours: float
    peers_ratio: float  # share of their runs of which the other nodes are culprits
    chance_ratio: float  # that some node of the fleet is a culprit so often by chance
    evidence: tuple[Evidence, ...]  # the longest first


def find_suspects(facts: FleetFacts, thresholds: FleetThresholds) -> tuple[Suspect, ...]:
    """The most GPU-hours lost first."""
    blamed = _blamed(facts.culprits)
    culprit_of = _culprit_runs(blamed, thresholds.culprit_hours)
    hosted = _hosted_runs(facts, culprit_of)
    all_culprits = sum(map(len, culprit_of.values()))
    all_runs = sum(map(len, hosted.values()))
    lost = _lost_by_node(facts, culprit_of)
    found = []
    for node, runs in culprit_of.items():
        if len(runs) < thresholds.culprit_runs:
            continue
        count, hosts = len(runs), len(hosted[node])
        # Half a run more, so that a fleet without any other culprit has a share too.
        peers_ratio = (all_culprits - count + 0.5) / (all_runs - hosts + 1.0)
        chance = min(1.0, len(hosted) * binomial_tail(count, hosts, peers_ratio))
        is_more = count / hosts >= thresholds.culprit_excess * peers_ratio
        if not is_more or chance > thresholds.culprit_chance:
            continue
        hours = _hours_of(blamed, node)
        found.append(
            Suspect(
                *node,
                gpu=_one_gpu(hours, thresholds.culprit_gpu_share),
                culprit_of=tuple(sorted(map(run_title, runs))),
                runs=hosts,
                named_gpu_hours=hours.total,
                lost_gpu_hours=lost.get(node, 0.0),
                peers_ratio=peers_ratio,
                chance_ratio=chance,
                evidence=_evidence(hours),
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.lost_gpu_hours, -one.named_gpu_hours, one.cluster, one.node)))


def is_of_device(phase: str, bound: str) -> bool:
    return bound == DEVICE or phase == THROTTLED


def binomial_tail(count: int, trials: int, probability: float) -> float:
    """That at least `count` of so many trials succeed."""
    if count <= 0 or probability >= 1.0:
        return 1.0
    if probability <= 0.0 or count > trials:
        return 0.0
    terms = (
        math.exp(
            math.lgamma(trials + 1)
            - math.lgamma(k + 1)
            - math.lgamma(trials - k + 1)
            + k * math.log(probability)
            + (trials - k) * math.log1p(-probability)
        )
        for k in range(count, trials + 1)
    )
    return min(1.0, math.fsum(terms))


def _blamed(culprits: Figures) -> Figures:
    """Verdicts that blame a device of a known node."""
    rows = {
        key: hours
        for key, hours in culprits.sums(*CULPRIT_LABELS).items()
        if key[3] and is_of_device(*key[5:7]) and hours > 0
    }
    return Figures.of(CULPRIT_LABELS, rows)


def _culprit_runs(blamed: Figures, least_hours: float) -> dict[Node, set[RunKey]]:
    """Hours of a node are those of its GPU that is named longest: a verdict may name all of them at once."""
    by_gpu = Figures.of((*RUN_LABELS, "node", "gpu"), blamed.sums(*RUN_LABELS, "node", "gpu"))
    found: dict[Node, set[RunKey]] = {}
    for (cluster, namespace, run, node), hours in by_gpu.most(*RUN_LABELS, "node").items():
        if hours >= least_hours:
            found.setdefault((cluster, node), set()).add((cluster, namespace, run))
    return found


def _hosted_runs(facts: FleetFacts, culprit_of: Mapping[Node, set[RunKey]]) -> dict[Node, set[RunKey]]:
    found: dict[Node, set[RunKey]] = {node: set(runs) for node, runs in culprit_of.items()}
    for cluster, namespace, run, node in facts.used.sums(*RUN_LABELS, "node"):
        found.setdefault((cluster, node), set()).add((cluster, namespace, run))
    return found


def _lost_by_node(facts: FleetFacts, culprit_of: Mapping[Node, set[RunKey]]) -> dict[Node, float]:
    found: dict[Node, float] = {}
    for (cluster, namespace, run, node), hours in facts.lost.sums(*RUN_LABELS, "node").items():
        if (cluster, namespace, run) in culprit_of.get((cluster, node), ()):
            found[cluster, node] = found.get((cluster, node), 0.0) + hours
    return found


def _hours_of(blamed: Figures, node: Node) -> Figures:
    return blamed.where("cluster", {node[0]: True}).where("node", {node[1]: True})


def _one_gpu(hours: Figures, least_share: float) -> str:
    ((gpu,), most) = max(hours.sums("gpu").items(), key=lambda item: item[1])
    return gpu if most >= least_share * hours.total else ""


def _evidence(hours: Figures) -> tuple[Evidence, ...]:
    sums = hours.sums("verdict", "phase", "bound")
    found = [Evidence(verdict, phase, bound, total) for (verdict, phase, bound), total in sums.items()]
    return tuple(sorted(found, key=lambda one: (-one.gpu_hours, one.verdict, one.phase, one.bound)))
