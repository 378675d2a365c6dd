"""When windows begin and end. Borders are multiples of the length since 1970, so windows of all nodes line up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from rankscope.daemon.samples import Span

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
# Of a window. Smaller steps of the wall clock are ignored: the window is that much too long or too short.
CLOCK_TOLERANCE_RATIO = 0.1


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
    catching up. Borders are on the wall clock, lengths on the monotonic one: when the wall clock is set, or the machine
    was suspended, the next window ends on a border of the new time and is as long as it really was."""

    def __init__(self, clock: Clock, window_seconds: float) -> None:
        self._clock = clock
        self._length_nanos = round(window_seconds * 1e9)
        self._start, self._start_monotonic, _ = self._last_border()
        self.skipped_total = 0

    def next_span(self, poll: Callable[[], None]) -> Span | None:
        """Call `poll` about five times a second until the border; None when the daemon should stop. A span longer
        than a window means that the daemon or the machine missed the borders inside it."""
        while True:
            border, monotonic, remaining_seconds = self._last_border()
            passed_nanos = round((monotonic - self._start_monotonic) * 1e9)
            if passed_nanos >= self._length_nanos // 2:
                break
            if self._clock.wait(min(POLL_SECONDS, remaining_seconds)):
                return None
            poll()
        moved_nanos = border - self._start - passed_nanos
        is_set = abs(moved_nanos) > CLOCK_TOLERANCE_RATIO * self._length_nanos
        if is_set:
            log.warning("the clock was set by %+.1f s; windows continue at the new time", moved_nanos / 1e9)
        span = Span(border - passed_nanos if is_set else self._start, border)
        self.skipped_total += max(0, round(passed_nanos / self._length_nanos) - 1)
        self._start, self._start_monotonic = border, monotonic
        return span

    def _last_border(self) -> tuple[int, float, float]:
        """The border, when it was on the monotonic clock, and the seconds until the next one."""
        unix_nanos, monotonic = self._clock.unix_nanos(), self._clock.monotonic_seconds()
        since_nanos = unix_nanos % self._length_nanos
        return unix_nanos - since_nanos, monotonic - since_nanos / 1e9, (self._length_nanos - since_nanos) / 1e9
