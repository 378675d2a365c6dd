"""Compares what daemons report with what the API server knows, and names ranks by run.

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
from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.run_grouping import RunKey
from rankscope.v1.identity_pb2 import RankIdentity

# The jobs of one run: their names, and the pods that own their ranks.

# A job that has been silent for this long no longer owns its run's name.
SILENT_SECONDS = 30.0
# How often that is checked.
FORGETTING_SECONDS = 1.0
JOBS_PER_RUN = 16
# A rank belongs to its pod while that pod exists and reports it: otherwise one node could take over ranks of another.
OWNED_SECONDS = 10.0

Owner = tuple[str, float]  # uid of a rank's pod, and when it was last heard
Owners = dict[int, Owner]


class RunJobs:
    """By the names that the jobs report; a restarted job may have another port."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.owners: dict[str, Owners] = {}
        self._heard_at: dict[str, float] = {}
        self._looked_at = 0.0
        self._swept_at = 0.0

    def name(self, job: str, run_name: Callable[[], str], now: float) -> str | None:
        """The run's own name for its only job; further jobs, as in a Ray cluster, get a number. None if there are
        too many."""
        if now - self._looked_at > FORGETTING_SECONDS:
            self._forget_silent(now)
        name = self.names.get(job)
        if name is None:
            taken, plain = set(self.names.values()), run_name()
            choices = [plain, *(f"{plain}#{number}" for number in range(2, JOBS_PER_RUN + 1))]
            name = next((choice for choice in choices if choice not in taken), None)
            if name is None:
                return None
            self.names[job] = name
        self._heard_at[job] = now
        return name

    def _forget_silent(self, now: float) -> None:
        self._looked_at = now
        for silent in [known for known, heard in self._heard_at.items() if now - heard > SILENT_SECONDS]:
            del self._heard_at[silent], self.names[silent]
            self.owners.pop(silent, None)
        if now - self._swept_at > SILENT_SECONDS:  # rarely: a job may have a hundred thousand ranks
            self._swept_at = now
            for job, owners in self.owners.items():
                self.owners[job] = {rank: owner for rank, owner in owners.items() if now - owner[1] < OWNED_SECONDS}


# The daemon of one node: its rate limit, and the processes that it reports.

# Ranks of a node that raise its rate limit, and processes of it that are known at a time: more GPUs than any node has.
RANKS_PER_NODE = 1024
# Windows per rank and second, on average over the bucket: the shortest window is half a second long.
WINDOWS_PER_RANK_SECOND = 4.0
BURST_SECONDS = 15.0
# A process that was not reported for this long is forgotten; how often that is checked.

Names = tuple[str, str, str, str]  # job, node, namespace and name of the pod


@dataclass
class Refusals:
    """Counts by reason, for the metric: a closed set."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, number: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + number


class Known:
    """A process of a node, keyed by the bytes of its identity, which are the same in all of its windows: they are
    parsed once."""

    __slots__ = ("heard_at", "identity", "is_possible", "key", "names", "rank", "seen", "sought")

    def __init__(self, identity: RankIdentity) -> None:
        self.identity = identity  # as reported by the daemon
        # A run's ranks have its pods, whatever else on a node has the job's name.
        self.sought = (identity.pod, identity.shared_job or identity.job)
        self.rank = identity.rank
        self.key = (identity.pod, identity.rank)
        self.is_possible = 0 <= identity.rank < identity.world_size
        self.seen: RankSeen | None = None  # under `names`
        self.names: Names | None = None
        self.heard_at = 0.0

    def under(self, names: Names | None) -> RankSeen:
        if self.seen is None or self.names != names:
            renamed = RankIdentity()
            renamed.CopyFrom(self.identity)
            if names is not None:
                renamed.job, renamed.node, renamed.namespace, renamed.pod_name = names
                renamed.ClearField("shared_job")
            self.names, self.seen = names, RankSeen(renamed)
        return self.seen


class Speaker:
    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._windows = TokenBucket(BURST_SECONDS * WINDOWS_PER_RANK_SECOND * RANKS_PER_NODE, 0.0)
        self._forgot_at = 0.0
        # Of the current message: ranks come and go, and must not raise the limit for ever.
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

    def meet(self, identity: bytes, now: float) -> Known | None:
        """None if there are too many already, or the identity is invalid."""
        if len(self.known) >= RANKS_PER_NODE:
            if now - self._forgot_at > FORGETTING_SECONDS:
                self._forgot_at = now
                self.known = {key: k for key, k in self.known.items() if now - k.heard_at < SILENT_SECONDS}
            if len(self.known) >= RANKS_PER_NODE:
                self._refusals.add("ranks")
                return None
        try:
            known = self.known[identity] = Known(RankIdentity.FromString(identity))
        except DecodeError:
            self._refusals.add("unreadable")
            return None
        return known

    def part(self, identity: bytes) -> Known | None:
        """A process that is reported for the last time."""
        try:
            return self.known.pop(identity, None) or Known(RankIdentity.FromString(identity))
        except DecodeError:
            self._refusals.add("unreadable")
            return None


# A window with its stacks has a few kilobytes.
WINDOW_BYTES_LIMIT = 128 << 10


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
class _Here:
    """Lookups of one message: the pods and jobs of a node are few, and looked up once."""

    node: str
    speaker: Speaker
    now: float
    keeps: Callable[[str], bool]
    places: dict[tuple[str, str], _Place] = field(default_factory=dict)


@dataclass(frozen=True)
class Heard:
    windows: list[HeldWindow]
    departed: list[RankIdentity]


class Binding:
    """Thread-safe: windows arrive in one thread, and are forgotten in another."""

    def __init__(self, inventory: Inventory | None = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Without an inventory there is one machine and no API server: ranks keep the names that the daemon reports."""
        self.refusals = Refusals()
        self._lock = threading.Lock()
        self._inventory = inventory
        self._monotonic = monotonic
        self._speakers: dict[str, Speaker] = {}
        self._jobs: dict[RunKey, RunJobs] = {}

    def bind(self, messages: Sequence[DaemonMessage], keeps: Callable[[str], bool] = lambda name: True) -> Heard:
        """The accepted windows, with `job` as the run's name, and `node` and `namespace` as in the API server.
        Windows of jobs that `keeps` rejects are dropped."""
        heard = Heard([], [])
        with self._lock:
            now = self._monotonic()
            for message in messages:
                speaker = self._speakers.get(message.node)
                if speaker is None:
                    speaker = self._speakers[message.node] = Speaker(self.refusals)
                here = _Here(message.node, speaker, now, keeps)
                self._bind(message, here, heard)
                if self._inventory is not None:
                    self._inventory.ranks_seen_in({pod for (pod, _), place in here.places.items() if place.uid})
                if message.departed:
                    heard.departed.extend(self._departed(message, here))
        return heard

    def _bind(self, message: DaemonMessage, here: _Here, heard: Heard) -> None:
        speaker = here.speaker
        ranks = set()
        allowed = speaker.allow(len(message.windows), here.now)
        start, end = message.start_unix_nanos, message.end_unix_nanos
        for window, identity, figures in zip(
            message.windows[:allowed], message.ranks[:allowed], message.figures(allowed), strict=True
        ):
            known = speaker.known.get(identity) or speaker.meet(identity, here.now)
            if known is None:
                continue
            ranks.add(known.key)
            place = self._believe(known, here)
            if place is None:
                continue
            if len(window) > WINDOW_BYTES_LIMIT:
                self.refusals.add("size")
                continue
            heard.windows.append(HeldWindow(known.under(place.names), window, start, end, figures))
        speaker.ranks = len(ranks) or speaker.ranks

    def _departed(self, message: DaemonMessage, here: _Here) -> list[RankIdentity]:
        found: list[RankIdentity] = []
        for identity in message.departed[: here.speaker.allow(len(message.departed), here.now)]:
            known = here.speaker.part(identity)
            if known is None:
                continue
            place = self._believe(known, here)
            if place is not None:
                del place.owners[known.rank]
                found.append(known.under(place.names).identity)
        return found

    def forget_all_but(self, runs: set[RunKey], nodes: set[str]) -> None:
        with self._lock:
            for key in self._jobs.keys() - runs:
                del self._jobs[key]
            for node in self._speakers.keys() - nodes:
                del self._speakers[node]

    def daemon_job(self, name: str) -> str | None:
        """The daemons' name for the job."""
        with self._lock:
            for jobs in self._jobs.values():
                for job, given in jobs.names.items():
                    if given == name:
                        return job
        return None

    def run_name(self, key: RunKey) -> str:
        """The name of a run's first job in metrics, verdicts and commands."""
        return f"{key.namespace}/{key.object_name}"

    def _believe(self, known: Known, here: _Here) -> _Place | None:
        """Where it belongs; None if it is refused or dropped."""
        known.heard_at = here.now
        if not known.is_possible:
            self.refusals.add("rank")
            return None
        place = here.places.get(known.sought)
        if place is None:
            place = here.places[known.sought] = self._place(*known.sought, here)
        if not place.kept:
            if place.refusal:
                self.refusals.add(place.refusal)
            return None
        owner = place.owners.get(known.rank)
        if owner is not None and owner[0] != place.uid and self._is_alive(owner, here.now):
            self.refusals.add("rank_taken")
            return None
        place.owners[known.rank] = place.owner
        return place

    def _place(self, uid: str, job: str, here: _Here) -> _Place:
        if self._inventory is None:
            return _Place(uid, None, here.keeps(job), "", {}, (uid, here.now))
        found = self._inventory.find(uid) if uid else None
        if found is None:
            return _nowhere("unknown_pod")
        pod, key = found
        if pod.node != here.node:
            return _nowhere("other_node")
        jobs = self._jobs.get(key)
        if jobs is None:
            jobs = self._jobs[key] = RunJobs()
        name = jobs.name(job, lambda: self.run_name(key), here.now)
        if name is None:
            return _nowhere("jobs")
        owners = jobs.owners.setdefault(job, {})
        names = (name, here.node, pod.namespace, pod.name)
        return _Place(uid, names, here.keeps(name), "", owners, (uid, here.now))

    def _is_alive(self, owner: Owner, now: float) -> bool:
        uid, heard_at = owner
        if now - heard_at >= OWNED_SECONDS:
            return False
        found = None if self._inventory is None else self._inventory.find(uid)
        return found is not None and not found[0].is_over and not found[0].deleting


def _nowhere(refusal: str) -> _Place:
    return _Place("", None, False, refusal, {}, ("", 0.0))
