"""Captures as numbers that only grow, and what each job's last capture did to its step time: for /metrics."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict

from rankscope.v1 import capture_service_pb2 as pb

# A job is a label: the least lately captured goes.
JOBS_KEPT = 64
RESULTS = {
    pb.CAPTURE_STATE_ANALYSED: "delivered",
    pb.CAPTURE_STATE_FAILED: "failed",
    pb.CAPTURE_STATE_CANCELLED: "cancelled",
}


class CaptureTally:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: Counter[str] = Counter(dict.fromkeys(RESULTS.values(), 0))
        self._slowdowns: OrderedDict[str, float] = OrderedDict()

    def count(self, capture: pb.Capture) -> None:
        """A capture that is over. Ranks are counted, not captures: one of eight that fails shows."""
        with self._lock:
            self._results.update(RESULTS.get(rank.state, "failed") for rank in capture.ranks)
            ratios = [
                times.after_seconds / times.before_seconds
                for rank in capture.ranks
                if (times := rank.step_times).HasField("after_seconds") and times.before_seconds > 0
            ]
            if ratios:
                self._slowdowns.pop(capture.job, None)
                self._slowdowns[capture.job] = max(ratios)
                while len(self._slowdowns) > JOBS_KEPT:
                    self._slowdowns.popitem(last=False)

    @property
    def results(self) -> dict[str, int]:
        with self._lock:
            return dict(self._results)

    @property
    def slowdowns(self) -> dict[str, float]:
        """Job to step time after its last capture ÷ before it, of the rank it slowed most."""
        with self._lock:
            return dict(self._slowdowns)
