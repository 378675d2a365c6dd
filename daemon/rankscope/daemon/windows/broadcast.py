"""Delivers each tick's windows to all readers without waiting for any of them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rankscope.daemon.samples import Column, RankKey, Span
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow

QUEUED_TICKS = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tick:
    """All windows that closed at one border. The messages are shared by all readers: never change them."""

    span: Span
    windows: Mapping[RankKey, RankWindow] = field(default_factory=dict)
    departed: tuple[RankIdentity, ...] = ()
    step_seconds: Mapping[RankKey, Column] = field(default_factory=dict)  # every step; in this process only


class TooManyReadersError(Exception):
    """Every reader holds a thread and a queue, so their number is bounded."""


class Reader:
    """One reader's bounded queue. When it is full, the oldest tick is dropped. `end` ends its stream."""

    def __init__(self, publisher: Publisher, end: Callable[[], object]) -> None:
        self._publisher = publisher
        self._end = end
        self._ticks: deque[Tick] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.dropped = 0

    @property
    def is_stalled(self) -> bool:
        """It has read nothing for a whole queue of ticks."""
        return len(self._ticks) >= QUEUED_TICKS

    def evict(self) -> None:
        self.close()
        self._end()

    def take(self) -> Tick | None:
        """The next tick, waiting for it; None once the reader is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._ticks))
            return None if self._closed else self._ticks.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._publisher.forget(self)

    def put(self, tick: Tick) -> bool:
        """False if a tick was dropped."""
        with self._changed:
            full = len(self._ticks) >= QUEUED_TICKS
            if full:
                # A rank's end is reported only once, so it is kept when windows are dropped.
                lost = self._ticks.popleft()
                tick = Tick(tick.span, tick.windows, (*lost.departed, *tick.departed)) if lost.departed else tick
                self.dropped += 1
            self._ticks.append(tick)
            self._changed.notify_all()
            return not full


class Publisher:
    def __init__(self, max_readers: int) -> None:
        self._max_readers = max_readers
        self._lock = threading.Lock()
        self._readers: list[Reader] = []
        self._callbacks: list[Callable[[Tick], None]] = []
        self._latest: Tick | None = None
        self._dropped_total = 0
        self._closed = False

    @property
    def latest(self) -> Tick | None:
        return self._latest

    @property
    def readers(self) -> int:
        return len(self._readers)

    @property
    def dropped_total(self) -> int:
        return self._dropped_total

    def subscribe(self, callback: Callable[[Tick], None]) -> Callable[[], None]:
        """Call `callback` with every tick, in the daemon's own thread, so it must be quick. Returns a function that
        ends the subscription."""
        with self._lock:
            self._callbacks.append(callback)

        def unsubscribe() -> None:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return unsubscribe

    def open_reader(self, end: Callable[[], object] = lambda: None) -> Reader:
        """A reader that starts with the latest tick. If there are too many, one that has stopped reading gives way."""
        with self._lock:
            stalled = next((reader for reader in self._readers if reader.is_stalled), None)
            is_full = len(self._readers) >= self._max_readers
        if is_full and stalled is not None:
            log.info("a reader of windows that has stopped reading gives way to a new one")
            stalled.evict()
        with self._lock:
            if len(self._readers) >= self._max_readers:
                raise TooManyReadersError(f"{self._max_readers} readers already watch this daemon")
            reader = Reader(self, end)
            if self._latest is not None:
                reader.put(Tick(self._latest.span, self._latest.windows))
            self._readers.append(reader)
        if self._closed:
            reader.close()
        return reader

    def publish(self, tick: Tick) -> None:
        with self._lock:
            self._latest = tick
            self._dropped_total += sum(not reader.put(tick) for reader in self._readers)
            callbacks = tuple(self._callbacks)
        for callback in callbacks:
            try:
                callback(tick)
            except Exception:  # a failing subscriber must not affect the node
                log.exception("a subscriber failed on the windows that ended at %d", tick.span.end_unix_nanos)

    def forget(self, reader: Reader) -> None:
        with self._lock:
            if reader in self._readers:
                self._readers.remove(reader)

    def close(self) -> None:
        """End every stream."""
        self._closed = True
        with self._lock:
            readers = tuple(self._readers)
        for reader in readers:
            reader.close()
