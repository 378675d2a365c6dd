"""Windows as the job table keeps them: the figures that every tick needs, and the message itself as it came, which is
read only when somebody asks for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, overload

import numpy as np
from google.protobuf.message import DecodeError

from rankscope.operator.correlation.batch_reading import read_batch
from rankscope.operator.correlation.measuring import measure
from rankscope.operator.correlation.wire_shapes import read_figures
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow

# Fewer are read sooner one by one.
BATCH_LEAST = 200
UNREADABLE = "the daemon's message could not be read"


class RankSeen:
    """A rank's process under the names that are ours. One for all of its windows."""

    __slots__ = ("identity", "incarnation", "job", "node", "rank", "stage", "world_size")

    def __init__(self, identity: RankIdentity) -> None:
        """`identity` must not change any more."""
        self.identity = identity
        self.job = identity.job
        self.node = identity.node
        self.rank = identity.rank
        self.world_size = identity.world_size
        self.incarnation = (identity.node, identity.pid, identity.incarnation)
        coordinates = identity.coordinates
        self.stage = coordinates.pipeline if coordinates.HasField("pipeline") else -1


class ReadWindow(NamedTuple):
    """What is read of a window's bytes at once."""

    identity: bytes
    start_unix_nanos: int
    end_unix_nanos: int
    measured: bytes  # a row of `measuring`


class HeldWindow:
    __slots__ = ("heard_unix_seconds", "message_bytes", "read", "who")

    def __init__(self, who: RankSeen, message_bytes: bytes, read: ReadWindow) -> None:
        self.who = who
        self.message_bytes = message_bytes
        self.read = read
        self.heard_unix_seconds = 0.0  # set by the table

    @property
    def window_seconds(self) -> float:
        return (self.read.end_unix_nanos - self.read.start_unix_nanos) / 1e9

    @property
    def identity(self) -> RankIdentity:
        return self.who.identity

    def message(self) -> RankWindow:
        """All of it, under our names. What turns out to be garbage is a window with nothing but its names."""
        try:
            window = RankWindow.FromString(self.message_bytes)
        except DecodeError:
            window = RankWindow(end_unix_nanos=self.read.end_unix_nanos, problems=[UNREADABLE])
        window.identity.CopyFrom(self.who.identity)
        return window


def read_windows(windows: Sequence[bytes]) -> list[ReadWindow | None]:
    """None for what is no message."""
    if len(windows) < BATCH_LEAST:
        return [_read_window(window) for window in windows]
    batch = read_batch(windows)
    packed = batch.rows.tobytes()
    size = len(packed) // len(windows)
    places = zip(windows, batch.identity_start.tolist(), batch.identity_end.tolist(), strict=True)
    found: list[ReadWindow | None] = list(
        map(
            ReadWindow,
            [window[start:end] for window, start, end in places],
            batch.start_unix_nanos.tolist(),
            batch.end_unix_nanos.tolist(),
            [packed[start : start + size] for start in range(0, len(packed), size)],
        )
    )
    for number in np.flatnonzero(~batch.is_read).tolist():
        found[number] = _read_window(windows[number])
    return found


def _read_window(window: bytes) -> ReadWindow | None:
    try:
        figures = read_figures(window)
        return ReadWindow(figures.identity, figures.start_unix_nanos, figures.end_unix_nanos, measure(figures))
    except DecodeError:
        return None


def hold(window: RankWindow) -> HeldWindow:
    """A window that came as a message."""
    message_bytes = window.SerializeToString()
    read = _read_window(message_bytes)
    assert read is not None, "what was just written is a message"
    return HeldWindow(RankSeen(window.identity), message_bytes, read)


class HeldWindows(Sequence[RankWindow]):
    """Messages in the order of their ranks, each read when it is asked for; whose they are costs nothing."""

    def __init__(self, windows: Mapping[int, HeldWindow]) -> None:
        """By rank; `windows` must not change any more."""
        self._windows = windows
        self._identities: dict[int, RankIdentity] | None = None
        self._ordered: list[HeldWindow] | None = None

    @property
    def identities(self) -> Mapping[int, RankIdentity]:
        if self._identities is None:
            self._identities = {window.who.rank: window.who.identity for window in self._in_order}
        return self._identities

    @property
    def _in_order(self) -> list[HeldWindow]:
        if self._ordered is None:
            self._ordered = [self._windows[rank] for rank in sorted(self._windows)]
        return self._ordered

    def __len__(self) -> int:
        return len(self._windows)

    def __iter__(self) -> Iterator[RankWindow]:
        return (window.message() for window in self._in_order)

    @overload
    def __getitem__(self, index: int) -> RankWindow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RankWindow]: ...
    def __getitem__(self, index: int | slice) -> RankWindow | Sequence[RankWindow]:
        if isinstance(index, slice):
            return [window.message() for window in self._in_order[index]]
        return self._in_order[index].message()
