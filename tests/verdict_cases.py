"""Jobs with a known finding. The Python detector and the Prometheus rules must both find it, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.analysis.verdicts.verdict import Kind


@dataclass(frozen=True)
class Rank:
    """Seconds of a step."""

    work: float = 0.050
    starved: float = 0.0  # queued for a CPU
    stage: int = -1
    on_device: bool = False
    input: float = 0.0
    mfu: float | None = None

    @property
    def self_seconds(self) -> float:
        return self.work + self.starved


@dataclass(frozen=True)
class Phase:
    ranks: tuple[Rank, ...]
    transfer: float = 0.005

    @property
    def step_seconds(self) -> float:
        """Synchronous training: every rank waits for the last."""
        return max(rank.self_seconds for rank in self.ranks) + self.transfer


@dataclass(frozen=True)
class Case:
    name: str
    now: Phase
    finding: Kind | None = None
    culprits: tuple[int, ...] = ()
    stage: int | None = None
    before: Phase | None = None  # the job's past, where it matters
    mfu_target: float | None = None


def ranks(*work: float, on_device: bool = False) -> Phase:
    return Phase(tuple(Rank(seconds, on_device=on_device) for seconds in work))


def stages(*work: Sequence[float], starved: float = 0.0) -> Phase:
    """A tuple of ranks for each stage."""
    return Phase(tuple(Rank(seconds, starved, stage) for stage, of in enumerate(work) for seconds in of))


EQUAL = (0.050,) * 4

CASES = (
    Case("equal-ranks", ranks(*EQUAL)),
    Case("slow-rank", ranks(0.050, 0.050, 0.060, *EQUAL), Kind.SLOW_RANK, (2,)),
    Case("two-slow-ranks", ranks(0.060, 0.050, 0.065, *EQUAL), Kind.SLOW_RANK, (0, 2)),
    Case("slow-by-less-than-a-tenth", ranks(0.054, *EQUAL)),
    Case("slow-by-less-than-a-tenth-on-devices", ranks(0.054, *EQUAL, on_device=True), Kind.SLOW_RANK, (0,)),
    Case("noise-on-devices", ranks(0.052, *EQUAL, on_device=True)),
    Case(
        "one-rank-by-the-hosts-clock-among-devices",
        Phase((Rank(0.054, on_device=True), *(Rank(on_device=True),) * 3, Rank())),
    ),
    Case("pair", ranks(0.050, 0.060), Kind.SLOW_RANK, (1,)),
    Case("pair-on-devices-has-twice-the-floor", ranks(0.050, 0.053, on_device=True)),
    Case("pair-on-devices", ranks(0.050, 0.055, on_device=True), Kind.SLOW_RANK, (1,)),
    Case("one-rank", ranks(0.050)),
    Case("wide-cohort", ranks(0.046, 0.048, 0.050, 0.052, 0.0565, 0.044, 0.054)),
    Case("little-of-the-step", Phase(tuple(Rank(work) for work in (0.006, *(0.005,) * 4)), transfer=0.1)),
    Case("the-next-is-nearly-as-slow", ranks(0.0552, 0.0546, *EQUAL)),
    Case("queues-for-a-cpu", Phase((Rank(starved=0.015), *(Rank(),) * 4))),
    Case("starved-of-cpu", Phase((Rank(starved=0.040), *(Rank(),) * 4)), Kind.SLOW_RANK, (0,)),
    Case("queueing-by-chance", Phase(tuple(Rank(starved=queued) for queued in (0.01, 0.03, 0.02, 0.0, 0.04)))),
    Case(
        "queueing-of-others-hides-a-slow-rank",
        Phase((*(Rank(starved=0.012),) * 5, Rank(0.062))),
        Kind.SLOW_RANK,
        (5,),
    ),
    Case("slow-stage", stages((0.050, 0.050), (0.065, 0.065)), Kind.SLOW_STAGE, stage=1),
    Case("stages-alike", stages((0.050, 0.050), (0.056, 0.056))),
    Case("one-short-stage-of-four", stages((0.050,) * 2, (0.020,) * 2, (0.050,) * 2, (0.056,) * 2)),
    Case("one-long-stage-of-four", stages(*((0.050,) * 2,) * 3, (0.060,) * 2), Kind.SLOW_STAGE, stage=3),
    Case("stages-of-one-rank", stages((0.050,), (0.065,), (0.050,)), Kind.SLOW_STAGE, stage=1),
    Case(
        "ranks-of-stages-vary-more",
        stages((0.0496, 0.050, 0.0504, 0.0455, 0.0545), (0.054, 0.060, 0.052, 0.066, 0.061)),
    ),
    Case("next-stage-is-nearly-as-slow", stages((0.050,) * 2, (0.064,) * 2, (0.065,) * 2)),
    Case("slow-rank-in-a-slow-stage", stages((0.050,) * 4, (0.090, *(0.065,) * 3)), Kind.SLOW_RANK, (4,)),
    Case("contended-stages", stages((0.050,) * 2, (0.065,) * 2, starved=0.02)),
    Case(
        "slow-stage-of-devices-with-contended-hosts",
        Phase(tuple(Rank(work, 0.0, stage, on_device=True) for work, stage in ((0.05, 0),) * 2 + ((0.065, 1),) * 2)),
        Kind.SLOW_STAGE,
        stage=1,
    ),
    Case("slow-stage-on-a-contended-machine", stages((0.05,) * 2, (0.1,) * 2, starved=0.02), Kind.SLOW_STAGE, stage=1),
    Case(
        "slow-network",
        Phase((Rank(),) * 4, transfer=0.040),
        Kind.SLOW_COMMUNICATION,
        before=Phase((Rank(),) * 4, transfer=0.010),
    ),
    Case("network-a-little-slower", Phase((Rank(),) * 4, 0.013), before=Phase((Rank(),) * 4, 0.010)),
    Case("busy-machine", Phase((Rank(0.2),) * 4, transfer=0.040), before=Phase((Rank(),) * 4, transfer=0.010)),
    Case("input-bound", Phase((Rank(0.100, input=0.040),) * 4), Kind.INPUT_BOUND),
    Case("one-rank-of-four-waits-for-input", Phase((Rank(0.1, input=0.09), *(Rank(0.1, input=0.02),) * 3))),
    Case("low-mfu", Phase((Rank(mfu=0.3),) * 4), Kind.LOW_MFU, mfu_target=0.4),
    Case("mfu-above-its-target", Phase((Rank(mfu=0.41), Rank(mfu=0.41), Rank(mfu=0.1))), mfu_target=0.4),
)
