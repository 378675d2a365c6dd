"""Jobs on GPUs made up from known truths: what each host and each device does in a step, and what is seen of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rankscope.analysis.verdicts.verdict import Verdict
from rankscope.analysis.verdicts.windows import FrameSeen, JobWindow, RankEvidence, StackProfile, columns_of

WINDOW_SECONDS = 2.0
LAUNCH_SECONDS = 0.002
# Steps that a host gets ahead in a loop that never synchronises.
QUEUED_STEPS = 6

Seconds = Mapping[int, float]


@dataclass(frozen=True)
class DeviceJob:
    """Seconds are per step. `late`, `slow_device`, `input` and `starved` are what a rank has more than the others; the
    last two make its host late as well."""

    ranks: int = 4
    device_seconds: float = 0.040
    transfer_seconds: float = 0.006
    late: Seconds = field(default_factory=dict)
    slow_device: Seconds = field(default_factory=dict)
    input: Seconds = field(default_factory=dict)
    starved: Seconds = field(default_factory=dict)
    synchronises: bool = True
    noise: float = 0.002  # of a rank's device time, in a window
    uneven: float = 0.0  # of a rank's device time, from step to step
    begins_at: float = 0.0  # how much of the window is over when the faults begin
    extra: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def window(
        self, random: np.random.Generator, number: int = 0, evidence: Mapping[int, RankEvidence] | None = None
    ) -> JobWindow:
        ranks = range(self.ranks)

        def column(seconds: Seconds) -> np.ndarray:
            return np.array([seconds.get(rank, 0.0) for rank in ranks])

        late = column(self.late) + column(self.input) + column(self.starved)
        usual = self.device_seconds * (1 + self.noise * random.standard_normal(self.ranks))
        steps = max(4, round(WINDOW_SECONDS / (self.device_seconds + late.max() + self.transfer_seconds)))
        has_fault = (np.arange(steps) >= self.begins_at * steps)[:, None]
        device = usual * (1 + self.uneven * random.exponential(size=(steps, self.ranks)))
        device = device + has_fault * column(self.slow_device)
        launching = LAUNCH_SECONDS + has_fault * late
        if self.synchronises:
            arrives = launching + device  # host and device begin the step together
        else:
            arrives = np.maximum(launching, device)  # the device goes on with what is enqueued
        step = arrives.max(axis=1, keepdims=True) + self.transfer_seconds
        waited = arrives.max(axis=1, keepdims=True) - arrives
        own = step - waited
        # Furthest ahead when all of the step is enqueued.
        ahead = device + waited + self.transfer_seconds
        if not self.synchronises:
            ahead = ahead + np.where(launching < device + waited, QUEUED_STEPS * step, 0.0)
        means = {
            "step_seconds": step.mean() + np.zeros(self.ranks),
            "self_seconds": own.mean(axis=0),
            "wait_seconds": waited.mean(axis=0),
            "transfer_seconds": np.zeros(self.ranks),  # it may be hidden, so that it stays in the self time
            "self_spread_ratio": np.quantile(own, 0.9, axis=0) / np.quantile(own, 0.1, axis=0),
            "input_seconds": (has_fault * column(self.input)).mean(axis=0),
            "starved_seconds": (has_fault * column(self.starved)).mean(axis=0),
            "host_seconds": step.mean() + np.zeros(self.ranks),
            "run_ahead_seconds": ahead.mean(axis=0),
        }
        rows = [
            {"rank": rank, "steps": steps, **{name: values[rank] for name, values in means.items()}} for rank in ranks
        ]
        for rank, changes in self.extra.items():
            rows[rank].update(changes)
        return JobWindow(
            end_unix_seconds=1000.0 + number * WINDOW_SECONDS,
            window_seconds=WINDOW_SECONDS,
            world_size=self.ranks,
            columns=columns_of(rows),
            evidence=lambda: evidence or {},
        )

    def but(self, **changes: object) -> DeviceJob:
        return replace(self, **changes)


def profile(samples: int = 30, *lines: FrameSeen, **phase_shares: float) -> StackProfile:
    return StackProfile(samples, phase_shares, lines)


def told(verdicts: Sequence[Verdict]) -> list[str]:
    """Kinds in the order in which they were told, each once until the next."""
    kinds = [verdict.kind.value for verdict in verdicts]
    return [kind for before, kind in zip(["", *kinds], kinds, strict=False) if kind != before]
