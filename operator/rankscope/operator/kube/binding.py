"""What a daemon says, held against what the API server says, and named by run.

A daemon may be wrong or hostile: it speaks for the pods of its own node and for nobody else, at the pace of a daemon,
or it is not listened to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rankscope.operator.kube.grouping import RunKey
from rankscope.operator.kube.inventory import Inventory
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import WatchRanksResponse

# Ranks of a node that raise its allowance: more GPUs than any node has.
RANKS_PER_NODE = 1024
# Windows a daemon may send per rank and second, on average over the bucket: the shortest window is half a second long.
WINDOWS_PER_RANK_SECOND = 4.0
BURST_SECONDS = 15.0
# A job that has not spoken for so long no longer owns its run's name.
SILENT_SECONDS = 30.0
JOBS_PER_RUN = 16


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
    ranks: set[tuple[str, int]] = field(default_factory=set)  # pod, rank


@dataclass
class _Names:
    """The jobs of one run by the name they give themselves; a restarted one may come with another port."""

    heard_at: dict[str, float] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


class Binding:
    """Called from one thread at a time."""

    def __init__(self, inventory: Inventory, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.refusals = Refusals()
        self._inventory = inventory
        self._monotonic = monotonic
        self._speakers: dict[str, _Speaker] = {}
        self._names: dict[RunKey, _Names] = {}

    def bind(self, message: WatchRanksResponse, node: str) -> WatchRanksResponse:
        """What of it holds, with `job` the run's name and `node` and `namespace` as the API server has them."""
        bound = WatchRanksResponse(node=node, dropped=message.dropped)
        allowed = self._allow(node, message)
        self.refusals.add("rate", len(message.windows) - allowed)
        pods: set[str] = set()
        for window in list(message.windows)[:allowed]:
            name = self._name(window.identity, node)
            if name is None:
                continue
            kept = bound.windows.add()
            kept.CopyFrom(window)
            self._rename(kept.identity, name, node)
            pods.add(window.identity.pod)
        for identity in message.departed:
            name = self._name(identity, node)
            if name is not None:
                gone = bound.departed.add()
                gone.CopyFrom(identity)
                self._rename(gone, name, node)
        self._inventory.ranks_seen_in(pods)
        return bound

    def forget_node(self, node: str) -> None:
        self._speakers.pop(node, None)

    def forget_runs_but(self, runs: set[RunKey]) -> None:
        for key in self._names.keys() - runs:
            del self._names[key]

    def daemon_job(self, name: str) -> str | None:
        """What the daemons call the job of that name."""
        for jobs in list(self._names.values()):
            for job, given in list(jobs.names.items()):
                if given == name:
                    return job
        return None

    def run_name(self, key: RunKey) -> str:
        """What metrics, verdicts and people call a run's first job."""
        return f"{key.namespace}/{key.object_name}"

    def _allow(self, node: str, message: WatchRanksResponse) -> int:
        now = self._monotonic()
        speaker = self._speakers.setdefault(node, _Speaker(0.0, now - BURST_SECONDS))
        known = len(speaker.ranks) or len({(w.identity.pod, w.identity.rank) for w in message.windows})
        rate = WINDOWS_PER_RANK_SECOND * min(max(1, known), RANKS_PER_NODE)
        speaker.allowance = min(rate * BURST_SECONDS, speaker.allowance + rate * (now - speaker.seen_at))
        speaker.seen_at = now
        allowed = min(len(message.windows), int(speaker.allowance))
        speaker.allowance -= allowed
        # Those of the present message: ranks come and go, and none may raise the allowance for ever.
        speaker.ranks = {(w.identity.pod, w.identity.rank) for w in message.windows[:allowed]} or speaker.ranks
        return allowed

    def _name(self, identity: RankIdentity, node: str) -> str | None:
        pod = self._inventory.pod(identity.pod) if identity.pod else None
        key = self._inventory.run_of_pod(identity.pod) if pod is not None else None
        if pod is None or key is None:
            self.refusals.add("unknown_pod")
            return None
        if pod.node != node:
            self.refusals.add("other_node")
            return None
        if not 0 <= identity.rank < identity.world_size:
            self.refusals.add("rank")
            return None
        return self._job_name(key, identity.job)

    def _job_name(self, key: RunKey, job: str) -> str | None:
        """The run's own name for its one job; jobs beside it, as in a Ray cluster, get a number."""
        now = self._monotonic()
        jobs = self._names.setdefault(key, _Names())
        for silent in [known for known, heard in jobs.heard_at.items() if now - heard > SILENT_SECONDS]:
            del jobs.heard_at[silent], jobs.names[silent]
        name = jobs.names.get(job)
        if name is None:
            taken = set(jobs.names.values())
            plain = self.run_name(key)
            choices = [plain, *(f"{plain}#{number}" for number in range(2, JOBS_PER_RUN + 1))]
            name = next((choice for choice in choices if choice not in taken), None)
            if name is None:
                self.refusals.add("jobs")
                return None
            jobs.names[job] = name
        jobs.heard_at[job] = now
        return name

    def _rename(self, identity: RankIdentity, name: str, node: str) -> None:
        pod = self._inventory.pod(identity.pod)
        identity.job, identity.node = name, node
        if pod is not None:
            identity.namespace = pod.namespace
            identity.pod_name = pod.name
