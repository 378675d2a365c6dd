"""Many windows read at once: the wire format of all of them, field by field in step, as numpy wants it.

Windows of a fleet look alike, so that there are few different fields at a time. A window that does not fit, be it rare,
newer or garbage, is left to protobuf itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from rankscope.analysis.stats.robust import Bools, Floats, Ints
from rankscope.operator.correlation.measuring import CAUSES, GROUP_ROW, GROUPS_READ, ROW
from rankscope.operator.correlation.wire_shapes import CAPTURED_STEPS
from rankscope.v1.window_pb2 import CauseSeconds, ProcessUsage, RankWindow, StepStatistics

Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.uint64]
Which = Ints | slice
ALL = slice(None)

# A window has some twenty fields, of which `sources` and `problems` come many times.
FIELDS_READ = 64
# Different fields at one place, and different sets of doubles, that are worth reading in step.
KINDS_READ = 12
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_STRIDE = 9  # of a double with its tag
_ONE, _TO_LAST_BYTE = np.uint64(1), np.uint64(56)
_FIRST_BITS, _EIGHTH_BITS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
# Pairs of 7 bits to 14, of 14 to 28, of 28 to 56: which bits are the lower and the upper ones, and how far these move.
_GATHERING = tuple(
    (np.uint64(low), np.uint64(low << lane), np.uint64(shift))
    for low, lane, shift in ((0x007F007F007F007F, 8, 1), (0x00003FFF00003FFF, 16, 2), (0x000000000FFFFFFF, 32, 4))
)
_PADDING = bytes(16)  # so that nothing is read beyond the end


def _numbers(contract: type[Message]) -> dict[str, int]:
    return {field.name: field.number for field in contract.DESCRIPTOR.fields}


_WINDOW, _STATISTICS, _CAUSE, _PROCESS = map(_numbers, (RankWindow, StepStatistics, CauseSeconds, ProcessUsage))
_COUNTS = {_WINDOW[name]: name for name in ("steps", "steps_total", "last_step_unix_nanos")}
_TIMES = {_WINDOW[name]: name for name in ("start_unix_nanos", "end_unix_nanos")}
# Of each part that is made of doubles: number of the field to column of the row.
_COLUMN = {name: number for number, name in enumerate(ROW)}
_DOUBLES = {
    _WINDOW["step"]: {_STATISTICS["mean_seconds"]: _COLUMN["step_mean"]},
    _WINDOW["self"]: {
        _STATISTICS["p10_seconds"]: _COLUMN["self_p10"],
        _STATISTICS["p90_seconds"]: _COLUMN["self_p90"],
    },
    _WINDOW["wait"]: {_STATISTICS["p10_seconds"]: _COLUMN["wait_p10"]},
    _WINDOW["causes"]: {_CAUSE[name]: _COLUMN[name] for name in CAUSES},
}
_USAGE = {_PROCESS[f"{name}_seconds"]: _COLUMN[name] for name in ("run_delay", "throttled", "stopped")}
_RATIOS = {_WINDOW[name]: _COLUMN[name] for name in ("mfu_ratio", "host_seconds", "run_ahead_seconds")}
_FIRST_OF_GROUPS = _COLUMN[f"group0_{GROUP_ROW[0]}"]
_GROUP_BYTES = 8 * len(GROUP_ROW)
_PARTS = (*_DOUBLES, _WINDOW["process"], _WINDOW["identity"], _WINDOW["groups"])


@dataclass(frozen=True)
class Batch:
    """A row of each window; those that are not `is_read` have yet to be read one by one."""

    is_read: Bools
    identity_start: Ints  # in the window's bytes
    identity_end: Ints
    start_unix_nanos: Ints
    end_unix_nanos: Ints
    rows: Floats


def read_batch(windows: Sequence[bytes]) -> Batch:
    return _Reading(windows).batch()


class _Reading:
    def __init__(self, windows: Sequence[bytes]) -> None:
        count = len(windows)
        joined = b"".join((*windows, _PADDING))
        self.bytes: Bytes = np.frombuffer(joined, dtype=np.uint8)
        # What eight bytes from any place on are.
        places = (len(joined) - 7,)
        self.longs: Longs = np.ndarray(places, "<u8", joined, strides=(1,))
        self.doubles: Floats = np.ndarray(places, "<f8", joined, strides=(1,))
        self.ends = np.cumsum([len(window) for window in windows])
        self.starts = np.concatenate(([0], self.ends[:-1]))
        self.is_odd = np.zeros(count, dtype=np.bool_)
        self.rows = np.full((len(ROW), count), np.nan)
        self.rows[_COLUMN["is_captured"]] = 0.0
        self.times = {name: np.zeros(count, dtype=np.int64) for name in _TIMES.values()}
        self.part_starts = {part: np.zeros(count, dtype=np.int64) for part in _PARTS}
        self.part_lengths = {part: np.full(count, -1, dtype=np.int64) for part in _PARTS}

    def batch(self) -> Batch:
        self._walk()
        for part, columns in _DOUBLES.items():
            self._read_doubles(part, columns)
        self._read_usage()
        self._read_groups()
        start, end = self.times["start_unix_nanos"], self.times["end_unix_nanos"]
        self.rows[_COLUMN["window_nanos"]] = end - start
        identity = self.part_starts[_WINDOW["identity"]] - self.starts
        length = self.part_lengths[_WINDOW["identity"]]
        return Batch(
            ~self.is_odd & (length >= 0), identity, identity + length, start, end, np.ascontiguousarray(self.rows.T)
        )

    def _walk(self) -> None:
        """Over the fields of all windows, the first of each, then the second, and so on."""
        position = self.starts.copy()
        for _ in range(FIELDS_READ):
            is_going_on = (position < self.ends) & ~self.is_odd
            if is_going_on.all():
                self._read_next(position, ALL)
                continue
            at = np.flatnonzero(is_going_on)
            if not len(at):
                break
            self._read_next(position, at)
        self.is_odd |= position != self.ends

    def _read_next(self, position: Ints, at: Which) -> None:
        here = position[at]
        tag = self.bytes[here].astype(np.int64)
        here = here + 1
        if tag.max() > 127:
            wide = tag > 127
            second = self.bytes[here].astype(np.int64)
            self._leave(at, wide & (second > 127))
            tag = np.where(wide, (tag & 127) | (second << 7), tag)
            here = here + wide
        if (tag == tag[0]).all():
            position[at] = self._read_field(int(tag[0]), at, here)
        else:
            numbers = np.arange(len(position))[at]
            kinds = np.unique(tag)
            for kind in kinds[:KINDS_READ].tolist():
                same = tag == kind
                position[numbers[same]] = self._read_field(kind, numbers[same], here[same])
            if len(kinds) > KINDS_READ:
                self._leave(at, ~np.isin(tag, kinds[:KINDS_READ]))
        self.is_odd |= position > self.ends

    def _leave(self, at: Which, which: Bools) -> None:
        """To protobuf."""
        if which.any():
            self.is_odd[np.arange(len(self.is_odd))[at][which]] = True

    def _read_field(self, tag: int, at: Which, here: Ints) -> Ints:
        """Where the next one begins."""
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT and number:
            value, end = self._varint(at, here)
            if number in _TIMES:
                self.times[_TIMES[number]][at] = value.view(np.int64)
            elif number in _COUNTS:
                name = _COUNTS[number]
                is_signed = name == "last_step_unix_nanos"
                self.rows[_COLUMN[name], at] = value.view(np.int64) if is_signed else value
            return end
        if wire == _FIXED64:
            if number in _RATIOS:
                self.rows[_RATIOS[number], at] = self.doubles[here]
            return here + 8
        if wire == _LENGTH:
            length, start = self._length(at, here)
            # One that goes beyond its window is seen there, and what it says is not looked at.
            if number in self.part_starts:
                self.part_starts[number][at], self.part_lengths[number][at] = start, length
            elif number == _WINDOW["sources"]:
                self._look_for_capture(at, start, length)
            return start + length
        if wire != _FIXED32:
            self.is_odd[at] = True
        return here + 4

    def _varint(self, at: Which, here: Ints) -> tuple[Longs, Ints]:
        """Seven bits a byte, the lowest first, all but the last with the eighth bit set."""
        loaded = self.longs[here]
        last = ~loaded & _EIGHTH_BITS
        upto = last ^ (last - _ONE)  # all bits up to that of the last byte; all of them if it is not in here
        bits = loaded & upto & ~_EIGHTH_BITS
        for low, high, shift in _GATHERING:
            bits = (bits & low) | ((bits & high) >> shift)
        length = (((upto & _FIRST_BITS) * _FIRST_BITS) >> _TO_LAST_BYTE).astype(np.int64)
        more = last == 0
        if more.any():
            ninth, tenth = (self.bytes[here + place].astype(np.uint64) for place in (8, 9))
            is_tenth = more & (ninth > 127)
            self._leave(at, is_tenth & (tenth > 1))
            upper = (ninth & 127) << 56 | np.where(is_tenth, tenth & _ONE, 0).astype(np.uint64) << 63
            bits = np.where(more, bits | upper, bits)
            length = np.where(more, 9 + is_tenth, length)
        return bits, here + length

    def _length(self, at: Which, here: Ints) -> tuple[Ints, Ints]:
        length = self.bytes[here].astype(np.int64)
        start = here + 1
        if length.max() > 127:
            wide = length > 127
            second = self.bytes[start].astype(np.int64)
            third = np.where(second > 127, self.bytes[start + 1], 0).astype(np.int64)
            self._leave(at, wide & (third > 127))
            length = np.where(wide, (length & 127) | (second & 127) << 7 | third << 14, length)
            start = start + wide + (wide & (second > 127))
        return length, start

    def _look_for_capture(self, at: Which, start: Ints, length: Ints) -> None:
        maybe = np.flatnonzero(length == len(CAPTURED_STEPS))
        if len(maybe):
            # The last byte is the source, which is a capture the least often.
            said = maybe[self.bytes[start[maybe] + (len(CAPTURED_STEPS) - 1)] == CAPTURED_STEPS[-1]]
            entry = self.bytes[start[said][:, None] + np.arange(len(CAPTURED_STEPS))]
            said = said[(entry == np.frombuffer(CAPTURED_STEPS, dtype=np.uint8)).all(axis=1)]
            self.rows[_COLUMN["is_captured"], np.arange(len(self.ends))[at][said]] = 1.0

    def _read_doubles(self, part: int, columns: dict[int, int]) -> None:
        starts, lengths = self.part_starts[part], self.part_lengths[part]
        if part != _WINDOW["causes"]:  # without presence of their own: what is not sent is zero
            for column in columns.values():
                self.rows[column, lengths >= 0] = 0.0
        self.is_odd |= (lengths > 0) & (lengths % _STRIDE != 0)
        for length in np.unique(lengths[(lengths > 0) & ~self.is_odd]).tolist():
            at = np.flatnonzero((lengths == length) & ~self.is_odd)
            first = starts[at]
            tags = self.bytes[first[:, None] + np.arange(0, length, _STRIDE)]
            kinds = tags[:1] if (tags == tags[0]).all() else np.unique(tags, axis=0)
            for kind in kinds[:KINDS_READ]:
                same = slice(None) if len(kinds) == 1 else (tags == kind).all(axis=1)
                if ((kind & 7) != _FIXED64).any() or (kind > 127).any() or (kind < 8).any():
                    self.is_odd[at[same]] = True
                    continue
                for place, tag in enumerate(kind.tolist()):
                    if tag >> 3 in columns:
                        self.rows[columns[tag >> 3], at[same]] = self.doubles[first[same] + (_STRIDE * place + 1)]
            if len(kinds) > KINDS_READ:
                self.is_odd[at[~(tags[:, None] == kinds[:KINDS_READ]).all(axis=2).any(axis=1)]] = True

    def _read_groups(self) -> None:
        """Packed doubles, as many as there are groups."""
        starts, lengths = (table[_WINDOW["groups"]] for table in (self.part_starts, self.part_lengths))
        if (lengths <= 0).all():
            return
        counts = np.minimum(np.maximum(lengths, 0) // _GROUP_BYTES, GROUPS_READ)
        for count in np.unique(counts[counts > 0]).tolist():
            at = np.flatnonzero((counts == count) & ~self.is_odd)
            places = np.arange(count * len(GROUP_ROW))
            self.rows[_FIRST_OF_GROUPS + places[:, None], at] = self.doubles[starts[at] + 8 * places[:, None]]

    def _read_usage(self) -> None:
        """Doubles first, then counts, none of which are wanted."""
        starts, lengths = (table[_WINDOW["process"]] for table in (self.part_starts, self.part_lengths))
        at = np.flatnonzero((lengths > 0) & ~self.is_odd)
        here, ends = starts[at], starts[at] + lengths[at]
        for _ in range(len(_PROCESS)):
            going_on = np.flatnonzero(here < ends)
            at, here, ends = at[going_on], here[going_on], ends[going_on]
            if not len(at):
                return
            tag = self.bytes[here]
            is_double = (tag & 7) == _FIXED64
            self.is_odd[at[is_double & (here + _STRIDE > ends)]] = True
            for number, column in _USAGE.items():
                same = np.flatnonzero(tag == (number << 3 | _FIXED64))
                if len(same):
                    self.rows[column, at[same]] = self.doubles[here[same] + 1]
            # In another order than protobuf writes them, or something new.
            self.is_odd[at[~is_double & ((tag & 7 != _VARINT) | (tag > 127))]] = True
            at, here, ends = at[is_double], here[is_double] + _STRIDE, ends[is_double]
