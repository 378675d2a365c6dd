"""Runs whose ranks do not meet in every step: real jobs, healthy, with one slow worker and with a slow server; and a
mixture of experts, whose ranks meet with uneven work.

`make acceptance SUITE=frameworks` plays all of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from rankscope.analysis.verdicts.verdict import Confidence, Kind
from tests.frameworks.job_process import SLOW_RANK, faulty_line
from tests.frameworks.matrix import HOST, JOB, NONE
from tests.frameworks.played_cell import PlayedCell, play
from tests.support.measuring import Measured

SERVER = "server"  # the fault in the server, and its rank
SERVER_RANK = 0
IMPACT_TOLERANCE = 0.10


@dataclass(frozen=True)
class Job:
    key: str
    script: str
    arguments: tuple[str, ...]
    is_asynchronous: bool = True
    is_server_measured: bool = True


MESSAGES = Job("messages", "parameter_server.py", ("messages",))
OWN_OPTIMIZERS = Job("messages_own_optimizers", "parameter_server.py", ("messages", "own_optimizer"))
RPC = Job("rpc", "parameter_server.py", ("rpc",), is_server_measured=False)
LOCAL_SGD = Job("local_sgd", JOB, ("local_sgd", "8"), is_asynchronous=False)
# A synchronisation takes longer than a window, and a job of half a minute has only few.
LONG_INTERVAL = Job("local_sgd_long_interval", JOB, ("local_sgd", "100"), is_asynchronous=False)
DILOCO = Job("diloco", JOB, ("local_sgd", "8", "diloco"), is_asynchronous=False)
JOBS = (MESSAGES, OWN_OPTIMIZERS, RPC, LOCAL_SGD, LONG_INTERVAL, DILOCO)
CELLS = [
    pytest.param(job, fault, id=f"{job.key}-{fault}")
    for job in JOBS
    for fault in (NONE, HOST, *([SERVER] if job.is_asynchronous else []))
]


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("job", "fault"), CELLS)
def test_runs_whose_ranks_do_not_meet_get_the_right_verdict(job: Job, fault: str, measured: Measured) -> None:
    slow_rank = SERVER_RANK if fault == SERVER else SLOW_RANK
    is_unsure = fault == SERVER and not job.is_server_measured
    played = play(
        Path(sys.executable),
        job.script,
        job.arguments,
        fault,
        is_blind=is_unsure,
        is_asynchronous=job.is_asynchronous,
        slow_rank=slow_rank,
        is_complete=lambda verdict: is_unsure or bool(verdict.cause.frames),
    )
    print(played)
    print(played.last.asynchronous)
    assert bool(played.last.asynchronous) is job.is_asynchronous, str(played)
    # Not warnings: these ranks do not wait for each other, so that one that queues for a CPU for a moment stands out.
    found = [tick.verdict for tick in played.heard if tick.verdict.is_alarm]
    if fault == NONE:
        assert not found and played.last.kind is Kind.HEALTHY, str(played)
        return
    expected = (Kind.SLOW_SERVER if fault == SERVER else Kind.SLOW_RANK, (slow_rank,))
    assert {(verdict.kind, verdict.culprits) for verdict in found} == {expected}, str(played)
    assert played.last.is_alarm, str(played)
    assert played.last.confidence is (Confidence.LOW if is_unsure else Confidence.HIGH), str(played)
    if not is_unsure:
        assert played.last.cause.frames[0].line == faulty_line(job.script, fault)[1], str(played)
    impact, (low, high) = played.last.impact_ratio or 0.0, true_impact_ratios(job, fault, played)
    print(f"costs {impact:.1%}, in truth {low:.1%} to {high:.1%}")
    error = max(0.0, low - impact, impact - high)
    measured(f"{job.key}, {fault}: impact, off the true one", error, "of the time", at_most=IMPACT_TOLERANCE)


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("routing", "fault", "kind"),
    [("balanced", NONE, Kind.HEALTHY), ("balanced", HOST, Kind.SLOW_RANK), ("skewed", NONE, Kind.DATA_IMBALANCE)],
)
def test_experts_with_more_tokens_are_an_imbalance(routing: str, fault: str, kind: Kind) -> None:
    played = play(Path(sys.executable), JOB, ("uneven_experts", routing), fault)
    print(played)
    assert played.last.kind is kind, str(played)
    culprits = {tick.verdict.culprits for tick in played.heard if tick.verdict.kind.is_finding}
    expected: dict[Kind, set[tuple[int, ...]]] = {Kind.SLOW_RANK: {(SLOW_RANK,)}, Kind.DATA_IMBALANCE: {()}}
    assert culprits == expected.get(kind, set()), str(played)
    if kind is Kind.DATA_IMBALANCE:
        assert "rank 2 gets 3.0× the tokens" in played.last.reason, str(played)


def true_impact_ratios(job: Job, fault: str, played: PlayedCell) -> tuple[float, float]:
    """Bounds by the job's own clocks. Rank 0, whose steps are the updates of all workers or the steps of all ranks, now
    and before; and of a slow worker, its rate against that of the others. They differ where the machine became more or
    less busy meanwhile."""
    before, after = played.healthy.own_step_seconds, played.faulty.own_step_seconds if played.faulty else None
    assert before and after and played.faulty is not None, str(played)
    truths = [1 - before / after]
    if job.is_asynchronous and fault == HOST:
        rates = {rank: 1 / seconds for rank, seconds in enumerate(played.faulty.own_seconds) if seconds and rank}
        slow = rates.pop(SLOW_RANK)
        usual = median(rates.values())
        truths.append((usual - slow) / (sum(rates.values()) + usual))
    return min(truths), max(truths)
