"""From a Capture's words to ranks on nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.analysis.choosing_ranks import (
    STRAGGLER,
    STRAGGLER_AND_PEER,
    ChoiceError,
    Suspected,
    choose_ranks,
)
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.suspecting import suspects
from rankscope.operator.kube.resources import CapturedRank, CaptureSpec

# libkineto looks for work every five seconds and the nodes' clocks and our calls take their time as well.
START_AHEAD_SECONDS = 12.0


class PlanError(Exception):
    """Why nothing can be captured: a CamelCase reason and a sentence with the next step."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Plan:
    job: str  # as the daemons call it
    ranks: tuple[CapturedRank, ...]


def plan(spec: CaptureSpec, run: str, state: JobState | None, daemon_job: str | None, ranks_limit: int) -> Plan:
    if state is None or daemon_job is None:
        number = spec.job_number
        which = f"job #{number} of run {run}" if isinstance(number, int) and number > 1 else f"run {run}"
        raise PlanError("NoRanks", f"no rank of {which} reports; `kubectl get trainingrun {run}` tells what is seen")
    identities = state.identities
    found = suspects(state)
    try:
        chosen = choose_ranks(
            spec.ranks, identities.keys(), state.world_size, Suspected(found.culprits, found.peers, found.reason)
        )
    except ChoiceError as error:
        is_about_suspects = spec.ranks in (STRAGGLER, STRAGGLER_AND_PEER)
        raise PlanError("NoStraggler" if is_about_suspects else "BadRanks", str(error)) from error
    if len(chosen) > ranks_limit:
        raise PlanError("TooManyRanks", f"{len(chosen)} ranks at once; at most {ranks_limit}: name some of them")
    ranks = []
    for rank in chosen:
        identity = identities.get(rank)
        if identity is None:
            ranks.append(CapturedRank(rank=rank, state="failed", error="the rank does not report: has it ended?"))
        else:
            ranks.append(
                CapturedRank(rank=rank, node=identity.node, pod=identity.pod_name or identity.pod, state="accepted")
            )
    if all(rank.state == "failed" for rank in ranks):
        raise PlanError("NoRanks", f"none of the ranks {spec.ranks} reports")
    return Plan(daemon_job, tuple(ranks))


def by_node(ranks: Mapping[int, CapturedRank]) -> dict[str, list[int]]:
    nodes: dict[str, list[int]] = {}
    for number, rank in ranks.items():
        if isinstance(rank.node, str):
            nodes.setdefault(rank.node, []).append(number)
    return nodes
