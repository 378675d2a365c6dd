"""The figures of a window as one row of numbers, for a price that a fleet can pay: thousands of windows a second."""

from __future__ import annotations

import struct
from collections.abc import Callable
from operator import itemgetter

import numpy as np

from rankscope.analysis.stats.robust import Floats
from rankscope.operator.correlation.wire_shapes import ABSENT, ABSENT_COUNT, ABSENT_NANOS, CAPTURED_STEPS, Figures
from rankscope.v1.window_pb2 import CauseSeconds, StepStatistics

NAN = float("nan")
# Causes in the order of a row.
CAUSES = ("self", "wait", "input", "forward", "backward", "optimizer", "checkpoint", "other")
# Of a process group, as a window tells of it.
GROUP_ROW = ("id", "size", "position", "kind", "samples", "seconds", "step_seconds")
GROUPS_READ = 8
# What a row holds, in the units of the message; NaN where it is not there. Statistics: NaN where there are none.
ROW = (
    "step_mean",
    "self_p10",
    "self_p90",
    "wait_p10",
    *CAUSES,
    "steps",
    "steps_total",
    "last_step_unix_nanos",
    "run_delay",
    "throttled",
    "stopped",
    "mfu_ratio",
    "host_seconds",
    "run_ahead_seconds",
    "window_nanos",
    "is_captured",
    *(f"group{number}_{name}" for number in range(GROUPS_READ) for name in GROUP_ROW),
)
# Sets of fields that daemons send are few; a liar must not fill the memory with others.
SHAPES_KEPT = 512

_ROW = struct.Struct(f"<{len(ROW) - GROUPS_READ * len(GROUP_ROW)}d")
_GROUP_BYTES = 8 * len(GROUP_ROW)
_NO_GROUPS = struct.pack("<d", NAN) * (GROUPS_READ * len(GROUP_ROW))
# A double takes nine bytes, the first of which tells the field.
_STRIDE = 9
_FIXED64 = 1
_ABSENT_FIELD = ABSENT[0] >> 3

Seconds = tuple[float, ...]  # the first of ROW, up to the causes
_Key = tuple[int, int, int, bytes]
_Reader = Callable[[bytes], Seconds]
_readers: dict[_Key, _Reader | None] = {}


def measure(figures: Figures) -> bytes:
    """A row, packed. Raises DecodeError for what is no message."""
    step, own, wait = figures.step, figures.self, figures.wait
    # Messages of nothing but doubles, as all of these are: where their first bytes are the same, so are the places of
    # all their fields, which are worked out once.
    doubles = step + own + wait + figures.causes
    key = (len(step), len(own), len(wait), doubles[::_STRIDE])
    read = _readers.get(key)
    if read is not None and len(doubles) == _STRIDE * len(key[3]):
        seconds = read(doubles)
    else:
        seconds = _read_anew(figures, key, doubles)
    steps, total, last = figures.steps, figures.steps_total, figures.last_step_unix_nanos
    process = figures.process
    groups = figures.groups
    groups = groups[: len(groups) - len(groups) % _GROUP_BYTES][: len(_NO_GROUPS)]
    plain = _ROW.pack(
        *seconds,
        NAN if steps == ABSENT_COUNT else steps,
        NAN if total == ABSENT_COUNT else total,
        NAN if last == ABSENT_NANOS else last,
        process.run_delay_seconds,
        process.throttled_seconds,
        process.stopped_seconds,
        figures.mfu_ratio,
        figures.host_seconds,
        figures.run_ahead_seconds,
        figures.end_unix_nanos - figures.start_unix_nanos,
        CAPTURED_STEPS in figures.sources,
    )
    return plain + groups + _NO_GROUPS[len(groups) :]


def rows(packed: list[bytes]) -> dict[str, Floats]:
    """Columns by the names of ROW."""
    table = np.frombuffer(b"".join(packed), dtype="<f8").reshape(len(packed), len(ROW)).T
    return dict(zip(ROW, np.ascontiguousarray(table), strict=True))


def _read_anew(figures: Figures, key: _Key, doubles: bytes) -> Seconds:
    if len(doubles) == _STRIDE * len(key[3]) and len(_readers) < SHAPES_KEPT:
        reader = _readers[key] = _reader(key)
        if reader is not None:
            return reader(doubles)
    return _by_message(figures)


def _reader(key: _Key) -> _Reader | None:
    """None where there is something else than doubles."""
    lengths, tags = key[:3], key[3]
    if any(length % _STRIDE for length in lengths):
        return None
    if any(tag & 7 != _FIXED64 or tag >> 3 == 0 or tag > 127 for tag in tags):
        return None
    ends = np.cumsum([0, *(length // _STRIDE for length in lengths)]).tolist()
    # Of a field that occurs twice the last one counts.
    places = [
        {tags[place] >> 3: place for place in range(start, end)}
        for start, end in zip(ends, [*ends[1:], len(tags)], strict=True)
    ]
    nothing, zero = len(tags), len(tags) + 1  # behind the doubles
    chosen = []
    for message, field in ((0, "mean_seconds"), (1, "p10_seconds"), (1, "p90_seconds"), (2, "p10_seconds")):
        number = StepStatistics.DESCRIPTOR.fields_by_name[field].number
        missing = nothing if _ABSENT_FIELD in places[message] else zero
        chosen.append(places[message].get(number, missing))
    chosen += [places[3].get(CauseSeconds.DESCRIPTOR.fields_by_name[cause].number, nothing) for cause in CAUSES]
    unpack, pick = struct.Struct("<" + "xd" * len(tags)).unpack, itemgetter(*chosen)
    return lambda doubles: pick((*unpack(doubles), NAN, 0.0))


def _by_message(figures: Figures) -> Seconds:
    step, own, wait = (_statistics(message) for message in (figures.step, figures.self, figures.wait))
    causes = {field.name: value for field, value in CauseSeconds.FromString(figures.causes).ListFields()}
    return (
        NAN if step is None else step.mean_seconds,
        NAN if own is None else own.p10_seconds,
        NAN if own is None else own.p90_seconds,
        NAN if wait is None else wait.p10_seconds,
        *(causes.get(cause, NAN) for cause in CAUSES),
    )


def _statistics(message: bytes) -> StepStatistics | None:
    return None if message == ABSENT else StepStatistics.FromString(message)
