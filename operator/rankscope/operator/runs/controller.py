"""Controller of TrainingRun objects: one for each run of our shards, with the verdict in its status."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from msgspec import UNSET, UnsetType

from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.analysis.verdicts.verdict import Kind, Severity
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.kube.api_client import Api, Document
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.kube.object_writer import Events, ObjectWriter, Target
from rankscope.operator.kube.objects import MANAGED, RunObject, collection, read_run_object, unix_seconds
from rankscope.operator.kube.resources import API_VERSION, RunVerdict, TrainingRunStatus
from rankscope.operator.kube.watch_cache import Watched
from rankscope.operator.runs.inventory import Inventory, Run, RunKey, RunNodes
from rankscope.operator.runs.pods import read_annotations
from rankscope.operator.runs.status import ended_status, gist, is_premature, run_status

log = logging.getLogger(__name__)

# Numbers change with every window. A change of meaning is written at once, the rest this often.
REFRESH_SECONDS = 20.0
KEEP_ENDED_SECONDS = 86400.0


class RunsController:
    """`reconcile` is called about once a second, in one thread."""

    def __init__(
        self,
        api: Api,
        writer: ObjectWriter,
        events: Events,
        inventory: Inventory,
        leases: ShardLeases,
        states: Callable[[], Mapping[str, JobState]],
        last_captures: Callable[[], Mapping[tuple[str, str], str]] = dict,
    ) -> None:
        self._api = api
        self._writer = writer
        self._events = events
        self._inventory = inventory
        self._leases = leases
        self._states = states
        self._last_captures = last_captures
        self._objects: dict[tuple[str, str], RunObject] = {}
        self._lock = threading.Lock()
        self._refreshed_at: dict[tuple[str, str], float] = {}
        self._reported: set[tuple[str, str]] = set()  # pod uid, mistake
        self._last_hangs: dict[tuple[str, str], str] = {}
        self.watched = Watched(api, collection(RunObject.plural), read_run_object, self)

    def changed(self, uid: str, thing: RunObject) -> None:
        with self._lock:
            self._objects[thing.namespace, thing.name] = thing

    def deleted(self, uid: str) -> None:
        with self._lock:
            for place, known in list(self._objects.items()):
                if known.uid == uid:
                    del self._objects[place]
                    self._writer.forget(known)
                    self._refreshed_at.pop(place, None)
                    self._last_hangs.pop(place, None)

    @property
    def is_listed(self) -> bool:
        return self.watched.listed.is_set()

    def object_of(self, namespace: str, name: str) -> RunObject | None:
        with self._lock:
            return self._objects.get((namespace, name))

    def nodes_of(self, job: str) -> RunNodes:
        """The pods are those of the API server; the ranks are known to the replica that correlates the run."""
        namespace, _, name = job.partition("#")[0].partition("/")
        pods = self._inventory.pods_by_node(lambda key: key.namespace == namespace and key.object_name == name)
        state = self._states().get(job)
        identities = {} if state is None else state.identities
        return RunNodes(pods, {rank: identity.node for rank, identity in identities.items()})

    def report_hang(self, report: HangReport) -> None:
        """From any thread."""
        namespace, _, name = report.run.partition("#")[0].partition("/")
        thing = self.object_of(namespace, name)
        if thing is None or not self._leases.holds(thing.place):
            return
        with self._lock:
            self._last_hangs[namespace, name] = report.id
        target = Target(API_VERSION, "TrainingRun", thing.namespace, thing.name, thing.uid)
        text = f"{report.headline}; next: rankscope hangs {report.id}"
        self._events.emit(target, "Warning", "HangReported", text, report.id)

    def reconcile(self) -> None:
        if not self.watched.listed.is_set():
            return
        states, captured = self._states(), self._last_captures()
        runs = self._runs_by_place()
        for place, run in runs.items():
            if self._leases.holds("/".join(place)):
                with _contained(place):
                    self._follow(place, run, states.get("/".join(place)), captured.get(place, UNSET))
        if self._reported:
            pods = {uid for run in runs.values() for uid in run.pods}
            self._reported = {reported for reported in self._reported if reported[0] in pods}
        with self._lock:
            left = [thing for place, thing in self._objects.items() if place not in runs and thing.is_ours]
        for thing in left:
            if self._leases.holds(thing.place) and not thing.deleting:
                with _contained((thing.namespace, thing.name)):
                    self._end(thing)

    def _follow(self, place: tuple[str, str], run: Run, state: JobState | None, captured: str | UnsetType) -> None:
        found = self.object_of(*place)
        if found is None:
            self._create(run.key)
        elif not found.deleting and found.is_ours and found.workload_uid != run.key.uid:
            self._delete(found)  # of a deleted workload of the same name; created again afterwards
        elif not found.deleting:
            self._update(found, run, state, captured)
        self._report_mistakes(run)

    def _runs_by_place(self) -> Mapping[tuple[str, str], Run]:
        """A new workload may have the name of an old one: the newest counts, the other's pods are terminating."""
        newest: dict[tuple[str, str], Run] = {}
        for key, run in self._inventory.runs().items():
            place = (key.namespace, key.object_name)
            known = newest.get(place)
            if known is None or known.last_created < run.last_created:
                newest[place] = run
        return newest

    def _create(self, key: RunKey) -> None:
        workload: Document = {"kind": key.kind, "name": key.name}
        metadata: Document = {"name": key.object_name, "namespace": key.namespace, "labels": MANAGED}
        owner = key.owner
        if owner is not None:
            workload |= {"apiVersion": key.api_version, "uid": key.uid}
            # Deleted with the workload, by the cluster.
            metadata["ownerReferences"] = [
                {"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name, "uid": owner.uid}
            ]
        body = {"apiVersion": API_VERSION, "kind": "TrainingRun", "metadata": metadata, "spec": {"workload": workload}}
        path, place = collection(RunObject.plural, key.namespace), key.full_name
        self._writer.queue(f"create trainingruns {place}", place, key, lambda: self._api.create(path, body))

    def _update(self, thing: RunObject, run: Run, state: JobState | None, captured: str | UnsetType) -> None:
        now = time.time()
        place = (thing.namespace, thing.name)
        if self._leases.is_settling("/".join(place)) and is_premature(state, thing.status.verdict):
            return
        status = run_status(run, state, thing.status, thing.generation, now)
        status.last_capture = captured or status.last_capture
        status.last_hang = self._last_hangs.get(place, status.last_hang)
        if status == thing.status:
            return
        meant = _meaning(status) != _meaning(thing.status)
        if not meant and now - self._refreshed_at.get(place, 0.0) < REFRESH_SECONDS:
            return
        self._refreshed_at[place] = now
        self._writer.queue_status(thing, status)
        if meant and isinstance(status.verdict, RunVerdict):
            self._report_verdict(thing, run, status.verdict, thing.status.verdict)

    def _end(self, thing: RunObject) -> None:
        """Of a run without pods: it is kept for a while."""
        status = ended_status(thing.status, thing.generation, time.time())
        ended = next(condition for condition in status.conditions if condition.type == "Ended")
        if time.time() - unix_seconds(ended.last_transition_time) > KEEP_ENDED_SECONDS:
            self._delete(thing)
        elif status != thing.status:
            self._writer.queue_status(thing, status)

    def _delete(self, thing: RunObject) -> None:
        body = {"preconditions": {"uid": thing.uid}}
        self._writer.queue(f"delete {thing.uid}", thing.place, thing.uid, lambda: self._api.delete(thing.path, body))

    def _report_verdict(self, thing: RunObject, run: Run, verdict: RunVerdict, before: object) -> None:
        was_alarm = isinstance(before, RunVerdict) and before.severity is Severity.ALARM
        if verdict.severity is not Severity.ALARM:
            if was_alarm and verdict.kind is Kind.HEALTHY:
                target = Target(API_VERSION, "TrainingRun", thing.namespace, thing.name, thing.uid)
                self._events.emit(target, "Normal", "Recovered", "nothing is raised any more", verdict.since)
            return
        reason = "".join(part.capitalize() for part in verdict.kind.split("_"))
        target = Target(API_VERSION, "TrainingRun", thing.namespace, thing.name, thing.uid)
        text = verdict.reason
        if isinstance(verdict.evidence, str):
            text += f"; {verdict.evidence}"
        if isinstance(verdict.source, str):
            text += f" ({verdict.source})"
        self._events.emit(target, "Warning", reason, text, verdict.since)
        pods = {pod.name: pod for pod in run.pods.values()}
        for name in dict.fromkeys(culprit.pod for culprit in verdict.culprits if isinstance(culprit.pod, str)):
            pod = pods.get(name)
            if pod is not None:
                accused = Target("v1", "Pod", pod.namespace, pod.name, pod.uid)
                self._events.emit(accused, "Warning", reason, f"{thing.name}: {text}", verdict.since)

    def _report_mistakes(self, run: Run) -> None:
        for pod in run.pods.values():
            for mistake in read_annotations(pod.annotations).mistakes:
                if (pod.uid, mistake) not in self._reported:
                    self._reported.add((pod.uid, mistake))
                    target = Target("v1", "Pod", pod.namespace, pod.name, pod.uid)
                    self._events.emit(target, "Warning", "BadAnnotation", mistake, mistake)


@contextmanager
def _contained(place: tuple[str, str]) -> Iterator[None]:
    """One odd object, which its owner may have written, must not hold up the others."""
    try:
        yield
    except Exception:
        log.exception("run %s/%s", *place)


def _meaning(status: TrainingRunStatus) -> object:
    """What a user would call a change."""
    conditions = tuple((condition.type, condition.status) for condition in status.conditions)
    last = (status.last_capture, status.last_hang)
    return (status.phase, status.ranks, gist(status.verdict), conditions, last, status.attempt_pod)
