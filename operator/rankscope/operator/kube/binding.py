"""What a daemon says, held against what the API server says, and named by run.

A daemon may be wrong or hostile: it speaks for the pods of its own node and for nobody else, at the pace of a daemon,
or it is not listened to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rankscope.operator.kube.grouping import RunKey
from rankscope.operator.kube.inventory import Inventory
from rankscope.operator.kube.pods import Pod
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import WatchRanksResponse
from rankscope.v1.window_pb2 import RankWindow

# Ranks of a node that raise its allowance: more GPUs than any node has.
RANKS_PER_NODE = 1024
# Windows a daemon may send per rank and second, on average over the bucket: the shortest window is half a second long.
WINDOWS_PER_RANK_SECOND = 4.0
BURST_SECONDS = 15.0
# A job that has not spoken for so long no longer owns its run's name.
SILENT_SECONDS = 30.0
JOBS_PER_RUN = 16
# A rank is its pod's as long as that pod lives and speaks of it: else one node could unseat the ranks of another.
OWNED_SECONDS = 10.0


Owners = dict[int, tuple[str, float]]  # of a job: rank to its pod's uid, and when it was last heard


@dataclass
class Refusals:
    """By reason, for the metric: bounded words."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, number: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + number


@dataclass
class _Speaker:
    allowance: float
    seen_at: float
    ranks: int = 0


@dataclass
class _Names:
    """The jobs of one run by the name they give themselves; a restarted one may come with another port."""

    heard_at: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    owners: dict[str, Owners] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """Where the ranks of one pod and job belong."""

    pod: Pod | None = None
    uid: str = ""
    name: str = ""
    kept: bool = False
    refusal: str = ""
    owners: Owners = field(default_factory=dict)


@dataclass(frozen=True)
class _Here:
    """One message's: the pods and jobs of a node are few, and looked up once."""

    node: str
    now: float
    keeps: Callable[[str], bool]
    places: dict[tuple[str, str], _Place] = field(default_factory=dict)


@dataclass(frozen=True)
class Heard:
    windows: list[RankWindow]
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

    def bind(self, message: WatchRanksResponse, node: str, keeps: Callable[[str], bool] = lambda name: True) -> Heard:
        """What of it holds, with `job` the run's name and `node` and `namespace` as the API server has them. Of jobs
        that `keeps` says no to, nothing is kept. The message is the caller's no longer: its windows are renamed where
        they are, since a fleet sends thousands a second."""
        with self._lock:
            return self._bind(message, node, keeps)

    def _bind(self, message: WatchRanksResponse, node: str, keeps: Callable[[str], bool]) -> Heard:
        allowed = self._allow(node, message)
        self.refusals.add("rate", len(message.windows) - allowed)
        here = _Here(node, self._monotonic(), keeps)
        windows = [window for window in message.windows[:allowed] if self._rename(window.identity, here)]
        self._inventory.ranks_seen_in({pod for (pod, _), place in here.places.items() if place.name})
        departed = [identity for identity in message.departed if self._rename(identity, here, departs=True)]
        if len(windows) < len(message.windows):
            # One window would keep all the message in memory, which may be mostly what was refused.
            windows = [_copied(window) for window in windows]
        return Heard(windows, departed)

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

    def _allow(self, node: str, message: WatchRanksResponse) -> int:
        now = self._monotonic()
        speaker = self._speakers.get(node)
        if speaker is None:
            speaker = self._speakers[node] = _Speaker(0.0, now - BURST_SECONDS)
        ranks = {(window.identity.pod, window.identity.rank) for window in message.windows}
        rate = WINDOWS_PER_RANK_SECOND * min(max(1, speaker.ranks or len(ranks)), RANKS_PER_NODE)
        speaker.allowance = min(rate * BURST_SECONDS, speaker.allowance + rate * (now - speaker.seen_at))
        speaker.seen_at = now
        allowed = min(len(message.windows), int(speaker.allowance))
        speaker.allowance -= allowed
        if allowed < len(message.windows):
            ranks = {(window.identity.pod, window.identity.rank) for window in message.windows[:allowed]}
        # Those of the present message: ranks come and go, and none may raise the allowance for ever.
        speaker.ranks = len(ranks) or speaker.ranks
        return allowed

    def _rename(self, identity: RankIdentity, here: _Here, departs: bool = False) -> bool:
        """False for one that is not to be believed or not to be kept."""
        if not 0 <= identity.rank < identity.world_size:
            self.refusals.add("rank")
            return False
        sought = (identity.pod, identity.job)
        place = here.places.get(sought)
        if place is None:
            place = here.places[sought] = self._place(*sought, here)
        if place.refusal:
            self.refusals.add(place.refusal)
        if not place.kept or place.pod is None:
            return False
        if not self._owns(identity.rank, place, here.now):
            self.refusals.add("rank_taken")
            return False
        if departs:
            del place.owners[identity.rank]
        identity.job, identity.node = place.name, here.node
        identity.namespace, identity.pod_name = place.pod.namespace, place.pod.name
        return True

    def _place(self, uid: str, job: str, here: _Here) -> _Place:
        found = self._inventory.find(uid) if uid else None
        if found is None:
            return _Place(refusal="unknown_pod")
        pod, key = found
        if pod.node != here.node:
            return _Place(refusal="other_node")
        name = self._job_name(key, job)
        if name is None:
            return _Place(refusal="jobs")
        owners = self._names[key].owners.setdefault(job, {})
        return _Place(pod, uid, name, here.keeps(name), owners=owners)

    def _owns(self, rank: int, place: _Place, now: float) -> bool:
        pod, heard_at = place.owners.get(rank) or (place.uid, now)
        if pod != place.uid and now - heard_at < OWNED_SECONDS:
            owner = self._inventory.find(pod)
            if owner is not None and not owner[0].is_over and not owner[0].deleting:
                return False
        place.owners[rank] = (place.uid, now)
        return True

    def _job_name(self, key: RunKey, job: str) -> str | None:
        """The run's own name for its one job; jobs beside it, as in a Ray cluster, get a number."""
        now = self._monotonic()
        jobs = self._names.setdefault(key, _Names())
        for silent in [known for known, heard in jobs.heard_at.items() if now - heard > SILENT_SECONDS]:
            del jobs.heard_at[silent], jobs.names[silent]
            jobs.owners.pop(silent, None)
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


def _copied(window: RankWindow) -> RankWindow:
    copy = RankWindow()
    copy.CopyFrom(window)
    return copy
