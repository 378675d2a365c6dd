"""Synchronous jobs made up from known truths: every rank has the same step time, as in life."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.network import NodeNetwork
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import Verdict
from rankscope.analysis.verdicts.windows import JobWindow, RankEvidence, columns_of

WINDOW_SECONDS = 2.0


@dataclass(frozen=True)
class SyntheticJob:
    pipeline: int = 1
    data: int = 4
    tensor: int = 1
    nodes: int = 1
    self_seconds: float = 0.050
    transfer_seconds: float = 0.005
    noise: float = 0.01
    slow_ranks: Mapping[int, float] = field(default_factory=dict)  # rank → factor
    slow_stages: Mapping[int, float] = field(default_factory=dict)
    uneven: float = 0.0  # step-to-step spread of every rank's own work
    excess_phase: str = "forward"
    steps: int = 20
    extra: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    network: Mapping[int, NodeNetwork] = field(default_factory=dict)  # by node

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def stage_of(self, rank: int) -> int:
        return rank // (self.data * self.tensor)

    def window(
        self,
        random: np.random.Generator,
        number: int = 0,
        evidence: Mapping[int, RankEvidence] | None = None,
        missing: Sequence[int] = (),
    ) -> JobWindow:
        ranks = self.world_size
        base = np.full(ranks, self.self_seconds)
        for rank in range(ranks):
            base[rank] *= self.slow_stages.get(self.stage_of(rank), 1.0)
        excess = np.array([base[r] * (self.slow_ranks.get(r, 1.0) - 1) for r in range(ranks)])
        per_step = (base + excess) * (1 + self.noise * random.standard_normal((self.steps, ranks)))
        per_step *= 1 + self.uneven * random.exponential(size=(self.steps, ranks))
        step = per_step.max(axis=1) + self.transfer_seconds  # everybody waits for the last
        waits = step[:, None] - per_step
        # For all ranks in one call: a call of NumPy costs more than its work.
        own_mean, wait_mean = per_step.mean(axis=0), waits.mean(axis=0)
        low, high = np.quantile(per_step, (0.1, 0.9), axis=0)
        transfer = np.quantile(waits, 0.1, axis=0)
        rows = []
        for rank in range(ranks):
            row = {
                "rank": rank,
                "stage": self.stage_of(rank) if self.pipeline > 1 else -1,
                "place": rank * self.nodes // ranks,
                "steps": self.steps,
                "step_seconds": step.mean(),
                "self_seconds": own_mean[rank],
                "wait_seconds": wait_mean[rank],
                "transfer_seconds": transfer[rank],
                "self_spread_ratio": high[rank] / low[rank],
                "input_seconds": base[rank] * 0.04,
                "forward_seconds": base[rank] * 0.3,
                "backward_seconds": base[rank] * 0.5,
                "optimizer_seconds": base[rank] * 0.1,
                "other_seconds": base[rank] * 0.1,
                "starved_seconds": 0.0,
            }
            row[f"{self.excess_phase}_seconds"] = row.get(f"{self.excess_phase}_seconds", 0.0) + excess[rank]
            row.update(self.extra.get(rank, {}))
            if rank not in missing:
                rows.append(row)
        return JobWindow(
            end_unix_seconds=1000.0 + number * WINDOW_SECONDS,
            window_seconds=WINDOW_SECONDS,
            world_size=ranks,
            columns=columns_of(rows),
            evidence=lambda: evidence or {},
            place_names={node: f"node-{node}" for node in range(self.nodes)},
            network=lambda: self.network,
        )

    def but(self, **changes: object) -> SyntheticJob:
        return replace(self, **changes)  # type: ignore[arg-type]  # a test helper: the caller names real fields


class Job(Protocol):
    def window(
        self, random: np.random.Generator, number: int = 0, evidence: Mapping[int, RankEvidence] | None = None
    ) -> JobWindow: ...


def watch_each(
    *phases: tuple[Job, int],
    seeds: Iterable[int],
    policy: Policy = DEFAULT_POLICY,
    evidence: Mapping[int, RankEvidence] | None = None,
) -> list[list[Verdict]]:
    """Of jobs with other noise in one fleet, whose ranks are compared at once: the verdict after each window of a job
    that goes through phases of (how it behaves, for how many windows)."""
    noise = {str(seed): np.random.default_rng(seed) for seed in seeds}
    fleet = FleetDetector(policy)
    verdicts: dict[str, list[Verdict]] = {name: [] for name in noise}
    behaviours = [job for job, windows in phases for _ in range(windows)]
    for number, job in enumerate(behaviours):
        windows = {name: job.window(random, number, evidence) for name, random in noise.items()}
        for name, verdict in fleet.evaluate(windows).items():
            verdicts[name].append(verdict)
    return list(verdicts.values())


def watch(
    *phases: tuple[Job, int],
    seed: int = 0,
    policy: Policy = DEFAULT_POLICY,
    evidence: Mapping[int, RankEvidence] | None = None,
) -> list[Verdict]:
    return watch_each(*phases, seeds=[seed], policy=policy, evidence=evidence)[0]
