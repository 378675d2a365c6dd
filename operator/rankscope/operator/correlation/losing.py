"""GPU time that findings cost a job, over its whole life: a verdict forgets its own loss when it goes."""

from __future__ import annotations

import threading

from rankscope.operator.correlation.correlator import JobState


class LostSeconds:
    """A listener of the correlator. The sum of a job never falls as long as the job is there, restarts included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._standing: dict[str, float] = {}

    def __call__(self, states: tuple[JobState, ...]) -> None:
        with self._lock:
            present = {state.job for state in states}
            for job in self._totals.keys() - present:
                del self._totals[job]
                self._standing.pop(job, None)
            for state in states:
                self._count(state.job, state.verdict.lost_gpu_seconds or 0.0)

    def _count(self, job: str, lost: float) -> None:
        before = self._standing.get(job, 0.0)
        # Less than before is the loss of another finding, from its beginning.
        self._totals[job] = self._totals.get(job, 0.0) + (lost - before if lost >= before else lost)
        self._standing[job] = lost

    def of(self, job: str) -> float:
        with self._lock:
            return self._totals.get(job, 0.0)
