"""Windows of daemons: the message, and windows as the job table keeps them.

A fleet sends thousands of windows a second, and most of a window is stacks that no rule reads. Every tick needs the
figures, which come as a table; the window itself stays encoded until it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from google.protobuf.message import DecodeError, Message

from rankscope.analysis.step_graph.window_operations import MAX_GROUPS, RankOperations, Seat
from rankscope.analysis.verdicts.window_columns import is_table, unpack
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import EncodedRanks
from rankscope.v1.window_pb2 import NetworkWindow, NodeNetwork, OperationsWindow, RankWindow, StepOperations

AXES = ("pipeline", "data", "tensor")  # of `RankSeen.coordinates`
# A rank is stale without a window for this long, and for three windows: a daemon sends one every few seconds.
MIN_STALE_SECONDS = 10.0
MIN_STALE_WINDOWS = 3.0
UNREADABLE = "the daemon's message could not be read"


class DaemonMessage:
    """A WatchRanksResponse of the daemon of `node`, the node that we connected to. Row `n` belongs to `windows[n]`
    and `ranks[n]`."""

    __slots__ = (
        *("_names", "_values", "departed", "end_unix_nanos"),
        *("node", "ranks", "reported_node", "start_unix_nanos", "windows"),
    )

    def __init__(self, node: str, message: bytes) -> None:
        """Raises ValueError for an invalid message."""
        try:
            read = EncodedRanks.FromString(message)
        except DecodeError:
            raise ValueError("it sent what is no message") from None
        columns = read.columns
        self.node = node
        self.reported_node = read.node  # what the daemon calls it
        self.start_unix_nanos, self.end_unix_nanos = columns.start_unix_nanos, columns.end_unix_nanos
        self.windows: Sequence[bytes] = read.windows
        self.ranks: Sequence[bytes] = columns.ranks  # identities
        self.departed: Sequence[bytes] = read.departed  # identities
        self._names, self._values = columns.names, columns.values
        count = len(self.windows)
        if len(self.ranks) != count or not is_table(self._names, self._values, count):
            raise ValueError("it sent windows and figures that do not belong together")

    def figures(self, count: int) -> list[bytes]:
        """Of the first `count` windows, in the row format of `window_columns`."""
        return unpack(self._names, self._values, count)


class RankSeen:
    """A rank's process under our names, shared by all of its windows."""

    __slots__ = (
        "_seats",
        "_sent",
        "coordinates",
        "identity",
        "incarnation",
        "job",
        "node",
        "rank",
        "stage",
        "world_size",
    )

    def __init__(self, identity: RankIdentity) -> None:
        """`identity` must not change afterwards."""
        self.identity = identity
        self.job = identity.job
        self.node = identity.node
        self.rank = identity.rank
        self.world_size = identity.world_size
        self.incarnation = (identity.node, identity.pid, identity.incarnation)
        place: Message = identity.coordinates
        self.coordinates = tuple([getattr(place, axis) if place.HasField(axis) else -1 for axis in AXES])
        self.stage = self.coordinates[0]
        self._sent = StepOperations()  # with nothing but the seats that the rank sent last
        self._seats: tuple[Seat, ...] = ()

    def seats(self, sent: StepOperations) -> tuple[Seat, ...]:
        """The rank's seats, the same object while they do not change: it sends them with every window."""
        if sent.seats != self._sent.seats:
            del self._sent.seats[:]
            self._sent.seats.extend(sent.seats[:MAX_GROUPS])
            self._seats = tuple(Seat(seat.number, seat.size, seat.position) for seat in self._sent.seats)
        return self._seats


class HeldWindow:
    __slots__ = ("end_unix_nanos", "figures", "heard_monotonic", "message_bytes", "start_unix_nanos", "who")

    def __init__(
        self, who: RankSeen, message_bytes: bytes, start_unix_nanos: int, end_unix_nanos: int, figures: bytes
    ) -> None:
        self.who = who
        self.message_bytes = message_bytes
        self.start_unix_nanos = start_unix_nanos
        self.end_unix_nanos = end_unix_nanos
        self.figures = figures  # a row of `window_columns`
        self.heard_monotonic = 0.0  # set by the table

    @property
    def window_seconds(self) -> float:
        return (self.end_unix_nanos - self.start_unix_nanos) / 1e9

    @property
    def identity(self) -> RankIdentity:
        return self.who.identity

    def message(self) -> RankWindow:
        """The whole window under our names. An invalid window has nothing but its names."""
        try:
            window = RankWindow.FromString(self.message_bytes)
        except DecodeError:
            window = RankWindow(end_unix_nanos=self.end_unix_nanos, problems=[UNREADABLE])
        window.identity.CopyFrom(self.who.identity)
        return window

    def network(self) -> NodeNetwork | None:
        """Of the node, if this window has it. The rest of the window is not read."""
        try:
            window = NetworkWindow.FromString(self.message_bytes)
        except DecodeError:
            return None
        return window.network if window.HasField("network") else None

    def operations(self) -> RankOperations | None:
        """The operations of whole steps, if this window has them. The rest of the window is not read."""
        try:
            window = OperationsWindow.FromString(self.message_bytes)
        except DecodeError:
            return None
        if not window.HasField("operations"):
            return None
        sent = window.operations
        times = (sent.first_step, sent.start_nanos, sent.tick_nanos, sent.unix_less_gpu_nanos)
        return RankOperations(self.who.rank, *times, self.who.seats(sent), sent.rows)


class HeldWindows(Sequence[RankWindow]):
    """Messages in the order of their ranks, each parsed on access; identities need no parsing."""

    def __init__(
        self, windows: Mapping[int, HeldWindow], compared: Mapping[int, tuple[float, float]] | None = None
    ) -> None:
        """By rank; `windows` must not change afterwards. `compared`: self time and waiting of ranks that do not know
        them, as only the comparison of ranks shows them. Their messages have these."""
        self._windows = windows
        self.compared = compared or {}
        self._identities: dict[int, RankIdentity] | None = None
        self._ordered: list[HeldWindow] | None = None

    @property
    def identities(self) -> Mapping[int, RankIdentity]:
        if self._identities is None:
            self._identities = {window.who.rank: window.who.identity for window in self.in_order}
        return self._identities

    @property
    def lowest(self) -> RankIdentity | None:
        """The identity of the lowest rank that reports, without those of all others."""
        return self._windows[min(self._windows)].who.identity if self._windows else None

    def of(self, rank: int) -> RankWindow | None:
        window = self._windows.get(rank)
        return None if window is None else self._message(window)

    def _message(self, held: HeldWindow) -> RankWindow:
        window = held.message()
        known = self.compared.get(held.who.rank)
        if known is not None:
            window.self_seconds.mean, window.wait_seconds.mean = known
        return window

    def with_compared(self, compared: Mapping[int, tuple[float, float]]) -> HeldWindows:
        return HeldWindows(self._windows, compared)

    def stale_seconds(self, now: float) -> dict[int, float]:
        """The age of windows of ranks that have been silent for too long, by rank; `now` is our monotonic clock."""
        ages = {rank: now - window.heard_monotonic for rank, window in self._windows.items()}
        limits = {rank: MIN_STALE_WINDOWS * window.window_seconds for rank, window in self._windows.items()}
        return {rank: age for rank, age in ages.items() if age > max(limits[rank], MIN_STALE_SECONDS)}

    @property
    def in_order(self) -> Sequence[HeldWindow]:
        if self._ordered is None:
            self._ordered = [self._windows[rank] for rank in sorted(self._windows)]
        return self._ordered

    def __len__(self) -> int:
        return len(self._windows)

    def __iter__(self) -> Iterator[RankWindow]:
        return map(self._message, self.in_order)

    @overload
    def __getitem__(self, index: int) -> RankWindow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RankWindow]: ...
    def __getitem__(self, index: int | slice) -> RankWindow | Sequence[RankWindow]:
        if isinstance(index, slice):
            return [self._message(window) for window in self.in_order[index]]
        return self._message(self.in_order[index])
