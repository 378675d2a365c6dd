"""How long a rank's steps took of late, from the windows as they close: a capture is planned by it, and judged."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

from rankscope.daemon.samples import RankKey, RankProcess
from rankscope.v1.window_pb2 import SOURCE_CAPTURE, RankWindow

WINDOWS_KEPT = 60


class RecentSteps:
    """Filled by the daemon's thread, asked by captures."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[RankKey, deque[tuple[float, float, int, float]]] = {}

    def add(self, windows: Mapping[RankKey, RankWindow]) -> None:
        with self._lock:
            for key in self._windows.keys() - windows.keys():
                del self._windows[key]
            for key, window in windows.items():
                if window.sources.get("steps") == SOURCE_CAPTURE:
                    continue  # steps that were slowed down by recording them, and told late
                if window.HasField("steps") and window.steps and window.HasField("step"):
                    start, end = window.start_unix_nanos / 1e9, window.end_unix_nanos / 1e9
                    kept = self._windows.setdefault(key, deque(maxlen=WINDOWS_KEPT))
                    kept.append((start, end, window.steps, window.step.mean_seconds))

    def __call__(self, rank: RankProcess, start_unix_seconds: float, end_unix_seconds: float) -> float | None:
        """Mean step time over the windows that lie in a stretch of time, at least for the most part; None where the
        rank's steps were not seen in it."""
        with self._lock:
            windows = list(self._windows.get(rank.key, ()))
        found = [
            (steps, seconds)
            for start, end, steps, seconds in windows
            if start_unix_seconds <= (start + end) / 2 <= end_unix_seconds
        ]
        total = sum(steps for steps, _ in found)
        return sum(steps * seconds for steps, seconds in found) / total if total else None
