"""The report on a fleet: tables of GPU-hours, and the lists of what to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankscope.analysis.fleet.facts import (
    RUN_LABELS,
    UNKNOWN,
    UTILIZATION_BUCKETS,
    FleetFacts,
    RunFacts,
    RunKey,
    run_title,
    team_of,
)
from rankscope.analysis.fleet.hardware import Suspect, find_suspects
from rankscope.analysis.fleet.packing import PackingGroup, find_groups
from rankscope.analysis.verdicts.thresholds import FLEET_THRESHOLDS, FleetThresholds

NO_NODE = "(no node is named)"


@dataclass(frozen=True)
class Usage:
    """GPU-hours of a team, run or node."""

    name: str
    used_gpu_hours: float
    lost_gpu_hours: float
    runs: int

    @property
    def lost_ratio(self) -> float | None:
        return self.lost_gpu_hours / self.used_gpu_hours if self.used_gpu_hours > 0 else None


@dataclass(frozen=True)
class Loss:
    verdict: str
    lost_gpu_hours: float
    runs: int


@dataclass(frozen=True)
class LowMfu:
    """A run or team below its target. Ratios of a team are means over the GPU-hours of its runs that have a target."""

    name: str
    team: str
    runs: int
    mfu_ratio: float
    target_ratio: float
    gpu_hours: float

    @property
    def shortfall_gpu_hours(self) -> float:
        """What the same work would not have needed at the target."""
        return self.gpu_hours * (1.0 - self.mfu_ratio / self.target_ratio)


@dataclass(frozen=True)
class FleetReport:
    begin_unix_seconds: float
    end_unix_seconds: float
    used_gpu_hours: float
    lost_gpu_hours: float
    runs: int
    nodes: int
    rank_hours_without_gpu: float
    verdicts: tuple[Loss, ...]
    teams: tuple[Usage, ...]
    by_run: tuple[Usage, ...]
    by_node: tuple[Usage, ...]
    utilization_gpu_hours: tuple[float, ...]  # by tenth of utilization
    hardware: tuple[Suspect, ...]
    low_teams: tuple[LowMfu, ...]
    low_runs: tuple[LowMfu, ...]
    packing: tuple[PackingGroup, ...]
    problems: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def lost_ratio(self) -> float | None:
        return self.lost_gpu_hours / self.used_gpu_hours if self.used_gpu_hours > 0 else None


def make_report(facts: FleetFacts, thresholds: FleetThresholds = FLEET_THRESHOLDS) -> FleetReport:
    used: dict[RunKey, float] = {(c, n, r): hours for (c, n, r), hours in facts.used.sums(*RUN_LABELS).items()}
    lost: dict[RunKey, float] = {(c, n, r): hours for (c, n, r), hours in facts.lost.sums(*RUN_LABELS).items()}
    low_runs = tuple(_low_runs(facts.runs, used, thresholds))
    return FleetReport(
        begin_unix_seconds=facts.begin_unix_seconds,
        end_unix_seconds=facts.end_unix_seconds,
        used_gpu_hours=facts.used.total,
        lost_gpu_hours=facts.lost.total,
        runs=len(used.keys() | facts.runs.keys()),
        nodes=len(facts.used.sums("cluster", "node")),
        rank_hours_without_gpu=facts.rank_hours_without_gpu,
        verdicts=_losses(facts),
        teams=_ordered(_usage(used, lost, {key: team_of(key, facts.runs.get(key)) for key in used.keys() | lost})),
        by_run=_ordered(_usage(used, lost, {key: run_title(key) for key in used.keys() | lost})),
        by_node=_ordered(_nodes(facts)),
        utilization_gpu_hours=_utilization(facts),
        hardware=find_suspects(facts, thresholds),
        low_teams=tuple(_low_teams(facts.runs, used, thresholds)),
        low_runs=tuple(sorted(low_runs, key=_by_shortfall)),
        packing=find_groups(facts, thresholds),
        problems=facts.problems,
        remarks=facts.remarks,
    )


def _losses(facts: FleetFacts) -> tuple[Loss, ...]:
    by_run: dict[str, dict[tuple[str, ...], float]] = {}
    for (*run, verdict), hours in facts.lost.sums(*RUN_LABELS, "verdict").items():
        if hours > 0:
            by_run.setdefault(verdict, {})[tuple(run)] = hours
    found = [Loss(verdict, sum(runs.values()), len(runs)) for verdict, runs in by_run.items()]
    return tuple(sorted(found, key=lambda loss: (-loss.lost_gpu_hours, loss.verdict)))


def _usage(used: Mapping[RunKey, float], lost: Mapping[RunKey, float], names: Mapping[RunKey, str]) -> Iterable[Usage]:
    sums: dict[str, list[float]] = {}
    for key, name in names.items():
        row = sums.setdefault(name, [0.0, 0.0, 0])
        row[0] += used.get(key, 0.0)
        row[1] += lost.get(key, 0.0)
        row[2] += 1
    return (Usage(name, row[0], row[1], int(row[2])) for name, row in sums.items())


def _nodes(facts: FleetFacts) -> Iterable[Usage]:
    used, lost = facts.used.sums("cluster", "node"), facts.lost.sums("cluster", "node")
    runs: dict[tuple[str, ...], int] = {}
    for cluster, _, _, node in facts.used.sums(*RUN_LABELS, "node"):
        runs[cluster, node] = runs.get((cluster, node), 0) + 1
    for key in used.keys() | lost.keys():
        name = run_title((key[0], "", key[1])) if key[1] else NO_NODE
        if used.get(key, 0.0) > 0 or lost.get(key, 0.0) > 0:
            yield Usage(name, used.get(key, 0.0), lost.get(key, 0.0), runs.get(key, 0))


def _ordered(rows: Iterable[Usage]) -> tuple[Usage, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.lost_gpu_hours, -row.used_gpu_hours, row.name)))


def _utilization(facts: FleetFacts) -> tuple[float, ...]:
    sums = facts.utilization.sums("bucket")
    return tuple(sums.get((str(bucket),), 0.0) for bucket in range(UTILIZATION_BUCKETS))


def _low_runs(
    runs: Mapping[RunKey, RunFacts], used: Mapping[RunKey, float], thresholds: FleetThresholds
) -> Iterable[LowMfu]:
    for key, run in runs.items():
        hours = used.get(key, 0.0)
        low = None if hours < thresholds.run_gpu_hours else _low_mfu(run_title(key), key, [(run, hours)], thresholds)
        if low is not None:
            yield low


def _low_teams(
    runs: Mapping[RunKey, RunFacts], used: Mapping[RunKey, float], thresholds: FleetThresholds
) -> tuple[LowMfu, ...]:
    members: dict[str, list[tuple[RunFacts, float]]] = {}
    keys: dict[str, RunKey] = {}
    for key, run in runs.items():
        hours = used.get(key, 0.0)
        if run.mfu_ratio is not None and run.mfu_target_ratio and hours >= thresholds.run_gpu_hours:
            team = team_of(key, run)
            members.setdefault(team, []).append((run, hours))
            keys[team] = key
    members.pop(UNKNOWN, None)
    low = (_low_mfu(team, keys[team], of_team, thresholds) for team, of_team in members.items())
    return tuple(sorted((one for one in low if one is not None), key=_by_shortfall))


def _low_mfu(
    name: str, key: RunKey, runs: Iterable[tuple[RunFacts, float]], thresholds: FleetThresholds
) -> LowMfu | None:
    """None if the target is met, or not known."""
    known = [
        (run.mfu_ratio, run.mfu_target_ratio, hours, team_of(key, run))
        for run, hours in runs
        if run.mfu_ratio is not None and run.mfu_target_ratio
    ]
    total = sum(hours for _, _, hours, _ in known)
    if total <= 0:
        return None
    mfu = sum(ratio * hours for ratio, _, hours, _ in known) / total
    target = sum(ratio * hours for _, ratio, hours, _ in known) / total
    if mfu >= thresholds.mfu_of_target_ratio * target:
        return None
    return LowMfu(name, known[0][3], len(known), mfu, target, total)


def _by_shortfall(low: LowMfu) -> tuple[float, str]:
    return -low.shortfall_gpu_hours, low.name
