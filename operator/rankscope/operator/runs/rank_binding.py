"""Compares what daemons report with what the API server knows: a rank belongs to the run of its pod.

A daemon may be wrong or hostile: it may report the pods of its own node only, at the rate of a daemon; everything
else is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from rankscope.common.token_bucket import TokenBucket
from rankscope.operator.correlation.daemon_windows import DaemonMessage, HeldWindow, RankSeen
from rankscope.operator.runs.inventory import Inventory, RunKey
from rankscope.operator.runs.pods import TEAM, USER
from rankscope.v1.identity_pb2 import RankIdentity

# Several launches at a time in the pods of one run, as in a Ray cluster, are jobs of their own: RUN, RUN#2, RUN#3.
JOBS_PER_RUN = 16
# A rank belongs to its pod while that pod exists and reports it; without Kubernetes, to the first node that reports it.
# Otherwise one node could take over ranks of another.
OWNED_SECONDS = 10.0
# How often owners that no longer report are removed.
SWEEP_SECONDS = 30.0
# A process that was not reported for this long is forgotten; how often that is checked.
SILENT_SECONDS = 30.0
FORGETTING_SECONDS = 1.0

Owner = tuple[str, float]  # uid of a rank's pod, or the name of its node, and when it was last reported
Owners = dict[int, Owner]


# The daemon of one node: its rate limit, and the processes that it reports.

# Ranks of a node that raise its rate limit, and processes of it that are known at a time: more GPUs than any node has.
RANKS_PER_NODE = 1024
# Windows per rank and second, on average over the bucket: the shortest window is half a second long.
WINDOWS_PER_RANK_SECOND = 4.0
BURST_SECONDS = 15.0

# Job, node, namespace and name of the pod; team, user and image of the program.
Names = tuple[str, str, str, str, str, str, str]


@dataclass
class Refusals:
    """Counts by reason, for the metric: a closed set."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, number: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + number


class Known:
    """A process of a node, keyed by the bytes of its identity, which are the same in all of its windows: they are
    parsed once."""

    __slots__ = ("identity", "is_possible", "key", "names", "process", "rank", "reported_at", "seen")

    def __init__(self, identity: RankIdentity) -> None:
        self.identity = identity  # as reported by the daemon
        self.key = (identity.pod, identity.job)
        self.rank = identity.rank
        self.process = (identity.pod, identity.rank, identity.pid, identity.incarnation)
        self.is_possible = 0 <= identity.rank < identity.world_size
        self.seen: RankSeen | None = None  # under `names`
        self.names: Names | None = None
        self.reported_at = 0.0

    def under(self, names: Names | None) -> RankSeen:
        if self.seen is None or self.names != names:
            renamed = RankIdentity()
            renamed.CopyFrom(self.identity)
            if names is not None:
                renamed.job, renamed.node, renamed.namespace, renamed.pod_name = names[:4]
                renamed.program.team, renamed.program.user, renamed.program.image = names[4:]
            self.names, self.seen = names, RankSeen(renamed)
        return self.seen


class Sender:
    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._windows = TokenBucket(BURST_SECONDS * WINDOWS_PER_RANK_SECOND * RANKS_PER_NODE, 0.0)
        self._forgot_at = 0.0
        # Of the current message: ranks come and go, and must not raise the limit forever.
        self.ranks = 0
        self.known: dict[bytes, Known] = {}

    def allow(self, sent: int, now: float) -> int:
        """How many of so many are accepted; the others are counted."""
        rate = WINDOWS_PER_RANK_SECOND * min(max(1, self.ranks or sent), RANKS_PER_NODE)
        self._windows.per_second, self._windows.burst = rate, rate * BURST_SECONDS
        allowed = self._windows.take_up_to(now, sent)
        if allowed < sent:
            self._refusals.add("rate", sent - allowed)
        return allowed

    def add(self, identity: bytes, now: float) -> Known | None:
        """None if there are too many already, or the identity is invalid."""
        if len(self.known) >= RANKS_PER_NODE:
            if now - self._forgot_at > FORGETTING_SECONDS:
                self._forgot_at = now
                self.known = {key: k for key, k in self.known.items() if now - k.reported_at < SILENT_SECONDS}
            if len(self.known) >= RANKS_PER_NODE:
                self._refusals.add("ranks")
                return None
        known = self._read(identity)
        if known is not None:
            self.known[identity] = known
        return known

    def remove(self, identity: bytes) -> Known | None:
        """A process that is reported for the last time."""
        return self.known.pop(identity, None) or self._read(identity)

    def _read(self, identity: bytes) -> Known | None:
        try:
            return Known(RankIdentity.FromString(identity))
        except DecodeError:
            self._refusals.add("unreadable")
            return None


# A window with its stacks has a few kilobytes.
MAX_WINDOW_BYTES = 128 << 10


@dataclass
class _Place:
    """The run that the ranks of one pod and job belong to."""

    uid: str
    names: Names | None  # None: those that the daemon reports
    kept: bool
    refusal: str
    owners: Owners
    owner: Owner


@dataclass
class _Lookups:
    """Of one message: the pods and jobs of a node are few, and looked up once."""

    node: str
    sender: Sender
    now: float
    keeps: Callable[[str], bool]
    places: dict[tuple[str, str], _Place] = field(default_factory=dict)


@dataclass(frozen=True)
class Accepted:
    windows: list[HeldWindow]
    departed: list[RankIdentity]


class Binding:
    """Thread-safe: windows arrive in one thread, and are forgotten in another."""

    def __init__(self, inventory: Inventory | None = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Without an inventory there is no API server: ranks keep the names that the daemons report."""
        self.refusals = Refusals()
        self._lock = threading.Lock()
        self._inventory = inventory
        self._monotonic = monotonic
        self._senders: dict[str, Sender] = {}
        self._owners: dict[RunKey | None, dict[str, Owners]] = {}  # by the names of the run's jobs
        self._swept_at = 0.0

    def bind(self, messages: Sequence[DaemonMessage], keeps: Callable[[str], bool] = lambda name: True) -> Accepted:
        """The accepted windows, with `job` as the run's name, and `node` and `namespace` as in the API server.
        Windows of jobs that `keeps` rejects are dropped."""
        accepted = Accepted([], [])
        with self._lock:
            now = self._monotonic()
            self._sweep(now)
            for message in messages:
                sender = self._senders.get(message.node)
                if sender is None:
                    sender = self._senders[message.node] = Sender(self.refusals)
                lookups = _Lookups(message.node, sender, now, keeps)
                processes = self._bind(message, lookups, accepted)
                if self._inventory is not None:
                    self._inventory.ranks_seen_in({pod for (pod, _), place in lookups.places.items() if place.uid})
                if message.departed:
                    accepted.departed.extend(self._departed(message, lookups, processes))
        return accepted

    def _bind(self, message: DaemonMessage, lookups: _Lookups, accepted: Accepted) -> set[object]:
        """Returns the processes that have a window."""
        sender = lookups.sender
        processes: set[object] = set()
        allowed = sender.allow(len(message.windows), lookups.now)
        start, end = message.start_unix_nanos, message.end_unix_nanos
        for window, identity, figures in zip(
            message.windows[:allowed], message.ranks[:allowed], message.figures(allowed), strict=True
        ):
            known = sender.known.get(identity) or sender.add(identity, lookups.now)
            if known is None:
                continue
            processes.add(known.process)
            place = self._place_of(known, lookups)
            if place is None:
                continue
            if len(window) > MAX_WINDOW_BYTES:
                self.refusals.add("size")
                continue
            accepted.windows.append(HeldWindow(known.under(place.names), window, start, end, figures))
        sender.ranks = len(processes) or sender.ranks
        return processes

    def _departed(self, message: DaemonMessage, lookups: _Lookups, present: set[object]) -> list[RankIdentity]:
        """Without processes that have a window in the same message: their job has another name on the node."""
        found: list[RankIdentity] = []
        for identity in message.departed[: lookups.sender.allow(len(message.departed), lookups.now)]:
            known = lookups.sender.remove(identity)
            if known is None or known.process in present:
                continue
            place = self._place_of(known, lookups)
            if place is not None:
                del place.owners[known.rank]
                found.append(known.under(place.names).identity)
        return found

    def forget_all_but(self, runs: set[RunKey], nodes: set[str]) -> None:
        with self._lock:
            for key in self._owners.keys() - runs - {None}:
                del self._owners[key]
            for node in self._senders.keys() - nodes:
                del self._senders[node]

    def _place_of(self, known: Known, lookups: _Lookups) -> _Place | None:
        """Where a rank belongs; None if it is refused or dropped."""
        known.reported_at = lookups.now
        if not known.is_possible:
            self.refusals.add("rank")
            return None
        if self._inventory is None and known.identity.node != lookups.node:
            self.refusals.add("other_node")
            return None
        place = lookups.places.get(known.key)
        if place is None:
            place = lookups.places[known.key] = self._look_up(*known.key, lookups)
        if not place.kept:
            if place.refusal:
                self.refusals.add(place.refusal)
            return None
        owner = place.owners.get(known.rank)
        if owner is not None and owner[0] != place.uid and self._is_alive(owner, lookups.now):
            self.refusals.add("rank_taken")
            return None
        place.owners[known.rank] = place.owner
        return place

    def _look_up(self, uid: str, job: str, lookups: _Lookups) -> _Place:
        if self._inventory is None:
            owners = self._owners.setdefault(None, {}).setdefault(job, {})
            return _Place(lookups.node, None, lookups.keeps(job), "", owners, (lookups.node, lookups.now))
        found = self._inventory.find(uid) if uid else None
        if found is None:
            return _refused("unknown_pod")
        pod, key = found
        if pod.node != lookups.node:
            return _refused("other_node")
        name = _name_in_run(job, key.full_name)
        if name is None:
            return _refused("jobs")
        owners = self._owners.setdefault(key, {}).setdefault(name, {})
        team = pod.labels.get(TEAM, "") or pod.namespace
        names = (name, lookups.node, pod.namespace, pod.name, team, pod.labels.get(USER, ""), pod.image)
        return _Place(uid, names, lookups.keeps(name), "", owners, (uid, lookups.now))

    def _is_alive(self, owner: Owner, now: float) -> bool:
        uid, reported_at = owner
        if now - reported_at >= OWNED_SECONDS:
            return False
        if self._inventory is None:
            return True
        found = self._inventory.find(uid)
        return found is not None and not found[0].is_over and not found[0].deleting

    def _sweep(self, now: float) -> None:
        """Rarely: a job may have a hundred thousand ranks."""
        if now - self._swept_at < SWEEP_SECONDS:
            return
        self._swept_at = now
        for jobs in self._owners.values():
            for name, owners in list(jobs.items()):
                jobs[name] = {rank: owner for rank, owner in owners.items() if now - owner[1] < OWNED_SECONDS}
                if not jobs[name]:
                    del jobs[name]


def _name_in_run(job: str, run: str) -> str | None:
    """The name of a job of the run. A daemon that does not know the run's name yet reports another one. None if the
    number is not one of a job."""
    reported_run, _, number = job.rpartition("#")
    if reported_run != run:
        return run
    is_number = number.isdecimal() and number == str(int(number[:3])) and 2 <= int(number) <= JOBS_PER_RUN
    return job if is_number else None


def _refused(reason: str) -> _Place:
    return _Place("", None, False, reason, {}, ("", 0.0))
