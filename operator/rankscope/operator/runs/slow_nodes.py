"""The Node condition `RankscopeSlowNode`, for schedulers and for tools that replace nodes. Off by default.

A node is slow when every rank of a run on it is a culprit while other nodes of the run are not. The condition names the
run, and the replica that acts for that run resets it: also after a restart, and when the run is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rankscope.analysis.verdicts.verdict import Kind
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.kube.api_client import Api, Document
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.kube.object_writer import ObjectWriter
from rankscope.operator.kube.objects import timestamp
from rankscope.operator.kube.watch_cache import Watched

CONDITION = "RankscopeSlowNode"
MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True)
class NodeObject:
    name: str
    slow_run: str  # namespace/name of the run that it is said to hold up; empty: none


def read_node(document: Document) -> NodeObject:
    metadata = document["metadata"]
    conditions = (document.get("status") or {}).get("conditions") or ()
    ours = next((c for c in conditions if c.get("type") == CONDITION and c.get("status") == "True"), None)
    run = "" if ours is None else str(ours.get("message") or "").partition(": ")[0]
    return NodeObject(metadata["name"], run)


def slow_nodes(state: JobState) -> frozenset[str]:
    verdict = state.verdict
    if verdict.kind is not Kind.SLOW_RANK or not verdict.is_alarm:
        return frozenset()
    ranks: dict[str, set[int]] = {}
    for rank, identity in state.identities.items():
        ranks.setdefault(identity.node, set()).add(rank)
    slow = frozenset(node for node, here in ranks.items() if node and here <= set(verdict.culprits))
    return slow if len(slow) < len(ranks) else frozenset()


class SlowNodes:
    """`reconcile` is called about once a second, in one thread."""

    def __init__(
        self,
        api: Api,
        writer: ObjectWriter,
        leases: ShardLeases,
        states: Callable[[], Mapping[str, JobState]],
    ) -> None:
        self._api = api
        self._writer = writer
        self._leases = leases
        self._states = states
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeObject] = {}  # by uid
        self.watched: Watched[NodeObject] = Watched(api, "/api/v1/nodes", read_node, self)

    def changed(self, uid: str, node: NodeObject) -> None:
        with self._lock:
            self._nodes[uid] = node
        # It was changed: the condition that we wrote may be gone.
        self._writer.forget_key(f"node {node.name}")

    def deleted(self, uid: str) -> None:
        with self._lock:
            self._nodes.pop(uid, None)

    def reconcile(self) -> None:
        states = self._states()
        # A run's second job has the run's name and a number.
        wanted = {node: (job.partition("#")[0], state) for job, state in states.items() for node in slow_nodes(state)}
        with self._lock:
            nodes = list(self._nodes.values())
        for node in nodes:
            run, state = wanted.get(node.name, ("", None))
            if state is not None and not node.slow_run and self._leases.holds(run):
                self._set(node, run, "True", "SlowForRun", state.verdict.reason)
            elif state is None and node.slow_run and self._may_reset(node.slow_run):
                self._set(node, node.slow_run, "False", "NotSlow", "it no longer slows the run down")

    def _may_reset(self, run: str) -> bool:
        return self._leases.holds(run) and not self._leases.is_settling(run)

    def _set(self, node: NodeObject, run: str, status: str, reason: str, text: str) -> None:
        now = timestamp(time.time())
        condition = {
            "type": CONDITION,
            "status": status,
            "reason": reason,
            "message": f"{run}: {text}"[:MESSAGE_CHARACTERS],
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }

        body = {"status": {"conditions": [condition]}}
        self._writer.queue(
            f"node {node.name}",
            run,
            (status, run),
            lambda: self._api.merge_lists(f"/api/v1/nodes/{node.name}/status", body),
        )
