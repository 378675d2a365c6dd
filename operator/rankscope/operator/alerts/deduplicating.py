"""Which firings have had their capture. Alertmanager repeats itself: after a while, after a restart, from its peers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from rankscope.operator.alerts.reading import Alert

REMEMBERED_MOST = 10_000
REMEMBERED_SECONDS = 7 * 86400.0


class Occasions:
    """Remembers firings by fingerprint and start. Bounded: the oldest is forgotten first."""

    def __init__(self, monotonic_seconds: Callable[[], float]) -> None:
        self._monotonic_seconds = monotonic_seconds
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], float] = OrderedDict()

    def has(self, alert: Alert) -> bool:
        with self._lock:
            seen_at = self._seen.get(alert.occasion)
            return seen_at is not None and self._monotonic_seconds() - seen_at < REMEMBERED_SECONDS

    def remember(self, alerts: Iterable[Alert]) -> None:
        with self._lock:
            for alert in alerts:
                self._seen[alert.occasion] = self._monotonic_seconds()
                self._seen.move_to_end(alert.occasion)
            while len(self._seen) > REMEMBERED_MOST:
                self._seen.popitem(last=False)
