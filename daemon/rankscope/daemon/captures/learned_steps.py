"""Step times that captures taught, so that the next one of the same processes need not find out again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from rankscope.daemon.samples import RankProcess

PROCESSES_KEPT: Final = 1024


class LearnedSteps:
    """By process, not by rank: one that was started anew may train otherwise. The ones least lately captured go first.
    May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: OrderedDict[tuple[int, int], float] = OrderedDict()

    def learn(self, rank: RankProcess, step_seconds: float) -> None:
        with self._lock:
            self._seconds[_process(rank)] = step_seconds
            self._seconds.move_to_end(_process(rank))
            while len(self._seconds) > PROCESSES_KEPT:
                self._seconds.popitem(last=False)

    def longest(self, ranks: Iterable[RankProcess]) -> float | None:
        """Of ranks that train together: what is known of some holds for all. None where nothing is known."""
        with self._lock:
            found = [self._seconds.get(_process(rank)) for rank in ranks]
        return max((seconds for seconds in found if seconds is not None), default=None)


def _process(rank: RankProcess) -> tuple[int, int]:
    return rank.pid, rank.start_ticks
