"""What a daemon says, held against what the API server says, and named by run.

A daemon may be wrong or hostile: it speaks for the pods of its own node and for nobody else, at the pace of a daemon,
or it is not listened to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from rankscope.operator.correlation.held_windows import HeldWindow, RankSeen
from rankscope.operator.correlation.reading_windows import ReadWindows, read_windows
from rankscope.operator.correlation.wire_shapes import Message, Said
from rankscope.operator.kube.grouping import RunKey
from rankscope.operator.kube.inventory import Inventory
from rankscope.v1.identity_pb2 import RankIdentity

# Ranks of a node that raise its allowance, and processes of it that are known at a time: more GPUs than any node has.
RANKS_PER_NODE = 1024
# A window with its stacks has a few kilobytes.
WINDOW_BYTES_LIMIT = 128 << 10
# Windows a daemon may send per rank and second, on average over the bucket: the shortest window is half a second long.
WINDOWS_PER_RANK_SECOND = 4.0
BURST_SECONDS = 15.0
# A job that has not spoken for so long no longer owns its run's name.
SILENT_SECONDS = 30.0
JOBS_PER_RUN = 16
# A rank is its pod's as long as that pod lives and speaks of it: else one node could unseat the ranks of another.
OWNED_SECONDS = 10.0


# How often those of which nothing is heard any more are looked for.
FORGETTING_SECONDS = 1.0

Owners = dict[int, tuple[str, float]]  # of a job: rank to its pod's uid, and when it was last heard
Names = tuple[str, str, str, str]  # job, node, namespace and name of the pod


@dataclass
class Refusals:
    """By reason, for the metric: bounded words."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, number: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + number


class _Known:
    """A process of a node by the very bytes of its identity, which are the same in each of its windows: what they say
    is read once."""

    __slots__ = ("heard_at", "identity", "is_possible", "key", "names", "rank", "seen", "sought")

    def __init__(self, identity: RankIdentity) -> None:
        self.identity = identity  # as the daemon has it
        self.sought = (identity.pod, identity.job)
        self.rank = identity.rank
        self.key = (identity.pod, identity.rank)
        self.is_possible = 0 <= identity.rank < identity.world_size
        self.seen: RankSeen | None = None  # under `names`
        self.names: Names = ("", "", "", "")
        self.heard_at = 0.0

    def under(self, names: Names) -> RankSeen:
        if self.seen is None or self.names != names:
            renamed = RankIdentity()
            renamed.CopyFrom(self.identity)
            renamed.job, renamed.node, renamed.namespace, renamed.pod_name = names
            self.names, self.seen = names, RankSeen(renamed)
        return self.seen


@dataclass
class _Speaker:
    allowance: float
    seen_at: float
    ranks: int = 0
    known: dict[bytes, _Known] = field(default_factory=dict)
    forgot_at: float = 0.0


@dataclass
class _Names:
    """The jobs of one run by the name they give themselves; a restarted one may come with another port."""

    heard_at: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    owners: dict[str, Owners] = field(default_factory=dict)
    looked_at: float = 0.0
    swept_at: float = 0.0

    def forget_silent(self, now: float) -> None:
        self.looked_at = now
        for silent in [known for known, heard in self.heard_at.items() if now - heard > SILENT_SECONDS]:
            del self.heard_at[silent], self.names[silent]
            self.owners.pop(silent, None)
        if now - self.swept_at > SILENT_SECONDS:  # less often: a job may have a hundred thousand ranks
            self.swept_at = now
            for job, owners in self.owners.items():
                self.owners[job] = {rank: owner for rank, owner in owners.items() if now - owner[1] < OWNED_SECONDS}


@dataclass
class _Place:
    """Where the ranks of one pod and job belong."""

    uid: str
    names: Names
    kept: bool
    refusal: str
    owners: Owners
    owner: tuple[str, float]


@dataclass
class _Here:
    """One message's: the pods and jobs of a node are few, and looked up once."""

    node: str
    speaker: _Speaker
    now: float
    keeps: Callable[[str], bool]
    places: dict[tuple[str, str], _Place] = field(default_factory=dict)


@dataclass(frozen=True)
class Heard:
    windows: list[HeldWindow]
    departed: list[RankIdentity]


class Binding:
    """Thread-safe: windows come in one thread, what is gone is forgotten in another."""

    def __init__(self, inventory: Inventory, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.refusals = Refusals()
        self._lock = threading.Lock()
        self._inventory = inventory
        self._monotonic = monotonic
        self._speakers: dict[str, _Speaker] = {}
        self._names: dict[RunKey, _Names] = {}

    def bind(self, messages: Sequence[Message], keeps: Callable[[str], bool] = lambda name: True) -> Heard:
        """What of them holds, with `job` the run's name and `node` and `namespace` as the API server has them. Of jobs
        that `keeps` says no to, nothing is kept. Many at a time are far cheaper than one by one."""
        with self._lock:
            now = self._monotonic()
            listened = [self._listen(message, now) for message in messages]
            read = read_windows([window for windows in listened for window in windows])
            heard, first = Heard([], []), 0
            for message, windows in zip(messages, listened, strict=True):
                here = _Here(message.node, self._speakers[message.node], now, keeps)
                self._bind(windows, read, first, here, heard)
                first += len(windows)
                self._inventory.ranks_seen_in({pod for (pod, _), place in here.places.items() if place.uid})
                if message.said.departed:
                    heard.departed.extend(self._departed(message.said, here))
            return heard

    def _listen(self, message: Message, now: float) -> Sequence[bytes]:
        """Those of its windows that its allowance is enough for."""
        speaker = self._speakers.get(message.node)
        if speaker is None:
            speaker = self._speakers[message.node] = _Speaker(0.0, now - BURST_SECONDS)
        sent = message.said.windows
        return sent[: self._allow(speaker, len(sent), now)]

    def _bind(self, windows: Sequence[bytes], read: ReadWindows, first: int, here: _Here, heard: Heard) -> None:
        """`first` of what was read is the first of these windows."""
        speaker = here.speaker
        ranks = set()
        for number, window in enumerate(windows, first):
            identity = read.identities[number]
            known = None if identity is None else speaker.known.get(identity) or self._meet(identity, here)
            if known is None:
                self.refusals.add("unreadable" if identity is None else "ranks")
                continue
            ranks.add(known.key)
            place = self._believe(known, here)
            if place is None:
                continue
            if len(window) > WINDOW_BYTES_LIMIT:
                self.refusals.add("size")
                continue
            who = known.under(place.names)
            start, end = read.starts_unix_nanos[number], read.ends_unix_nanos[number]
            heard.windows.append(HeldWindow(who, window, start, end, read.measured[number]))
        # Those of the present message: ranks come and go, and none may raise the allowance for ever.
        speaker.ranks = len(ranks) or speaker.ranks

    def _departed(self, said: Said, here: _Here) -> list[RankIdentity]:
        found: list[RankIdentity] = []
        for identity in said.departed[: self._allow(here.speaker, len(said.departed), here.now)]:
            try:
                known = here.speaker.known.pop(identity, None) or _Known(RankIdentity.FromString(identity))
            except DecodeError:
                self.refusals.add("unreadable")
                continue
            place = self._believe(known, here)
            if place is not None:
                del place.owners[known.rank]
                found.append(known.under(place.names).identity)
        return found

    def forget_all_but(self, runs: set[RunKey], nodes: set[str]) -> None:
        with self._lock:
            for key in self._names.keys() - runs:
                del self._names[key]
            for node in self._speakers.keys() - nodes:
                del self._speakers[node]

    def daemon_job(self, name: str) -> str | None:
        """What the daemons call the job of that name."""
        with self._lock:
            for jobs in self._names.values():
                for job, given in jobs.names.items():
                    if given == name:
                        return job
        return None

    def run_name(self, key: RunKey) -> str:
        """What metrics, verdicts and people call a run's first job."""
        return f"{key.namespace}/{key.object_name}"

    def _allow(self, speaker: _Speaker, sent: int, now: float) -> int:
        """How many of so many are listened to; the others are counted."""
        rate = WINDOWS_PER_RANK_SECOND * min(max(1, speaker.ranks or sent), RANKS_PER_NODE)
        speaker.allowance = min(rate * BURST_SECONDS, speaker.allowance + rate * (now - speaker.seen_at))
        speaker.seen_at = now
        allowed = min(sent, int(speaker.allowance))
        speaker.allowance -= allowed
        if allowed < sent:
            self.refusals.add("rate", sent - allowed)
        return allowed

    def _meet(self, identity: bytes, here: _Here) -> _Known | None:
        """None where there are too many already, or where it is no identity."""
        speaker, now = here.speaker, here.now
        if len(speaker.known) >= RANKS_PER_NODE:
            if now - speaker.forgot_at > FORGETTING_SECONDS:
                speaker.forgot_at = now
                speaker.known = {key: k for key, k in speaker.known.items() if now - k.heard_at < SILENT_SECONDS}
            if len(speaker.known) >= RANKS_PER_NODE:
                return None
        try:
            known = speaker.known[identity] = _Known(RankIdentity.FromString(identity))
        except DecodeError:
            return None
        return known

    def _believe(self, known: _Known, here: _Here) -> _Place | None:
        """Where it belongs; None for one that is not to be believed or not to be kept."""
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
        found = self._inventory.find(uid) if uid else None
        if found is None:
            return _nowhere("unknown_pod")
        pod, key = found
        if pod.node != here.node:
            return _nowhere("other_node")
        name = self._job_name(key, job, here.now)
        if name is None:
            return _nowhere("jobs")
        owners = self._names[key].owners.setdefault(job, {})
        names = (name, here.node, pod.namespace, pod.name)
        return _Place(uid, names, here.keeps(name), "", owners, (uid, here.now))

    def _is_alive(self, owner: tuple[str, float], now: float) -> bool:
        uid, heard_at = owner
        if now - heard_at >= OWNED_SECONDS:
            return False
        found = self._inventory.find(uid)
        return found is not None and not found[0].is_over and not found[0].deleting

    def _job_name(self, key: RunKey, job: str, now: float) -> str | None:
        """The run's own name for its one job; jobs beside it, as in a Ray cluster, get a number."""
        jobs = self._names.get(key)
        if jobs is None:
            jobs = self._names[key] = _Names()
        if now - jobs.looked_at > FORGETTING_SECONDS:
            jobs.forget_silent(now)
        name = jobs.names.get(job)
        if name is None:
            taken = set(jobs.names.values())
            plain = self.run_name(key)
            choices = [plain, *(f"{plain}#{number}" for number in range(2, JOBS_PER_RUN + 1))]
            name = next((choice for choice in choices if choice not in taken), None)
            if name is None:
                return None
            jobs.names[job] = name
        jobs.heard_at[job] = now
        return name


def _nowhere(refusal: str) -> _Place:
    return _Place("", ("", "", "", ""), False, refusal, {}, ("", 0.0))
