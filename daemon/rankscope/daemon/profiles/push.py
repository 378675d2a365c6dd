"""Continuous push of profiles to a server: the queue, the retries and what is counted.

A thread of its own encodes and sends. Nobody waits for it: while the server cannot be reached, profiles wait in a queue
that is limited in bytes and age; beyond that they are lost and counted."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from rankscope.daemon.collector import describe
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.profiles.database import RankInterval
from rankscope.daemon.profiles.pyroscope import REFUSED, PushError, Pyroscope, push_request
from rankscope.daemon.samples import Problem

MAX_ARRIVING: Final = 1024  # intervals that are not encoded yet
CLOSE_SECONDS: Final = 1.0
INVALID: Final = "invalid"
EXPIRED: Final = "expired"
QUEUE_FULL: Final = "queue_full"
LOSSES: Final = (REFUSED, EXPIRED, QUEUE_FULL, INVALID)


@dataclass(frozen=True)
class PushLimits:
    queue_bytes: int = 32 << 20
    age_seconds: float = 3300.0  # Pyroscope refuses profiles of more than an hour ago by default
    first_wait_seconds: float = 1.0  # after a failure; doubled after each further one
    longest_wait_seconds: float = 60.0


@dataclass(frozen=True)
class PushStatus:
    """A profile is an interval of a rank."""

    pushed_total: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)  # requests, by reason
    lost: Mapping[str, int] = field(default_factory=dict)  # profiles, by reason
    queued_bytes: int = 0
    problem: Problem | None = None  # until a request succeeds


class _Queued(NamedTuple):
    body: bytes
    since_seconds: float


LIMITS: Final = PushLimits()


class ProfilePusher:
    """A listener of the store. For any thread, except `close`."""

    def __init__(self, server: Pyroscope, node: str, limits: PushLimits = LIMITS) -> None:
        self._server = server
        self._node = node
        self._limits = limits
        self._arriving: queue.Queue[RankInterval | None] = queue.Queue(MAX_ARRIVING)
        self._queue: deque[_Queued] = deque()
        self._failed_in_a_row = 0
        self._next_seconds = 0.0
        self._counting = threading.Lock()  # held for a moment
        self._pushed_total = 0
        self._failures: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._queued_bytes = 0
        self._problem: Problem | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="rankscope-profile-push", daemon=True)
        self._thread.start()

    def __call__(self, intervals: Sequence[RankInterval]) -> None:
        """Never blocks. The intervals must not change any more."""
        for interval in intervals:
            try:
                self._arriving.put_nowait(interval)
            except queue.Full:
                self._lose(QUEUE_FULL)

    def status(self) -> PushStatus:
        with self._counting:
            return PushStatus(
                self._pushed_total, dict(self._failures), dict(self._lost), self._queued_bytes, self._problem
            )

    def close(self) -> None:
        """Send what waits, without retries. A server that does not answer is not waited for."""
        self._is_closing = True
        with contextlib.suppress(queue.Full):
            self._arriving.put_nowait(None)  # wakes it
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                interval = self._arriving.get(timeout=self._wait_seconds())
                if interval is not None:
                    self._enqueue(interval)
                    continue
            self._forget_old()
            is_due = self._is_closing or time.monotonic() >= self._next_seconds
            is_sent = bool(self._queue) and is_due and self._send_first()
            if self._is_closing and not is_sent:
                return

    def _wait_seconds(self) -> float | None:
        if self._is_closing:
            return 0.0
        return max(0.0, self._next_seconds - time.monotonic()) if self._queue else None

    def _enqueue(self, interval: RankInterval) -> None:
        try:
            body = push_request(interval, self._node)
        except Exception as error:  # noqa: BLE001 - reported; one profile must not end the push of all others
            text = f"a profile of rank {interval.rank} cannot be encoded: {describe(error)}; please report this"
            self._lose(INVALID, Problem("profile_push", INVALID, text))
            return
        if body:
            self._queue.append(_Queued(body, time.monotonic()))
            self._add_bytes(len(body))
        while self._queued_bytes > self._limits.queue_bytes:
            self._forget_first(QUEUE_FULL)

    def _forget_old(self) -> None:
        oldest_seconds = time.monotonic() - self._limits.age_seconds
        for _ in range(len(self._queue)):
            if self._queue[0].since_seconds < oldest_seconds:
                self._forget_first(EXPIRED)
            else:
                self._queue.rotate(-1)

    def _forget_first(self, reason: str) -> None:
        self._add_bytes(-len(self._queue.popleft().body))
        self._lose(reason)

    def _send_first(self) -> bool:
        """Whether it is done with."""
        try:
            self._server.push(self._queue[0].body)
        except PushError as error:
            with self._counting:
                self._failures[error.reason] += 1
                self._problem = Problem("profile_push", error.reason, str(error))
            if error.reason != REFUSED:
                self._queue.rotate(-1)  # one that the server cannot take must not hold up the others
                wait_seconds = error.retry_after_seconds + pause_seconds(self._failed_in_a_row, self._limits)
                self._next_seconds = time.monotonic() + wait_seconds
                self._failed_in_a_row += 1
                return False
            self._forget_first(REFUSED)
        else:
            self._add_bytes(-len(self._queue.popleft().body))
            with self._counting:
                self._pushed_total += 1
                self._problem = None
        self._failed_in_a_row = 0
        return True

    def _add_bytes(self, count: int) -> None:
        with self._counting:
            self._queued_bytes += count

    def _lose(self, reason: str, problem: Problem | None = None) -> None:
        with self._counting:
            self._lost[reason] += 1
            self._problem = problem or self._problem


def pause_seconds(failed_before: int, limits: PushLimits) -> float:
    """With jitter, so that the nodes of a fleet do not come back at the same moment."""
    doubled_seconds = limits.first_wait_seconds * 2.0 ** min(failed_before, 16)
    return min(doubled_seconds, limits.longest_wait_seconds) * random.uniform(0.5, 1.0)


def profile_pusher(config: Config) -> ProfilePusher | None:
    """The listener for the store. None: profiles stay on the node."""
    if config.profile_push_url == NONE:
        return None
    token_file, authority = (
        None if name == NONE else Path(name) for name in (config.profile_push_token_file, config.profile_push_authority)
    )
    tenant = "" if config.profile_push_tenant == NONE else config.profile_push_tenant
    return ProfilePusher(Pyroscope(config.profile_push_url, tenant, token_file, authority), config.node)
