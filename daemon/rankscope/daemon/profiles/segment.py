"""The encoding of stored profiles. A segment is about an hour of intervals with one dictionary of frames, names and
stacks. The dictionary grows in chunks, one per write; the writer keeps all of it in memory, so a segment belongs to one
run of one daemon.

Blobs are compressed with a checksum, so a reader sees most damage of the disk at once. Every number is checked
against its dictionary all the same."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.analysis.profiles.phases import phase_of
from rankscope.analysis.profiles.profile import Profile, profile_of_columns
from rankscope.analysis.stats.robust import Ints
from rankscope.common.text import printable
from rankscope.daemon.samples import MAX_RANK, Recording

NAME_CHARACTERS: Final = 256
MAX_FRAMES_PER_STACK: Final = 512
# Of one interval of one rank, so that others have room too.
MAX_STACKS_PER_INTERVAL: Final = 8192  # of all of its recordings
MAX_NEW_FRAMES: Final = 4096
# Of a segment: numbers take two bytes, and the writer keeps the stacks in memory. An interval fits into an empty one.
MAX_NUMBERS: Final = 1 << 16
MAX_STACKS: Final = 1 << 15
MAX_STACK_FRAMES: Final = MAX_STACKS_PER_INTERVAL * MAX_FRAMES_PER_STACK
MORE_FRAMES: Final = Frame("(more frames)", "", 0)
MAX_SAMPLES: Final = 1_000_000  # of a stack in an interval
# Numbers beyond these come from no recording.
MAX_PERIOD_NANOS: Final = 10**12
MAX_CHUNK_BYTES: Final = 256 << 20  # a damaged chunk must not fill the memory
COMPRESSION_LEVEL: Final = 1  # takes half the time of the default, for a fifth more bytes

Key = TypeVar("Key", Frame, str)


class SegmentFullError(Exception):
    """No room for these stacks: begin another segment."""


class DamagedError(Exception):
    """Content that no writer wrote."""


class Interval(NamedTuple):
    rank: int
    period_nanos: int  # that a sample stands for
    columns: bytes


class _Chunk(msgspec.Struct, array_like=True):
    """What the dictionary has more than before. The bytes are columns of numbers of two bytes."""

    frames: list[Frame]
    names: list[str]  # of threads and phases
    stack_lengths: bytes
    stack_phases: bytes
    stack_frames: bytes


_CHUNKS = msgspec.msgpack.Decoder(_Chunk)  # on import, before there are threads that could be the first to decode one


class SegmentWriter:
    def __init__(self) -> None:
        self._frames: dict[Frame, int] = {}
        self._frames_by_number: list[Frame] = []
        self._names: dict[str, int] = {}
        self._stacks: dict[Stack, int] = {}  # of the very frames above: copies would take more memory
        self._stack_frames = 0
        self._frames_left = 0  # that the interval may add
        self._begin_chunk()

    def encode(self, recordings: Iterable[Recording]) -> bytes:
        """The columns of an interval. Raises SegmentFullError; the recordings are then not part of this segment."""
        self._frames_left = MAX_NEW_FRAMES
        rows = []
        for recording in recordings:
            thread = self._name(recording.thread)
            for stack, count in recording.stacks.items():
                number = self._stacks.get(stack)
                rows.append((self._new_stack(stack) if number is None else number, thread, count))
        stacks, threads, samples = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
        keys, places = np.unique(stacks * MAX_NUMBERS + threads, return_inverse=True)
        stacks, threads = np.divmod(keys, MAX_NUMBERS)
        totals = np.minimum(np.bincount(places, samples, len(keys)), MAX_SAMPLES)
        columns = (np.diff(stacks, prepend=0).astype("u2"), threads.astype("u2"), totals.astype("u4"))
        return _compress(b"".join(column.tobytes() for column in columns))

    def take_chunk(self) -> bytes | None:
        """What the dictionary has more than at the last call."""
        columns = (self._new_lengths, self._new_phases, self._new_stack_frames)
        chunk = _Chunk(
            self._frames_by_number[self._written_frames :],
            list(self._names)[self._written_names :],
            *(column.tobytes() for column in columns),
        )
        if not (chunk.frames or chunk.names or chunk.stack_lengths):
            return None
        self._begin_chunk()
        return _compress(msgspec.msgpack.encode(chunk))

    def _begin_chunk(self) -> None:
        self._written_frames, self._written_names = len(self._frames), len(self._names)
        self._new_lengths, self._new_phases, self._new_stack_frames = array("H"), array("H"), array("H")

    def _new_stack(self, stack: Stack) -> int:
        """A stack with other frames than the dictionary has may become one that is known."""
        stack = stack[:MAX_FRAMES_PER_STACK]
        try:
            numbers = array("H", [*map(self._frames.__getitem__, stack)])
        except KeyError:
            numbers = array("H", [*map(self._frame, stack)])
        frames = tuple(map(self._frames_by_number.__getitem__, numbers))
        number = self._stacks.get(frames)
        if number is None:
            self._stack_frames += len(frames)
            if len(self._stacks) >= MAX_STACKS or self._stack_frames > MAX_STACK_FRAMES:
                raise SegmentFullError
            phase = self._name(phase_of(frames))
            self._stacks[frames] = number = len(self._stacks)
            self._new_lengths.append(len(frames))
            self._new_phases.append(phase)
            self._new_stack_frames.extend(numbers)
        return number

    def _frame(self, frame: Frame) -> int:
        """The process chose the names, so they are cleaned when the frame is first seen."""
        number = self._frames.get(frame)
        if number is None:
            line = frame.line if 0 <= frame.line < 1 << 31 else 0
            cleaned = Frame(clean_name(frame.function), clean_name(frame.file), line, frame.kind)
            frame = frame if frame == cleaned else cleaned  # the parser's own object is found faster
            if frame not in self._frames:
                frame = frame if self._frames_left else MORE_FRAMES
                self._frames_left -= self._frames_left > 0
            number = _number(self._frames, frame)
            if number == len(self._frames_by_number):
                self._frames_by_number.append(frame)
        return number

    def _name(self, name: str) -> int:
        return _number(self._names, clean_name(name))


def clean_name(name: str) -> str:
    """The end of a long path matters most."""
    return printable(name if len(name) <= NAME_CHARACTERS else "…" + name[1 - NAME_CHARACTERS :])


@dataclass(frozen=True)
class SegmentReader:
    frames: tuple[Frame, ...]
    names: tuple[str, ...]
    stack_frames: Ints
    stack_ends: Ints
    stack_phases: Ints

    @classmethod
    def of(cls, contents: Iterable[bytes]) -> SegmentReader:
        """The chunks, in their order. Raises DamagedError."""
        try:
            chunks = [_CHUNKS.decode(_decompress(content)) for content in contents]
        except msgspec.MsgspecError as error:
            raise DamagedError(str(error)) from error
        lengths, phases, stack_frames = (
            _numbers(b"".join(getattr(chunk, column) for chunk in chunks), "u2")
            for column in ("stack_lengths", "stack_phases", "stack_frames")
        )
        frames = tuple(frame for chunk in chunks for frame in chunk.frames)
        names = tuple(name for chunk in chunks for name in chunk.names)
        if len(phases) != len(lengths) or len(stack_frames) != lengths.sum():
            raise DamagedError("stacks have other lengths than they say")
        _check(stack_frames, len(frames))
        _check(phases, len(names))
        return cls(frames, names, stack_frames, np.cumsum(lengths), phases)

    def profile(self, intervals: Sequence[Interval]) -> Profile:
        """Raises DamagedError."""
        rows = np.concatenate([*map(self._rows, intervals), np.zeros((6, 0), np.int64)], axis=1)
        used, rows[0] = np.unique(rows[0], return_inverse=True)
        lengths = np.diff(self.stack_ends, prepend=0)[used]
        ends = np.cumsum(lengths)
        # The frames of stack n are those up to its end in the dictionary.
        positions = np.arange(len(ends) and ends[-1]) + np.repeat(self.stack_ends[used] - ends, lengths)
        return profile_of_columns(self.frames, self.names, self.names, self.stack_frames[positions], ends, rows)

    def _rows(self, interval: Interval) -> Ints:
        rank, period_nanos, columns = interval
        if not (_is_below(rank, MAX_RANK) and _is_below(period_nanos, MAX_PERIOD_NANOS + 1)):
            raise DamagedError("an interval of an impossible rank or period")
        content = _decompress(columns)
        count, rest = divmod(len(content), 8)
        if rest:
            raise DamagedError("the columns of an interval are cut")
        stacks = np.cumsum(_numbers(content[: 2 * count], "u2"))
        threads, samples = _numbers(content[2 * count : 4 * count], "u2"), _numbers(content[4 * count :], "u4")
        _check(stacks, len(self.stack_ends))
        _check(threads, len(self.names))
        _check(samples, MAX_SAMPLES + 1)
        ranks = np.full(count, rank)
        return np.stack([stacks, ranks, threads, self.stack_phases[stacks], samples, samples * period_nanos])


def _number(numbers: dict[Key, int], key: Key) -> int:
    number = numbers.setdefault(key, len(numbers))
    if number >= MAX_NUMBERS:
        raise SegmentFullError
    return number


def _numbers(content: bytes, kind: str) -> Ints:
    if len(content) % np.dtype(kind).itemsize:
        raise DamagedError("a column is cut")
    return np.frombuffer(content, kind).astype(np.int64)


def _check(numbers: Ints, limit: int) -> None:
    if len(numbers) and int(numbers.max()) >= limit:
        raise DamagedError("a number is beyond its limit")


def _is_below(value: object, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit


def _compress(content: bytes) -> bytes:
    return zlib.compress(content, COMPRESSION_LEVEL)


def _decompress(content: object) -> bytes:
    """A damaged column of a row can be of any type."""
    if not isinstance(content, bytes):
        raise DamagedError("a blob is not one")
    decompressor = zlib.decompressobj()
    try:
        plain = decompressor.decompress(content, MAX_CHUNK_BYTES)
    except zlib.error as error:
        raise DamagedError(str(error)) from error
    if not decompressor.eof:
        raise DamagedError("cut or too long")
    return plain
