"""Windows out of the bytes of daemons' messages: who speaks, when, and the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError

from rankscope.operator.correlation.batch_reading import read_batch
from rankscope.operator.correlation.measuring import measure
from rankscope.operator.correlation.wire_shapes import read_figures

# Fewer are read sooner one by one; more at a time only take more memory.
BATCH_LEAST = 200
BATCH_MOST = 4096


@dataclass
class ReadWindows:
    """Lists, not an object for each: a fleet sends thousands a second."""

    identities: list[bytes | None] = field(default_factory=list)  # None for what is no message
    starts_unix_nanos: list[int] = field(default_factory=list)
    ends_unix_nanos: list[int] = field(default_factory=list)
    measured: list[bytes] = field(default_factory=list)


def read_windows(windows: Sequence[bytes]) -> ReadWindows:
    found = ReadWindows()
    for start in range(0, len(windows), BATCH_MOST):
        _read(windows[start : start + BATCH_MOST], found)
    return found


def _read(windows: Sequence[bytes], found: ReadWindows) -> None:
    if len(windows) < BATCH_LEAST:
        for window in windows:
            identity, start, end, measured = _read_one(window)
            found.identities.append(identity)
            found.starts_unix_nanos.append(start)
            found.ends_unix_nanos.append(end)
            found.measured.append(measured)
        return
    first = len(found.identities)
    batch = read_batch(windows)
    places = zip(windows, batch.identity_start.tolist(), batch.identity_end.tolist(), strict=True)
    found.identities += [window[start:end] for window, start, end in places]
    found.starts_unix_nanos += batch.start_unix_nanos.tolist()
    found.ends_unix_nanos += batch.end_unix_nanos.tolist()
    packed = batch.rows.tobytes()
    size = len(packed) // len(windows)
    found.measured += [packed[start : start + size] for start in range(0, len(packed), size)]
    for number in np.flatnonzero(~batch.is_read).tolist():
        identity, start, end, measured = _read_one(windows[number])
        found.identities[first + number] = identity
        found.starts_unix_nanos[first + number], found.ends_unix_nanos[first + number] = start, end
        found.measured[first + number] = measured


def _read_one(window: bytes) -> tuple[bytes | None, int, int, bytes]:
    try:
        figures = read_figures(window)
        return figures.identity, figures.start_unix_nanos, figures.end_unix_nanos, measure(figures)
    except DecodeError:
        return None, 0, 0, b""
