"""The store of profiles on the node: one row per rank and interval, within limits of size and age.

A thread of its own writes. Nobody waits for it: what its queue has no room for is lost and counted. Whatever happens to
the disk or the file, samples may be lost, and the status says so; nothing is raised."""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias

from rankscope.analysis.profiles.phases import phase_of
from rankscope.analysis.profiles.profile import Profile, SampledStack, merge
from rankscope.common.text import printable_name
from rankscope.daemon.config import Config
from rankscope.daemon.profiles.database import Database, Limits, RankInterval, StoreError, read
from rankscope.daemon.profiles.segment import MAX_PERIOD_NANOS, MAX_STACKS_PER_INTERVAL, DamagedError
from rankscope.daemon.samples import MAX_RANK, Problem, Recording, Span

RUN_CHARACTERS: Final = 288  # no name that the operator gives, with its number, is cut
MAX_QUEUE: Final = 512  # recordings
MAX_INTERVALS: Final = 1024  # not written yet
CLOSE_SECONDS: Final = 5.0
MAX_UNIX_NANOS: Final = 1 << 62  # a time beyond it comes from no recording

# Gets the intervals that are over, whether or not the disk took them. It must neither block nor raise.
Listener: TypeAlias = Callable[[Sequence[RankInterval]], None]


@dataclass(frozen=True)
class Query:
    """None: all of them."""

    run: str
    span: Span  # intervals that overlap with it
    ranks: Collection[int] | None = None
    threads: Collection[str] | None = None
    phases: Collection[str] | None = None


@dataclass(frozen=True)
class StoreStatus:
    samples_stored: int = 0
    samples_lost: int = 0
    size_bytes: int = 0
    problem: Problem | None = None  # until a write succeeds


@dataclass
class _Open:
    """An interval that is not written yet."""

    since_seconds: float  # on the monotonic clock
    span: Span
    recordings: list[Recording] = field(default_factory=list)
    stacks: int = 0


class ProfileStore:
    """For any thread, except `close`. Only `query`, `flush` and `close` wait for the disk."""

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        interval_seconds: float,
        unix_nanos: Callable[[], int] = time.time_ns,
        monotonic_seconds: Callable[[], float] = time.monotonic,
        listener: Listener | None = None,
    ) -> None:
        self._database = Database(folder, limits)
        self._folder = folder
        self._interval_seconds = interval_seconds
        self._unix_nanos = unix_nanos
        self._monotonic_seconds = monotonic_seconds
        self._listener = listener
        self._queue: queue.Queue[Recording | threading.Event] = queue.Queue(MAX_QUEUE)
        self._open: dict[tuple[str, int, int], _Open] = {}  # by run, rank and start
        self._moving = threading.Lock()  # from open to stored; held while the disk is written
        self._status = StoreStatus()
        self._counting = threading.Lock()  # of the status; held for a moment
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="profiles", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(cls, config: Config, listener: Listener | None = None) -> ProfileStore:
        limits = Limits(config.profile_quota_bytes, config.profile_quota_seconds)
        return cls(Path(config.profile_dir), limits, config.profile_interval_seconds, listener=listener)

    def record(self, recording: Recording) -> None:
        """Never blocks."""
        try:
            self._queue.put_nowait(recording)
        except queue.Full:
            text = f"the disk of {self._folder} is too slow for profiles: some samples are lost; set another folder"
            self._count(lost=recording.samples, problem=Problem("profiles", "slow", text))

    def status(self) -> StoreStatus:
        return self._status

    def query(self, query: Query) -> Profile:
        """What is stored, and what will be."""
        run = _run_name(query.run)
        with self._moving:
            parts = [self._open_profile(query, run)]
            files = self._database.files(query.span)
        for file in files:
            try:
                parts.append(read(file, run, query.span, query.ranks))
            except (sqlite3.Error, DamagedError) as error:
                self._count(problem=self._database.damage(file, error))
        return merge([part for part in parts if part.samples_total]).filter(query.ranks, query.threads, query.phases)

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """Write what was recorded so far, also intervals that are not over. Whether that was done in time."""
        timeout_seconds = CLOSE_SECONDS if timeout_seconds is None else timeout_seconds
        done = threading.Event()
        try:
            self._queue.put(done, timeout=timeout_seconds)
        except queue.Full:
            return False
        return done.wait(timeout_seconds)

    def close(self) -> None:
        """Write what is open. A disk that does not answer is not waited for."""
        self.flush()
        self._is_closing = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(threading.Event())  # wakes it
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        with self._moving:
            try:
                self._count(problem=self._database.open())
            except StoreError as error:
                self._count(problem=error.problem)
        while not self._is_closing:
            try:
                item: Recording | threading.Event | None = self._queue.get(timeout=min(1.0, self._interval_seconds))
            except queue.Empty:
                item = None
            with self._moving:
                if isinstance(item, Recording):
                    self._add(item)
                self._write(everything=isinstance(item, threading.Event))
            if isinstance(item, threading.Event):
                item.set()
        self._database.close()

    def _add(self, recording: Recording) -> None:
        span, now_seconds = recording.span, self._monotonic_seconds()
        interval_nanos = round(self._interval_seconds * 1e9)
        start = span.start_unix_nanos // interval_nanos * interval_nanos
        is_plausible = (
            0 <= recording.rank < MAX_RANK
            and 0 <= start < MAX_UNIX_NANOS
            and 0 <= recording.period_nanos < MAX_PERIOD_NANOS
        )
        key = (_run_name(recording.run), recording.rank, start)
        has_room = key in self._open or len(self._open) < MAX_INTERVALS
        interval = self._open.get(key) or _Open(now_seconds, Span(start, start + interval_nanos))
        stacks = interval.stacks + len(recording.stacks)
        if not (is_plausible and has_room and recording.stacks and stacks <= MAX_STACKS_PER_INTERVAL):
            self._count(lost=recording.samples)
            return
        interval.recordings.append(recording)
        interval.stacks = stacks
        self._open[key] = interval

    def _write(self, everything: bool) -> None:
        now_seconds = self._monotonic_seconds()
        due = {
            key: RankInterval(*key[:2], interval.span, interval.recordings)
            for key, interval in self._open.items()
            if everything or now_seconds - interval.since_seconds >= self._interval_seconds
        }
        if not due:
            return
        intervals = list(due.values())
        samples = sum(interval.samples for interval in intervals)
        try:
            self._database.write(intervals, self._unix_nanos(), now_seconds)
            self._count(stored=samples)
            with self._counting:
                self._status = replace(self._status, size_bytes=self._database.size_bytes, problem=None)
        except StoreError as error:
            self._count(lost=samples, problem=error.problem)
        for key in due:
            del self._open[key]
        if self._listener is not None:
            self._listener(intervals)

    def _open_profile(self, query: Query, run: str) -> Profile:
        return Profile.of(
            SampledStack(stack, count, count * recording.period_nanos, rank, recording.thread, phase_of(stack))
            for (named, rank, _), interval in self._open.items()
            if named == run and interval.span.overlaps(query.span)
            for recording in interval.recordings
            for stack, count in recording.stacks.items()
        )

    def _count(self, stored: int = 0, lost: int = 0, problem: Problem | None = None) -> None:
        with self._counting:
            self._status = replace(
                self._status,
                samples_stored=self._status.samples_stored + stored,
                samples_lost=self._status.samples_lost + lost,
                problem=problem or self._status.problem,
            )


def _run_name(run: str) -> str:
    """Distinct for distinct runs, and bounded."""
    return printable_name(run, RUN_CHARACTERS) if len(run) > RUN_CHARACTERS or not run.isprintable() else run
