"""Synchronous jobs whose loss sits in few steps, on a clock of their own. What a rank reports of its steps is what the
daemon makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.long_steps import find_long
from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.verdict import Verdict
from rankscope.analysis.verdicts.window_columns import FIGURES, columns, unpack
from rankscope.analysis.verdicts.windows import JobWindow, RankEvidence, columns_of
from rankscope.daemon.steps.long_steps import RecentSteps, bound_waits, sum_up
from rankscope.daemon.windows.window import statistics_of, window_columns
from rankscope.v1.window_pb2 import LongSteps, RankWindow
from tests.unit.daemon import window_makers as make

WINDOW_SECONDS = 2.0
ALL = -1  # in place of a rank
# Seconds by rank in the step of this number.
Stalls = Callable[[int, np.random.Generator], Mapping[int, float]]


@dataclass(frozen=True)
class StallingJob:
    stalls: Stalls
    ranks: int = 4
    step_seconds: float = 0.022
    transfer_seconds: float = 0.002
    noise: float = 0.02
    are_checkpoints: bool = False
    measured: Callable[[int], bool] = lambda step: True  # whether waiting is, in the step of this number
    backward_seconds: float = np.nan  # without waiting, which is done in it
    starved_seconds: float = 0.0  # a step, on every rank
    # By the seconds that each rank was late in a window, and the window's end.
    evidence: Callable[[Mapping[int, float], float], Mapping[int, RankEvidence]] = lambda late, end: {}

    def windows(self, count: int, seed: int = 0) -> Iterator[JobWindow]:
        random = np.random.default_rng(seed)
        step, clock = 0, 0.0
        recent: dict[int, RecentSteps] = {}
        for number in range(count):
            stalls, noise, first = [], [], step + 1
            while clock < (number + 1) * WINDOW_SECONDS:
                step += 1
                stalls.append(self.stalls(step, random))
                noise.append(self.noise * self.step_seconds * abs(random.standard_normal()))
                clock += self.step_seconds + noise[-1] + max(stalls[-1].values(), default=0.0)
            is_measured = np.array([self.measured(one) for one in range(first, step + 1)], dtype=bool)
            yield self._window(stalls, np.array(noise), is_measured, recent, number)

    def _window(
        self,
        stalls: list[Mapping[int, float]],
        noise: np.ndarray,
        is_measured: np.ndarray,
        recent: dict[int, RecentSteps],
        number: int,
    ) -> JobWindow:
        lost = np.array([max(one.values(), default=0.0) for one in stalls])
        step_seconds = self.step_seconds + noise + lost
        late = sorted({rank for one in stalls for rank in one if rank != ALL})
        # All ranks that were never late report the same.
        on_time = next(rank for rank in range(self.ranks) if rank not in late) if len(late) < self.ranks else None
        made: dict[int | None, dict[str, float]] = {}
        for rank in [*late, on_time]:
            if rank is None:
                continue
            own = np.array([one.get(rank, one.get(ALL, 0.0)) for one in stalls])
            wait = np.where(is_measured, self.transfer_seconds + lost - own, np.nan)
            checkpoint = own if self.are_checkpoints else np.zeros(len(own))
            known = recent.get(rank, recent.get(ALL, RecentSteps()))
            is_long = find_long(known.step_seconds, step_seconds)
            backward = self.backward_seconds + lost - own
            bounded = bound_waits(is_long, known, step_seconds, wait, backward)
            found = sum_up(is_long, known, step_seconds, bounded, checkpoint)
            window = RankWindow(steps=len(stalls), long_steps=LongSteps(**vars(found)))
            for name, column in {"step": step_seconds, "wait": wait, "self": step_seconds - wait}.items():
                statistics = statistics_of(column)
                if statistics is not None:
                    getattr(window, f"{name}_seconds").CopyFrom(statistics)
            window.figures["checkpoint_seconds"] = float(checkpoint.mean()) if len(checkpoint) else 0.0
            window.process.starved_seconds = self.starved_seconds * len(stalls)
            table = window_columns([window], make.span())
            read = columns(unpack(table.names, table.values, 1))[:, 0].tolist()
            made[rank] = dict(zip(FIGURES, read, strict=True))
            recent[ALL if rank == on_time else rank] = known.followed_by(step_seconds, wait, backward)
        rows = [{**made.get(rank, made.get(on_time, {})), "rank": rank} for rank in range(self.ranks)]
        end = 1000.0 + number * WINDOW_SECONDS
        lost_by_rank = {rank: sum(one.get(rank, one.get(ALL, 0.0)) for one in stalls) for rank in range(self.ranks)}
        return JobWindow(
            end_unix_seconds=end,
            window_seconds=WINDOW_SECONDS,
            world_size=self.ranks,
            columns=columns_of(rows),
            evidence=lambda: self.evidence(lost_by_rank, end),
        )


def watch(job: StallingJob, windows: int, seed: int = 0) -> list[Verdict]:
    fleet = FleetDetector()
    return [fleet.evaluate({"job": window})["job"] for window in job.windows(windows, seed)]
