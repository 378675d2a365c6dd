"""The pace of a rank's host, where steps are timed on a device.

A host that is ahead of its device waits for it now and then, in a launch or a synchronisation, and its own time for a
step does not show. It shows in the quickest steps, if the host did not wait in them. A host whose queue is full waits
in every step, and stays as many steps ahead as the queue holds. One that got further ahead by some steps did not wait
in as many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.daemon.samples import Column

MAX_STEPS = 512
STEPS_NEEDED = 32
# The quickest but two: a host that gained three steps has as many without waiting.
QUICK_PLACE = 2


@dataclass(frozen=True)
class HostSteps:
    """The last steps of a rank, each as the mean of a record."""

    host_seconds: Column = field(default_factory=lambda: np.empty(0))
    device_seconds: Column = field(default_factory=lambda: np.empty(0))
    run_ahead_seconds: Column = field(default_factory=lambda: np.empty(0))  # NaN where it was not sampled
    steps: Column = field(default_factory=lambda: np.empty(0))  # of the record

    def followed_by(
        self, host_seconds: Column, device_seconds: Column, run_ahead_seconds: Column, steps: Column
    ) -> HostSteps:
        known = ~np.isnan(host_seconds)
        added = (host_seconds[known], device_seconds[known], run_ahead_seconds[known], steps[known])
        pairs = zip(vars(self).values(), added, strict=True)
        return HostSteps(*(np.append(*pair)[-MAX_STEPS:].copy() for pair in pairs))

    def pace(self) -> Mapping[str, float]:
        """Figures; none where steps are timed by the host, or too few are known."""
        is_sampled = ~np.isnan(self.run_ahead_seconds)
        if len(self.host_seconds) < STEPS_NEEDED or not is_sampled.any():
            return {}
        ahead = self._steps_ahead(is_sampled)
        gained = float((ahead - np.minimum.accumulate(ahead)).max(initial=0.0))
        quick = float(np.partition(self.host_seconds, QUICK_PLACE)[QUICK_PLACE])
        return {"host_quick_seconds": quick, "host_gained_steps": gained}

    def _steps_ahead(self, is_sampled: np.ndarray) -> Column:
        """How many steps the host has enqueued that the device has yet to do, at the end of each step of the host after
        the device's first."""
        device_ends = np.cumsum(self.device_seconds * self.steps)
        host_ends = np.cumsum(self.host_seconds * self.steps)
        lead = (device_ends - host_ends - self.run_ahead_seconds)[is_sampled]
        done = np.searchsorted(device_ends, host_ends + np.median(lead), side="right")
        enqueued = np.append(0.0, np.cumsum(self.steps))
        ahead: Column = np.maximum(enqueued[1:] - enqueued[done], 0.0)[done > 0]
        return ahead
