"""Token buckets: how often something may happen. `now` is a monotonic time in seconds."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_KEYS = 4096


class TokenBucket:
    """Holds `burst` tokens at first and gains `per_second`, up to `burst`. Both may be changed while it is in use. Not
    thread-safe."""

    __slots__ = ("_filled_at", "_tokens", "burst", "per_second")

    def __init__(self, burst: float, per_second: float) -> None:
        self.burst = burst
        self.per_second = per_second
        self._tokens = burst
        self._filled_at: float | None = None

    def available(self, now: float) -> float:
        """Negative after more was spent than was there."""
        elapsed = 0.0 if self._filled_at is None else max(0.0, now - self._filled_at)
        self._tokens = min(self.burst, self._tokens + elapsed * self.per_second)
        self._filled_at = now
        return self._tokens

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take all of them, or none."""
        if self.available(now) < tokens:
            return False
        self._tokens -= tokens
        return True

    def take_up_to(self, now: float, tokens: int) -> int:
        """Take as many as there are, and return their number."""
        taken = max(0, min(tokens, int(self.available(now))))
        self._tokens -= taken
        return taken

    def spend(self, now: float, tokens: float = 1.0) -> None:
        """Take them even if they are not there; a negative number gives them back."""
        self._tokens = min(self.burst, self.available(now) - tokens)

    def wait_seconds(self, now: float, tokens: float = 1.0) -> float:
        """Until so many are available."""
        missing = tokens - self.available(now)
        if missing <= 0:
            return 0.0
        return missing / self.per_second if self.per_second > 0 else float("inf")


class KeyedTokenBuckets:
    """One bucket for each key, for a bounded number of keys: a full bucket needs no memory, and the key that was used
    least recently is forgotten first. Thread-safe."""

    def __init__(self, burst: float, per_second: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_second = per_second
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, key: str, tokens: float = 1.0) -> bool:
        with self._lock:
            bucket = self._buckets.get(key) or TokenBucket(self._burst, self._per_second)
            taken = bucket.take(self._monotonic(), tokens)
            self._keep(key, bucket)
            return taken

    def give_back(self, key: str) -> None:
        with self._lock:
            bucket = self._buckets.get(key)
            if bucket is not None:
                bucket.spend(self._monotonic(), -1.0)
                self._keep(key, bucket)

    def _keep(self, key: str, bucket: TokenBucket) -> None:
        self._buckets[key] = bucket
        self._buckets.move_to_end(key)
        if bucket.available(self._monotonic()) >= self._burst:
            del self._buckets[key]
        while len(self._buckets) > MAX_KEYS:
            self._buckets.popitem(last=False)
