"""The files of the store: one SQLite file per segment, in a folder of the daemon's own.

Only the file that this daemon has begun is written to; earlier ones are read, and removed as a whole. So damage on the
disk costs the profiles of one file, and not those that are recorded now."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from rankscope.analysis.profiles.profile import Profile
from rankscope.common.private_folder import FolderError, claim
from rankscope.common.text import one_line
from rankscope.daemon.profiles.segment import (
    MAX_PERIOD_NANOS,
    DamagedError,
    Interval,
    SegmentFullError,
    SegmentReader,
    SegmentWriter,
)
from rankscope.daemon.samples import Problem, Recording, Span

SET_ASIDE: Final = "profiles.damaged"
# What SQLite puts beside its file.
COMPANIONS: Final = ("-wal", "-shm", "-journal")
VERSION: Final = 1
PAGE_BYTES: Final = 4096
BUSY_SECONDS: Final = 5.0
SEGMENT_SECONDS: Final = 3600.0
MIN_SEGMENTS: Final = 8  # in the whole size, so that making room removes little
MAX_FILES: Final = 1024  # a daemon that is started again and again begins many
# Errors of SQLite that say nothing about the content of the file.
OUTSIDE: Final = ("is full", "disk I/O", "locked", "readonly", "unable to open", "out of memory", "interrupted")
_NAME: Final = re.compile(r"profiles-(\d{6,9})\.sqlite")
_SCHEMA: Final = f"""
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE dictionary (chunk INTEGER PRIMARY KEY, content BLOB);
CREATE TABLE intervals (number INTEGER PRIMARY KEY, start_unix_nanos INTEGER, end_unix_nanos INTEGER, run TEXT,
    rank INTEGER, period_nanos INTEGER, columns BLOB);
CREATE INDEX intervals_by_run ON intervals (run, start_unix_nanos, end_unix_nanos);
PRAGMA user_version = {VERSION};
COMMIT;
"""
_PRAGMAS: Final = (
    "synchronous = NORMAL",  # a power failure may lose the last intervals, not the file
    f"page_size = {PAGE_BYTES}",
    "wal_autocheckpoint = 256",
    "journal_size_limit = 1048576",
    "cache_size = -1024",
    "cell_size_check = ON",
    "trusted_schema = OFF",
)


@dataclass(frozen=True)
class Limits:
    total_bytes: int
    age_seconds: float  # by files
    # Kept free on the disk for others, though never more than the store may take.
    free_ratio: float = 0.05


class StoreError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text)
        self.problem = problem


class RankInterval(NamedTuple):
    run: str
    rank: int
    span: Span
    recordings: Sequence[Recording]

    @property
    def samples(self) -> int:
        return sum(recording.samples for recording in self.recordings)

    @property
    def period_nanos(self) -> int:
        """That a sample stands for, on average."""
        nanos = sum(recording.samples * recording.period_nanos for recording in self.recordings)
        return min(nanos // max(1, self.samples), MAX_PERIOD_NANOS)


class SegmentFile(NamedTuple):
    """A file at one moment: what is written later is not part of it."""

    number: int
    path: Path
    span: Span = Span(0, 0)  # of its intervals
    intervals: int = 0
    size_bytes: int = 0


@dataclass
class _Current:
    """The segment that is written to."""

    number: int
    connection: sqlite3.Connection
    begun_seconds: float
    dictionary: SegmentWriter = field(default_factory=SegmentWriter)


class Database:
    """For one thread at a time, except `read`."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._descriptor = -1
        self._files: dict[int, SegmentFile] = {}  # the oldest first
        self._last_number = 0
        self._current: _Current | None = None
        self._damaged: dict[int, SegmentFile] = {}  # set aside at the next write

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self._files.values())

    def open(self) -> Problem | None:
        """Does nothing if it is open. Returns what is wrong with a file; raises StoreError if there can be no store."""
        problem = None
        if self._descriptor < 0:
            with self._guarded():
                self._descriptor = claim(self._folder)
                named = [(_NAME.fullmatch(path.name), path) for path in self._folder.iterdir()]
                for number, path in sorted((int(name[1]), path) for name, path in named if name is not None):
                    self._last_number = number
                    if path.is_file() and not path.is_symlink():
                        try:
                            self._files[number] = _look_at(number, path)
                        except (sqlite3.Error, DamagedError) as error:
                            problem = self.damage(SegmentFile(number, path), error)
        return problem

    def close(self) -> None:
        self._end_segment()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def write(self, intervals: Sequence[RankInterval], unix_nanos: int, monotonic_seconds: float) -> None:
        """All of them. After an error, a part may be there, if they did not fit into one segment."""
        self.open()
        with self._guarded():
            self._make_room(unix_nanos)
            if self._current is not None and self._is_over(self._current, monotonic_seconds):
                self._end_segment()
            left = list(intervals)
            while left:
                current = self._current or self._begin_segment(monotonic_seconds)
                done = self._write_part(current, left)
                del left[:done]
                if left:
                    self._end_segment()

    def files(self, span: Span) -> list[SegmentFile]:
        """Those with intervals that overlap with it."""
        return [file for file in self._files.values() if file.span.overlaps(span)]

    def damage(self, file: SegmentFile, error: Exception) -> Problem:
        """Call it with an error of reading the file. If the file is damaged, it is set aside at the next write."""
        if not _is_damage(error):
            return self._problem(error)
        self._damaged[file.number] = file
        reason = one_line(str(error), 200)
        text = f"{file.path} is damaged, and its profiles are lost: {reason}; it becomes {SET_ASIDE}"
        return Problem("profiles", "corrupt", text)

    def _write_part(self, current: _Current, intervals: Sequence[RankInterval]) -> int:
        """Returns how many of them, from the first on, fit into the segment."""
        file, rows = self._files[current.number], []
        for interval in intervals:
            try:
                columns = current.dictionary.encode(interval.recordings)
            except SegmentFullError:
                break
            span, who = interval.span, (interval.run, interval.rank)
            rows.append((span.start_unix_nanos, span.end_unix_nanos, *who, interval.period_nanos, columns))
        chunk = current.dictionary.take_chunk()
        with current.connection as connection:
            if chunk is not None:
                connection.execute("INSERT INTO dictionary VALUES (NULL, ?)", (chunk,))
            connection.executemany("INSERT INTO intervals VALUES (NULL, ?, ?, ?, ?, ?, ?)", rows)
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        spans = [*([file.span] if file.intervals else []), *(interval.span for interval in intervals[: len(rows)])]
        self._files[current.number] = file._replace(
            span=Span(min(one.start_unix_nanos for one in spans), max(one.end_unix_nanos for one in spans)),
            intervals=file.intervals + len(rows),
            size_bytes=pages * PAGE_BYTES,
        )
        return len(rows)

    def _is_over(self, current: _Current, now_seconds: float) -> bool:
        is_large = self._files[current.number].size_bytes > self._limits.total_bytes / MIN_SEGMENTS
        return is_large or now_seconds - current.begun_seconds >= SEGMENT_SECONDS

    def _begin_segment(self, now_seconds: float) -> _Current:
        self._last_number += 1
        path = self._folder / f"profiles-{self._last_number:06}.sqlite"
        # SQLite gives its companions the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._files[self._last_number] = SegmentFile(self._last_number, path)
        connection = _connect(path)
        self._current = _Current(self._last_number, connection, now_seconds)
        connection.executescript(_SCHEMA)
        return self._current

    def _end_segment(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            with contextlib.suppress(sqlite3.Error):
                current.connection.close()
            if not self._files[current.number].intervals:
                self._remove(self._files[current.number])

    def _make_room(self, unix_nanos: int) -> None:
        """Remove the oldest files until the rest is within the limits."""
        for file in list(self._damaged.values()):
            self._remove(file, is_kept=True)
        usage = shutil.disk_usage(self._folder)
        kept_free_bytes = min(round(self._limits.free_ratio * usage.total), self._limits.total_bytes)
        limit_bytes = min(self._limits.total_bytes, self.size_bytes + usage.free - kept_free_bytes)
        least_end_unix_nanos = unix_nanos - round(self._limits.age_seconds * 1e9)
        for file in list(self._files.values()):
            is_old = not file.intervals or file.span.end_unix_nanos < least_end_unix_nanos
            if is_old or self.size_bytes > limit_bytes or len(self._files) >= MAX_FILES:
                self._remove(file)
        if limit_bytes < 0:
            raise OSError(errno.ENOSPC, f"{usage.free} of {usage.total} bytes are free on the disk; make room on it")

    def _remove(self, file: SegmentFile, is_kept: bool = False) -> None:
        """`is_kept`: under another name, in the place of the last one that was."""
        if self._current is not None and self._current.number == file.number:
            self._end_segment()
        for known in (self._files, self._damaged):
            known.pop(file.number, None)
        for companion in COMPANIONS:
            file.path.with_name(file.path.name + companion).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            file.path.replace(self._folder / SET_ASIDE) if is_kept else file.path.unlink()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, FolderError, TypeError, ValueError, OverflowError) as error:
            # The dictionary and the file may differ.
            with contextlib.suppress(OSError):
                self._end_segment()
            raise StoreError(self._problem(error)) from error

    def _problem(self, error: Exception) -> Problem:
        kind = "folder" if isinstance(error, FolderError) else "corrupt" if _is_damage(error) else "disk"
        reason = one_line(str(error), 300)
        text = f"profiles cannot be stored in {self._folder}: {reason}; set another folder, or make room on the disk"
        return Problem("profiles", kind, text)


def read(file: SegmentFile, run: str, span: Span, ranks: Collection[int] | None) -> Profile:
    """Raises sqlite3.Error or DamagedError. Nothing if the file has been removed to make room."""
    try:
        with contextlib.closing(_connect(file.path)) as connection:
            rows = connection.execute(
                "SELECT rank, period_nanos, columns FROM intervals"
                " WHERE run = ? AND start_unix_nanos < ? AND end_unix_nanos > ? AND number <= ?",
                (run, span.end_unix_nanos, span.start_unix_nanos, file.intervals),
            )
            intervals = [Interval(*row) for row in rows if ranks is None or row[0] in ranks]
            query = "SELECT content FROM dictionary ORDER BY chunk"
            chunks = [row[0] for row in connection.execute(query)] if intervals else []
    except sqlite3.OperationalError:
        if file.path.exists():
            raise
        intervals, chunks = [], []
    return SegmentReader.of(chunks).profile(intervals)


def _look_at(number: int, path: Path) -> SegmentFile:
    """Raises sqlite3.Error or DamagedError."""
    size_bytes = path.stat().st_size
    with contextlib.closing(_connect(path)) as connection:
        is_begun = connection.execute("SELECT 1 FROM sqlite_master").fetchone() is not None
        if not is_begun and size_bytes <= PAGE_BYTES:
            return SegmentFile(number, path)  # of a daemon that was killed just then
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            raise DamagedError(f"it is no store of profiles of version {VERSION}")
        (intervals,) = connection.execute("SELECT max(number) FROM intervals").fetchone()
        query = "SELECT min(start_unix_nanos), max(end_unix_nanos) FROM intervals"
        start, end = connection.execute(query).fetchone()
    if intervals is None:
        return SegmentFile(number, path)
    if not all(isinstance(value, int) for value in (intervals, start, end)):
        raise DamagedError("an interval has no time")
    return SegmentFile(number, path, Span(start, end), intervals, size_bytes)


def _connect(path: Path) -> sqlite3.Connection:
    address = f"{path.absolute().as_uri()}?mode=rw"  # not a new one
    connection = sqlite3.connect(address, timeout=BUSY_SECONDS, check_same_thread=False, uri=True)
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_damage(error: Exception) -> bool:
    """Whether the file's content is at fault, and not the disk or the folder."""
    is_outside = isinstance(error, sqlite3.Error) and any(text in str(error) for text in OUTSIDE)
    return isinstance(error, (sqlite3.Error, DamagedError)) and not is_outside
