"""A profile in the pprof format (`.pb.gz`), for `go tool pprof` and servers of continuous profiles, and back. The
messages are generated from `proto/rankscope/pprof`."""

from __future__ import annotations

import gzip
import zlib
from typing import Final

import numpy as np

from rankscope.analysis.profiles.frames import KERNEL, Frame
from rankscope.analysis.profiles.profile import Profile, profile_of_columns
from rankscope.common.text import printable
from rankscope.pprof import profile_pb2 as pb

# Limits of what is read.
MAX_CONTENT_BYTES: Final = 64 << 20  # uncompressed
MAX_ROWS: Final = 1 << 20
MAX_STACK_FRAMES: Final = 8 << 20  # of all stacks
MAX_DEPTH: Final = 4096
NAME_CHARACTERS: Final = 512
MAX_RANK: Final = 1 << 31
MAX_VALUE: Final = 1 << 62  # also of the sum
MAX_LINE_NUMBER: Final = 1 << 31
LABELS_READ: Final = 16  # of a row
LINES_READ: Final = 64  # of a location
# What the nanoseconds are of. Only profiles of wall time are read.
WALL_TIME: Final = "wall"
DEVICE_TIME: Final = "device"
# As the file of a kernel on a GPU, which has none.
GPU_FILE: Final = "[GPU]"


class PprofError(ValueError):
    """The bytes are no profile that `pprof` wrote, or one that is too large."""


def pprof(
    profile: Profile,
    begin_unix_nanos: int = 0,
    duration_nanos: int = 0,
    *,
    with_labels: bool = True,
    time_type: str = WALL_TIME,
) -> bytes:
    """Values are samples and nanoseconds; labels of the samples are rank, phase and thread."""
    writer = _Writer()
    message = writer.message
    message.sample_type.add(type=writer.text("samples"), unit=writer.text("count"))
    message.sample_type.add(type=writer.text(time_type), unit=writer.text("nanoseconds"))
    message.default_sample_type = writer.text(time_type)
    message.period_type.CopyFrom(message.sample_type[1])
    message.period = profile.nanos_total // max(1, profile.samples_total)
    message.time_nanos, message.duration_nanos = begin_unix_nanos, duration_nanos
    message.mapping.add(id=1, filename=0, has_functions=True, has_filenames=True, has_line_numbers=True)
    key_rank, key_phase, key_thread = (writer.text(key) for key in ("rank", "phase", "thread"))
    threads, phases = ([writer.text(name) for name in names] for names in (profile.threads, profile.phases))
    stacks = profile.stacks()
    locations: dict[int, list[int]] = {}  # by stack
    columns = (profile.stack, profile.rank, profile.thread, profile.phase, profile.samples, profile.nanos)
    for stack, rank, thread, phase, samples, nanos in zip(*(column.tolist() for column in columns), strict=True):
        if stack not in locations:
            locations[stack] = [writer.location(profile.frames[frame]) for frame in stacks[stack]]
        sample = message.sample.add(location_id=locations[stack], value=(samples, nanos))
        if not with_labels:
            continue
        sample.label.add(key=key_rank, num=rank)
        for key, name in ((key_phase, phases[phase]), (key_thread, threads[thread])):
            if name:
                sample.label.add(key=key, str=name)
    message.string_table.extend(writer.texts)
    return gzip.compress(message.SerializeToString(), mtime=0)


class _Writer:
    """Numbers texts, functions and locations as they are first needed."""

    def __init__(self) -> None:
        self.message = pb.Profile()
        self.texts: dict[str, int] = {"": 0}
        self._functions: dict[tuple[str, str], int] = {}
        self._locations: dict[Frame, int] = {}

    def text(self, text: str) -> int:
        """Made printable: pprof writes names to terminals as they are."""
        return self.texts.setdefault(printable(text), len(self.texts))

    def location(self, frame: Frame) -> int:
        number = self._locations.get(frame)
        if number is None:
            number = self._locations[frame] = len(self._locations) + 1
            location = self.message.location.add(id=number, mapping_id=1)
            location.line.add(function_id=self._function(frame), line=frame.line)
        return number

    def _function(self, frame: Frame) -> int:
        file = frame.file or (GPU_FILE if frame.kind == KERNEL else "")
        number = self._functions.get((frame.function, file))
        if number is None:
            number = self._functions[frame.function, file] = len(self._functions) + 1
            name = self.text(frame.function)
            self.message.function.add(id=number, name=name, system_name=name, filename=self.text(file))
        return number


def read_pprof(content: bytes, content_limit_bytes: int = MAX_CONTENT_BYTES, rows_limit: int = MAX_ROWS) -> Profile:
    """What `pprof` wrote, also if others sent it. Raises PprofError. Takes up to 25 times the content in memory."""
    plain, message = _decompressed(content, content_limit_bytes), pb.Profile()
    try:
        message.ParseFromString(plain)
    except Exception as error:
        raise PprofError("not a profile in the pprof format") from error
    if len(message.sample) > rows_limit:
        raise PprofError(f"{len(message.sample)} rows; at most {rows_limit} are read")
    try:
        return _profile(message)
    except (LookupError, ValueError) as error:
        raise error if isinstance(error, PprofError) else PprofError("a number in it refers to nothing") from error


def _decompressed(content: bytes, limit_bytes: int) -> bytes:
    decompressor = zlib.decompressobj(wbits=31)
    try:
        plain = decompressor.decompress(content, limit_bytes)
    except zlib.error as error:
        raise PprofError("not compressed with gzip") from error
    if not decompressor.eof:
        raise PprofError(f"cut off, or larger than {limit_bytes >> 20} MiB")
    return plain


def _profile(message: pb.Profile) -> Profile:
    texts = [printable(text, NAME_CHARACTERS) for text in message.string_table]
    kinds = [(_at(texts, kind.type), _at(texts, kind.unit)) for kind in message.sample_type]
    place_samples, place_nanos = kinds.index(("samples", "count")), kinds.index((WALL_TIME, "nanoseconds"))
    functions = {one.id: (_at(texts, one.name), _at(texts, one.filename)) for one in message.function}
    frames: dict[Frame, int] = {}
    location_frames = {
        one.id: [
            frames.setdefault(_frame(*functions[line.function_id], line.line), len(frames))
            for line in one.line[:LINES_READ]
        ]
        for one in message.location
    }
    stacks: dict[tuple[int, ...], int] = {}
    names: dict[str, dict[str, int]] = {"thread": {}, "phase": {}}
    rows = []
    length = 0
    for sample in message.sample:
        labels = {_at(texts, label.key): label for label in sample.label[:LABELS_READ]}
        if len(sample.location_id) > MAX_DEPTH:
            raise PprofError(f"a stack of {len(sample.location_id)} frames; at most {MAX_DEPTH} are read")
        numbers = tuple(number for location in sample.location_id for number in location_frames[location])
        length += len(numbers)
        rank, samples, nanos = labels["rank"].num, sample.value[place_samples], sample.value[place_nanos]
        if not 0 <= rank < MAX_RANK or not 0 <= samples < MAX_VALUE or not 0 <= nanos < MAX_VALUE:
            raise PprofError("a number in it is out of range")
        if length > MAX_STACK_FRAMES:
            raise PprofError(f"more than {MAX_STACK_FRAMES} frames on its stacks")
        thread, phase = (
            numbered.setdefault(_at(texts, labels[key].str) if key in labels else "", len(numbered))
            for key, numbered in names.items()
        )
        rows.append((stacks.setdefault(numbers, len(stacks)), rank, thread, phase, samples, nanos))
    if any(sum(column) >= MAX_VALUE for column in list(zip(*rows, strict=True))[4:]):
        raise PprofError("a number in it is out of range")
    return profile_of_columns(
        tuple(frames),
        tuple(names["thread"]),
        tuple(names["phase"]),
        np.fromiter((number for stack in stacks for number in stack), dtype=np.int64),
        np.cumsum([len(stack) for stack in stacks], dtype=np.int64),
        np.array(rows, dtype=np.int64).reshape(len(rows), 6).T,
    )


def _at(texts: list[str], number: int) -> str:
    """Negative numbers refer to nothing."""
    if number < 0:
        raise LookupError
    return texts[number]


def _frame(function: str, file: str, line: int) -> Frame:
    if not 0 <= line < MAX_LINE_NUMBER:
        raise PprofError("a number in it is out of range")
    return Frame(function, "", line, KERNEL) if file == GPU_FILE else Frame(function, file, line)
