"""How often somebody may do something: so many times at once, and then at a rate. One count for each of many."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

REMEMBERED = 4096


class Allowance:
    """May be used from any thread."""

    def __init__(
        self, at_once: float, per_second: float, monotonic_seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._at_once = at_once
        self._per_second = per_second
        self._monotonic_seconds = monotonic_seconds
        self._lock = threading.Lock()
        self._used: OrderedDict[str, tuple[float, float]] = OrderedDict()  # how much, and when that was

    def take(self, who: str) -> bool:
        with self._lock:
            used, now = self._now(who)
            if used > self._at_once - 1:
                return False
            self._keep(who, used + 1, now)
            return True

    def give_back(self, who: str) -> None:
        with self._lock:
            used, now = self._now(who)
            self._keep(who, used - 1, now)

    def _now(self, who: str) -> tuple[float, float]:
        now = self._monotonic_seconds()
        used, since = self._used.get(who, (0.0, now))
        return max(0.0, used - (now - since) * self._per_second), now

    def _keep(self, who: str, used: float, now: float) -> None:
        self._used[who] = (used, now)
        self._used.move_to_end(who)
        if used <= 0:
            del self._used[who]
        while len(self._used) > REMEMBERED:
            self._used.popitem(last=False)
