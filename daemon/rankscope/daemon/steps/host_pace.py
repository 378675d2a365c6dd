"""The pace of a rank's host, where steps are timed on a device.

A host that is ahead of its device waits for it now and then, in a launch or a synchronisation, and its own time for a
step does not show. It shows in the quickest steps, if the host did not wait in them: a host that got further ahead by
a whole step did not."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.daemon.samples import Column, HostPace

# Hosts whose queues are full did not wait in 2 to 5 % of their steps (H200, DDP, a peer that sleeps 60 ms a step).
QUICK_QUANTILE = 0.02
MAX_STEPS = 256
STEPS_NEEDED = 32


@dataclass(frozen=True)
class HostSteps:
    """The last steps of a rank, each as the mean of a record."""

    host_seconds: Column = field(default_factory=lambda: np.empty(0))
    device_seconds: Column = field(default_factory=lambda: np.empty(0))
    steps: Column = field(default_factory=lambda: np.empty(0))  # of the record

    def followed_by(self, host_seconds: Column, device_seconds: Column, steps: Column) -> HostSteps:
        known = ~np.isnan(host_seconds)
        added = (host_seconds[known], device_seconds[known], steps[known])
        pairs = zip(vars(self).values(), added, strict=True)
        return HostSteps(*(np.append(*pair)[-MAX_STEPS:].copy() for pair in pairs))

    def pace(self) -> HostPace | None:
        if len(self.host_seconds) < STEPS_NEEDED or not self.device_seconds.sum() > 0:
            return None
        lead = np.cumsum((self.device_seconds - self.host_seconds) * self.steps)
        gained = float((lead - np.minimum.accumulate(lead)).max())
        mean_step = float((self.device_seconds * self.steps).sum() / self.steps.sum())
        quick = float(np.quantile(self.host_seconds, QUICK_QUANTILE, method="lower"))
        return HostPace(quick, gained / mean_step)
