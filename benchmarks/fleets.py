"""Fleets made up for the verdict rules: columns of many ranks at once, and the stacks that go with a slow one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import cycle

import numpy as np

from rankscope.analysis.verdicts.windows import JobWindow, RankColumns, RankEvidence
from rankscope.daemon.samples import Span
from rankscope.daemon.windows.window import window_columns
from rankscope.operator.correlation.columns import Evidence
from rankscope.operator.correlation.daemon_windows import DaemonMessage, HeldWindow, RankSeen
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import WatchRanksResponse
from rankscope.v1.window_pb2 import FrameShare, ProcessUsage, RankWindow, StackSummary, StepStatistics

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
        """One window of every job after the other, forever. Noise differs between them; who is slow stays."""
        random = np.random.default_rng(seed)
        # Read out of messages by the correlation's own code, at the price that has. The same ones every time, for
        # memory's sake.
        held = [*hold(*_messages(self.ranks_per_job)).values()] if self.slow_jobs else []
        ranks = np.arange(self.ranks_per_job)
        evidence = (lambda: Evidence(held, ranks)) if held else dict
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
            "self_steps": np.full(shape, np.nan),
            "self_spread_ratio": np.full(shape, 1.03),
            "input_seconds": 0.02 * base,
            "forward_seconds": 0.3 * base + (own - base),
            "backward_seconds": 0.5 * base,
            "optimizer_seconds": 0.1 * base,
            "checkpoint_seconds": np.zeros(shape),
            "other_seconds": 0.08 * base,
            "starved_seconds": np.zeros(shape),
            "mfu_ratio": np.full(shape, 0.4),
        }
        unknown = {column.name for column in fields(RankColumns)} - {"job", *columns}
        columns |= {name: np.full(shape, np.nan) for name in unknown}
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
            own_share=0.02,
            phase="forward" if number % 2 else "backward",
        )
        for number in range(FRAMES - 1)
    ]
    share = 0.4 if slow else 0.01
    frames.append(
        FrameShare(function="slow_line", file="train.py", line=7, share=share, own_share=share, phase="forward")
    )
    statistics = StepStatistics(mean=own, p10=0.98 * own, p50=own, p90=1.02 * own, max=1.1 * own)
    return RankWindow(
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
        step_seconds=statistics,
        self_seconds=statistics,
        wait_seconds=StepStatistics(mean=TRANSFER_SECONDS, p10=TRANSFER_SECONDS),
        figures={
            "communication_seconds": 0.025,
            "input_seconds": 0.002,
            "forward_seconds": 0.03,
            "backward_seconds": 0.05,
            "optimizer_seconds": 0.01,
            "checkpoint_seconds": 0.0,
            "other_seconds": 0.005,
        },
        process=ProcessUsage(
            cpu_seconds=2.0,
            run_delay_seconds=0.01,
            throttled_seconds=0.0,
            resident_bytes=1 << 30,
            starved_seconds=0.01,
        ),
        stacks=StackSummary(samples=40, phase_shares={"forward": 0.4, "backward": 0.6}, frames=frames),
    )


def response(node: str, windows: Sequence[RankWindow]) -> WatchRanksResponse:
    """As a daemon sends it."""
    span = Span(windows[0].start_unix_nanos, windows[0].end_unix_nanos)
    return WatchRanksResponse(node=node, windows=windows, columns=window_columns(windows, span))


def hold(*windows: RankWindow) -> dict[int, HeldWindow]:
    """As an operator keeps them, by rank."""
    message = DaemonMessage("", response("", windows).SerializeToString())
    times = message.start_unix_nanos, message.end_unix_nanos
    return {
        window.identity.rank: HeldWindow(RankSeen(window.identity), window_bytes, *times, figures)
        for window, window_bytes, figures in zip(windows, message.windows, message.figures(len(windows)), strict=True)
    }
