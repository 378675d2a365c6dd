"""Windows as the job table keeps them: the figures that every tick needs, and the message itself as it came, which is
read only when somebody asks for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from google.protobuf.message import DecodeError

from rankscope.operator.correlation.measuring import measure
from rankscope.operator.correlation.wire_shapes import read_figures
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow

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


class HeldWindow:
    __slots__ = ("end_unix_nanos", "heard_unix_seconds", "measured", "message_bytes", "start_unix_nanos", "who")

    def __init__(
        self, who: RankSeen, message_bytes: bytes, start_unix_nanos: int, end_unix_nanos: int, measured: bytes
    ) -> None:
        self.who = who
        self.message_bytes = message_bytes
        self.start_unix_nanos = start_unix_nanos
        self.end_unix_nanos = end_unix_nanos
        self.measured = measured  # a row of `measuring`
        self.heard_unix_seconds = 0.0  # set by the table

    @property
    def window_seconds(self) -> float:
        return (self.end_unix_nanos - self.start_unix_nanos) / 1e9

    @property
    def identity(self) -> RankIdentity:
        return self.who.identity

    def message(self) -> RankWindow:
        """All of it, under our names. What turns out to be garbage is a window with nothing but its names."""
        try:
            window = RankWindow.FromString(self.message_bytes)
        except DecodeError:
            window = RankWindow(end_unix_nanos=self.end_unix_nanos, problems=[UNREADABLE])
        window.identity.CopyFrom(self.who.identity)
        return window


def hold(window: RankWindow) -> HeldWindow:
    """A window that came as a message."""
    message_bytes = window.SerializeToString()
    measured = measure(read_figures(message_bytes))
    return HeldWindow(
        RankSeen(window.identity), message_bytes, window.start_unix_nanos, window.end_unix_nanos, measured
    )


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
