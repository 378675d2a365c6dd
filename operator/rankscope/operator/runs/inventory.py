"""The runs and their pods, from the watch of pods: which run a pod belongs to, by the labels of the training
frameworks. Thread-safe, no I/O.

A pod with the labels of a training framework makes a run at once. A pod of a Job or of another owner makes one only
when ranks were seen in it: otherwise every web server and nightly backup of the cluster would be a training run."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rankscope.operator.runs.pods import Owner, Pod, read_annotations

RUN_LABEL = "rankscope.dev/run"

_KUBEFLOW = "training.kubeflow.org/"
_JOBSET = "jobset.sigs.k8s.io/"
_JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"
_TRAINER_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
# Pods of a TrainJob that fetch data and models before the training.
_PREPARING = frozenset({"dataset-initializer", "model-initializer"})
_JOB_NAMES = ("batch.kubernetes.io/job-name", "job-name")

# 63 is the limit of a label value, which a run's name has to fit as well.
NAME_CHARACTERS = 63
HASH_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class RunKey:
    """A run is the workload that made the pods. `uid` distinguishes it from an earlier one of the same name."""

    namespace: str
    kind: str
    name: str
    api_version: str = ""
    uid: str = ""

    @property
    def object_name(self) -> str:
        """The TrainingRun's name: readable, valid, and never the same for two workloads of a namespace."""
        plain = re.sub(r"[^a-z0-9-]+", "-", f"{self.kind}-{self.name}".lower()).strip("-")
        if plain == f"{self.kind}-{self.name}".lower() and len(plain) <= NAME_CHARACTERS:
            return plain
        digest = hashlib.sha256(f"{self.kind}/{self.name}".encode()).hexdigest()[:HASH_CHARACTERS]
        return f"{plain[: NAME_CHARACTERS - HASH_CHARACTERS - 1].rstrip('-')}-{digest}"

    @property
    def full_name(self) -> str:
        """The run's one name in metrics, verdicts and commands; daemons get it from the operator."""
        return f"{self.namespace}/{self.object_name}"

    @property
    def owner(self) -> Owner | None:
        """The owner that the run's objects are deleted with. With a wrong uid the cluster deletes them at once."""
        if not self.api_version or not self.uid:
            return None
        if self.kind == "TrainJob":  # the known uid is that of its JobSet, which is deleted with it
            return Owner(_JOBSET_VERSION, "JobSet", self.name, self.uid)
        return Owner(self.api_version, "Job" if self.kind == "VolcanoJob" else self.kind, self.name, self.uid)


def run_of(pod: Pod) -> RunKey | None:
    """None for pods that do not train."""
    for convention in _CONVENTIONS:
        key = convention(pod)
        if key is not None:
            return key if _trains(pod) else None
    return None


def is_labelled(pod: Pod) -> bool:
    """Whether its labels alone show that it trains. Jobs, Ray clusters and other owners have other uses too."""
    return any(convention(pod) is not None for convention in (_ours, _kubeflow, _jobset, _volcano))


def _trains(pod: Pod) -> bool:
    step = pod.labels.get(_TRAINER_STEP) or pod.labels.get(f"{_JOBSET}replicatedjob-name", "")
    return step not in _PREPARING


def _ours(pod: Pod) -> RunKey | None:
    name = pod.labels.get(RUN_LABEL)
    return RunKey(pod.namespace, "Run", name) if name else None


def _kubeflow(pod: Pod) -> RunKey | None:
    name = pod.labels.get(f"{_KUBEFLOW}job-name")
    return _named(pod, name, "PyTorchJob", "kubeflow.org/v1") if name else None


def _jobset(pod: Pod) -> RunKey | None:
    name = pod.labels.get(f"{_JOBSET}jobset-name")
    if not name:
        return None
    # The owner is the Job of one replica; users know the JobSet, or the TrainJob of the same name above it.
    kind, group = ("TrainJob", "trainer.kubeflow.org/v1alpha1") if _TRAINER_STEP in pod.labels else ("JobSet", "")
    return RunKey(pod.namespace, kind, name, group or _JOBSET_VERSION, pod.labels.get(f"{_JOBSET}jobset-uid", ""))


def _volcano(pod: Pod) -> RunKey | None:
    name = pod.labels.get("volcano.sh/job-name")
    return _named(pod, name, "VolcanoJob", "batch.volcano.sh/v1alpha1") if name else None


def _ray(pod: Pod) -> RunKey | None:
    name = pod.labels.get("ray.io/cluster")
    return _named(pod, name, "RayCluster", "ray.io/v1") if name else None


def _job(pod: Pod) -> RunKey | None:
    name = next((pod.labels[label] for label in _JOB_NAMES if label in pod.labels), None)
    return _named(pod, name, "Job", "batch/v1") if name else None


def _owned(pod: Pod) -> RunKey | None:
    owner = pod.owner
    return None if owner is None else RunKey(pod.namespace, owner.kind, owner.name, owner.api_version, owner.uid)


def _named(pod: Pod, name: str, kind: str, api_version: str) -> RunKey:
    owner: Owner | None = pod.owner
    if owner is not None and owner.name == name:
        # The owner has the exact kind (an MPIJob has the same labels as a PyTorchJob).
        kind = "VolcanoJob" if owner.api_version.startswith("batch.volcano.sh/") else owner.kind
        return RunKey(pod.namespace, kind, name, owner.api_version, owner.uid)
    return RunKey(pod.namespace, kind, name, api_version)


# The most specific first: pods of a JobSet or a PyTorchJob may carry a Job's labels too.
_CONVENTIONS: tuple[Callable[[Pod], RunKey | None], ...] = (_ours, _kubeflow, _jobset, _volcano, _ray, _job, _owned)


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
