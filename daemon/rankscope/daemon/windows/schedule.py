"""When windows begin and end. Borders are multiples of the length since 1970, so windows of all nodes line up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from rankscope.daemon.samples import Span

POLL_SECONDS = 0.2


class Clock(Protocol):
    def unix_nanos(self) -> int: ...

    def monotonic_seconds(self) -> float: ...

    def wait(self, seconds: float) -> bool:
        """True, at once, when the daemon should stop."""
        ...

    def stop(self) -> None: ...


class RealClock:
    def __init__(self) -> None:
        self._stop = threading.Event()

    def unix_nanos(self) -> int:
        return time.time_ns()

    def monotonic_seconds(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> bool:
        return self._stop.wait(seconds)

    def stop(self) -> None:
        self._stop.set()


class Ticker:
    """Waits for one border after the other. After a delay it continues from the last border that passed, without
    catching up."""

    def __init__(self, clock: Clock, window_seconds: float) -> None:
        self._clock = clock
        self._length_nanos = round(window_seconds * 1e9)
        self._start = self._border_before(clock.unix_nanos())
        self.skipped_total = 0

    def next_span(self, poll: Callable[[], None]) -> Span | None:
        """Call `poll` about five times a second until the border; None when the daemon should stop. A span longer
        than a window means that the daemon or the machine missed the borders inside it."""
        while True:
            now = self._clock.unix_nanos()
            if now < self._start:
                # The clock was set back. Waiting for the old border could take hours.
                self._start = self._border_before(now)
            remaining_nanos = self._start + self._length_nanos - now
            if remaining_nanos <= 0:
                break
            if self._clock.wait(min(POLL_SECONDS, remaining_nanos / 1e9)):
                return None
            poll()
        end = self._border_before(now)
        span = Span(self._start, end)
        self.skipped_total += (end - self._start) // self._length_nanos - 1
        self._start = end
        return span

    def _border_before(self, unix_nanos: int) -> int:
        return unix_nanos - unix_nanos % self._length_nanos
