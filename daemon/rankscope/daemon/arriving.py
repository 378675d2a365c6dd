"""Connections to the port with TLS that never show a certificate we know: gRPC ends them without a word, so they are
counted as they come, and the count is told."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

log = logging.getLogger(__name__)

# Longer than a handshake may take: whoever has not called by then is not going to.
PATIENCE_SECONDS = 12.0
TELL_SECONDS = 60.0
ARRIVALS_REMEMBERED = 1 << 16
PEERS_REMEMBERED = 4096


class Arrivals:
    """May be used from any thread."""

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS, tell_seconds: float = TELL_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._tell_seconds = tell_seconds
        self._lock = threading.Lock()
        self._waiting: deque[float] = deque(maxlen=ARRIVALS_REMEMBERED)
        self._peers: dict[str, float] = {}  # when each was last seen
        self._is_judging = False
        self._untold = 0
        self._told_at = float("-inf")
        self.strangers_total = 0

    def came(self) -> None:
        with self._lock:
            self._waiting.append(time.monotonic())
            self._judge_in(self._patience_seconds)

    def shown(self, peer: str) -> None:
        """A call came over a connection, known by its address and port, that has shown a certificate."""
        with self._lock:
            seen_at = self._peers.get(peer, float("-inf"))
            if len(self._peers) >= PEERS_REMEMBERED:
                self._peers.clear()
            self._peers[peer] = time.monotonic()
            # Ports are used again: a later arrival may be another connection from the same one.
            if self._waiting and self._waiting[-1] > seen_at:
                self._waiting.pop()

    def _judge_in(self, seconds: float) -> None:
        if not self._is_judging:
            self._is_judging = True
            timer = threading.Timer(seconds, self._judge)
            timer.daemon = True
            timer.start()

    def _judge(self) -> None:
        with self._lock:
            self._is_judging = False
            now = time.monotonic()
            while self._waiting and now - self._waiting[0] >= self._patience_seconds:
                self._waiting.popleft()
                self._untold += 1
                self.strangers_total += 1
            if self._untold and now - self._told_at >= self._tell_seconds:
                log.warning(
                    "refused %d connections: they showed no certificate, an expired one, one of another authority, or "
                    "spoke no TLS",
                    self._untold,
                )
                self._untold, self._told_at = 0, now
            if self._waiting:
                self._judge_in(max(0.1, self._waiting[0] + self._patience_seconds - now))
            elif self._untold:
                self._judge_in(self._patience_seconds)
