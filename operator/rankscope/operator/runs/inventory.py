"""The runs and their pods, from the watch of pods. Thread-safe, no I/O.

A pod with the labels of a training framework makes a run at once. A pod of a Job or of another owner makes one only
when ranks were seen in it: otherwise every web server and nightly backup of the cluster would be a training run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rankscope.operator.runs.pods import Pod, read_annotations
from rankscope.operator.runs.run_grouping import RunKey, is_labelled, run_of


@dataclass(frozen=True)
class Run:
    """A run at one moment."""

    key: RunKey
    pods: Mapping[str, Pod]  # by uid, with those that have ended

    @property
    def live_pods(self) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.pods.values() if not pod.is_over and not pod.deleting)

    @property
    def last_created(self) -> str:
        return max((pod.created for pod in self.pods.values()), default="")

    @property
    def is_over(self) -> bool:
        return all(pod.is_over for pod in self.pods.values())


@dataclass(frozen=True)
class RunNodes:
    """Where a run is."""

    pods: Mapping[str, frozenset[str]]  # by node: the uids of its pods there; empty sets without Kubernetes
    owners: Mapping[int, str]  # rank to node, of the ranks that report


@dataclass
class _Group:
    key: RunKey  # one for all of its pods
    pods: dict[str, Pod] = field(default_factory=dict)
    is_wanted: bool = False


class Inventory:
    """Follows the watch of pods, and learns of ranks from the daemons."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[RunKey, _Group] = {}
        self._keys: dict[str, RunKey] = {}  # pod uid to run

    def changed(self, uid: str, pod: Pod) -> None:
        key = run_of(pod) if read_annotations(pod.annotations).watch else None
        with self._lock:
            before = self._keys.get(uid)
            if before is not None and before != key:
                self._remove(uid, before)
            if key is not None:
                group = self._groups.setdefault(key, _Group(key))
                group.pods[uid] = pod
                group.is_wanted = group.is_wanted or is_labelled(pod)
                self._keys[uid] = group.key

    def deleted(self, uid: str) -> None:
        with self._lock:
            key = self._keys.get(uid)
            if key is not None:
                self._remove(uid, key)

    def ranks_seen_in(self, uids: Iterable[str]) -> None:
        with self._lock:
            for uid in uids:
                key = self._keys.get(uid)
                if key is not None:
                    self._groups[key].is_wanted = True

    def find(self, uid: str) -> tuple[Pod, RunKey] | None:
        with self._lock:
            key = self._keys.get(uid)
            return None if key is None else (self._groups[key].pods[uid], key)

    def runs(self) -> Mapping[RunKey, Run]:
        with self._lock:
            groups = self._groups.items()
            return {key: Run(key, dict(group.pods)) for key, group in groups if group.is_wanted}

    def pods_by_node(self, keeps: Callable[[RunKey], bool]) -> Mapping[str, frozenset[str]]:
        """Uids of the pods of those runs, and of groups that may become one."""
        found: dict[str, set[str]] = {}
        with self._lock:
            for key, group in self._groups.items():
                if keeps(key):
                    for uid, pod in group.pods.items():
                        if pod.node:
                            found.setdefault(pod.node, set()).add(uid)
        return {node: frozenset(uids) for node, uids in found.items()}

    def _remove(self, uid: str, key: RunKey) -> None:
        del self._keys[uid]
        group = self._groups[key]
        del group.pods[uid]
        if not group.pods:
            del self._groups[key]
