"""Fleets made up for the verdict rules: columns of many ranks at once, and the stacks that go with a slow one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from rankscope.analysis.verdicts.windows import JobWindow, RankColumns, RankEvidence
from rankscope.operator.correlation.columns import job_window
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import CauseSeconds, FrameShare, ProcessUsage, RankWindow, StackSummary, StepStatistics

WINDOW_SECONDS = 2.0
RANKS_PER_NODE = 8
STEPS = 20
SELF_SECONDS = 0.090
TRANSFER_SECONDS = 0.010
NOISE_RATIO = 0.01
SLOW_FACTOR = 1.4
FRAMES = 20
DISTINCT_TICKS = 4
_START_NANOS = 1_700_000_000_000_000_000


@dataclass(frozen=True)
class Fleet:
    """`slow_ratio` of the jobs (at least one, if any) have one slow rank."""

    jobs: int
    ranks_per_job: int
    slow_ratio: float = 0.0

    @property
    def slow_jobs(self) -> int:
        return max(1, round(self.jobs * self.slow_ratio)) if self.slow_ratio else 0

    @property
    def label(self) -> str:
        what = f"{self.jobs:,} × {self.ranks_per_job:,} ranks"
        return f"{what}, {self.slow_jobs:,} slow" if self.slow_jobs else f"{what}, healthy"

    def ticks(self, seed: int = 0) -> Iterator[dict[str, JobWindow]]:
        """One window of every job after the other, for ever. Noise differs between them; who is slow stays."""
        random = np.random.default_rng(seed)
        # Read out of messages by the correlation's own code, at the price that has. The same ones every time, for
        # memory's sake.
        evidence = job_window(_messages(self.ranks_per_job), self.ranks_per_job).evidence if self.slow_jobs else dict
        made = [self._tick(random, number, evidence) for number in range(DISTINCT_TICKS)]
        yield from cycle(made)

    def _tick(
        self, random: np.random.Generator, number: int, slow_evidence: Callable[[], Mapping[int, RankEvidence]]
    ) -> dict[str, JobWindow]:
        shape = (self.jobs, self.ranks_per_job)
        own = SELF_SECONDS * (1 + NOISE_RATIO * random.standard_normal(shape))
        own[: self.slow_jobs, 0] *= SLOW_FACTOR
        # Everybody waits for the last.
        step = np.broadcast_to(own.max(axis=1, keepdims=True) + TRANSFER_SECONDS, shape)
        base = np.full(shape, SELF_SECONDS)
        columns = {
            "rank": np.broadcast_to(np.arange(self.ranks_per_job), shape),
            "stage": np.full(shape, -1),
            "place": np.broadcast_to(np.arange(self.ranks_per_job) // RANKS_PER_NODE, shape),
            "steps": np.full(shape, float(STEPS)),
            "step_seconds": step,
            "self_seconds": own,
            "wait_seconds": step - own,
            "transfer_seconds": np.full(shape, TRANSFER_SECONDS),
            "self_spread_ratio": np.full(shape, 1.03),
            "input_seconds": 0.02 * base,
            "forward_seconds": 0.3 * base + (own - base),
            "backward_seconds": 0.5 * base,
            "optimizer_seconds": 0.1 * base,
            "checkpoint_seconds": np.zeros(shape),
            "other_seconds": 0.08 * base,
            "starved_seconds": np.zeros(shape),
            "host_seconds": np.full(shape, np.nan),
            "run_ahead_seconds": np.full(shape, np.nan),
            "mfu_ratio": np.full(shape, 0.4),
        }
        end_seconds = _START_NANOS / 1e9 + WINDOW_SECONDS * (number + 1)
        nodes = {place: f"node-{place}" for place in range(-(-self.ranks_per_job // RANKS_PER_NODE))}
        return {
            f"job-{job}": JobWindow(
                end_unix_seconds=end_seconds,
                window_seconds=WINDOW_SECONDS,
                world_size=self.ranks_per_job,
                columns=RankColumns(
                    job=np.zeros(self.ranks_per_job, dtype=np.int64),
                    **{name: np.ascontiguousarray(values[job]) for name, values in columns.items()},
                ),
                evidence=slow_evidence if job < self.slow_jobs else dict,
                place_names=nodes,
            )
            for job in range(self.jobs)
        }


def _messages(ranks: int) -> list[RankWindow]:
    usual, made = rank_window(0, ranks), []
    for rank in range(ranks):
        window = RankWindow()
        window.CopyFrom(usual)
        window.identity.rank, window.identity.node = rank, f"node-{rank // RANKS_PER_NODE}"
        made.append(window)
    made[0] = rank_window(0, ranks, slow=True)
    return made


def rank_window(rank: int, world_size: int, slow: bool = False) -> RankWindow:
    """A window with everything that the probe, the process counters and the stacks of a rank give."""
    own = SELF_SECONDS * (SLOW_FACTOR if slow else 1.0)
    frames = [
        FrameShare(
            function=f"forward_{number}",
            file=f"/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module_{number}.py",
            line=100 + number,
            share=1 / (1 + number),
            leaf_share=0.02,
            phase="forward" if number % 2 else "backward",
        )
        for number in range(FRAMES - 1)
    ]
    frames.append(
        FrameShare(function="slow_line", file="train.py", line=7, share=0.4 if slow else 0.01, phase="forward")
    )
    statistics = StepStatistics(
        mean_seconds=own, p10_seconds=0.98 * own, p50_seconds=own, p90_seconds=1.02 * own, max_seconds=1.1 * own
    )
    window = RankWindow(
        identity=RankIdentity(
            job="10.0.0.1:29500/run",
            rank=rank,
            local_rank=rank % RANKS_PER_NODE,
            world_size=world_size,
            node=f"node-{rank // RANKS_PER_NODE}",
            pid=4000 + rank,
            incarnation=77,
        ),
        sequence=9,
        start_unix_nanos=_START_NANOS,
        end_unix_nanos=_START_NANOS + round(WINDOW_SECONDS * 1e9),
        steps=STEPS,
        steps_total=9 * STEPS,
        last_step_unix_nanos=_START_NANOS + round(WINDOW_SECONDS * 0.99e9),
        step=statistics,
        wait=statistics,
        causes=CauseSeconds(
            self=own * STEPS,
            wait=TRANSFER_SECONDS * STEPS,
            communication=0.5,
            input=0.04,
            forward=0.6,
            backward=1.0,
            optimizer=0.2,
            checkpoint=0.0,
            other=0.1,
        ),
        process=ProcessUsage(cpu_seconds=2.0, run_delay_seconds=0.01, throttled_seconds=0.0, resident_bytes=1 << 30),
        stacks=StackSummary(samples=40, phase_shares={"forward": 0.4, "backward": 0.6}, frames=frames),
    )
    window.self.CopyFrom(statistics)
    return window
