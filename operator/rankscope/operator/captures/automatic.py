"""Automatic captures: when a verdict causes one, of which ranks, and its creation.

The limits are computed from the existing Capture objects, so that a restarted operator and another replica find the
same. The objects are kept for a day and for the cooldown at least, whatever their time to live. A capture's name is
made of the run and of the automatic capture before it: two operators that decide at the same time create one object."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rankscope.analysis.verdicts.verdict import Kind
from rankscope.common.run_names import run_labels
from rankscope.operator.correlation.correlator import JobState, ranks_to_capture
from rankscope.operator.kube import resources
from rankscope.operator.kube.api_client import ApiError, ConflictError, Document, ObjectApi, UnreachableError
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.kube.object_writer import Events, Target
from rankscope.operator.kube.objects import (
    MANAGED,
    CaptureObject,
    PolicyObject,
    RunObject,
    collection,
    read_capture_object,
)
from rankscope.operator.kube.resources import API_VERSION, AutomaticCaptures
from rankscope.operator.kube.watch_cache import Watched
from rankscope.operator.runs.controller import RunsController

TRIGGER = "rankscope.dev/trigger"
POLICY = "rankscope.dev/policy"
FINDING = "rankscope.dev/finding"
BY_POLICY, BY_ALERT = "policy", "alert"
DAY_SECONDS = 86400.0
# A finding that returns after this long is a new one.
RECOVERED_SECONDS = 60.0
# There are no steps to record, and the verdict has the stacks.
NEVER = frozenset({Kind.HANG, Kind.HEALTHY, Kind.INSUFFICIENT_DATA})


@dataclass(frozen=True)
class Past:
    """What the next automatic capture has to know of an earlier one."""

    created_unix_seconds: float
    finding: str


def is_automatic(capture: CaptureObject) -> bool:
    return capture.annotations.get(TRIGGER) in (BY_POLICY, BY_ALERT)


def run_and_number(job: str) -> tuple[str, str, str]:
    """The namespace, run and number of a job. Outside Kubernetes a run is one job, and may have # in its name."""
    labels = run_labels(job)
    if not labels["run_namespace"]:
        return "", job, ""
    run, _, number = labels["run"].partition("#")
    return labels["run_namespace"], run, number


def finding_of(state: JobState) -> str:
    verdict = state.verdict
    ranks = ",".join(map(str, verdict.culprits[:64]))
    *_, number = run_and_number(state.job)
    return (
        f"{verdict.kind.value} {ranks}"
        + ("" if verdict.stage is None else f" stage {verdict.stage}")
        + (f" job {number}" if number else "")
    )


def job_number(job: str) -> Document:
    """For the spec of a capture: nothing for a run's first job."""
    *_, number = run_and_number(job)
    return {"jobNumber": int(number)} if number else {}


def wants_capture(spec: AutomaticCaptures, state: JobState) -> bool:
    return state.verdict.is_alarm and state.verdict.kind not in NEVER and state.verdict.kind in spec.on


def captures_today(captures: Iterable[CaptureObject], now_unix_seconds: float) -> Counter[tuple[str, str]]:
    """By namespace and policy, in the last 24 hours."""
    return Counter(
        (capture.namespace, capture.annotations[POLICY])
        for capture in captures
        if POLICY in capture.annotations and now_unix_seconds - capture.created_unix_seconds < DAY_SECONDS
    )


def objection(
    spec: AutomaticCaptures,
    policy: PolicyObject,
    finding: str,
    captures_of_run: Iterable[CaptureObject],
    captures: Iterable[CaptureObject],
    made: Past | None,
    recovered_unix_seconds: float | None,
    now_unix_seconds: float,
) -> str | None:
    """Why there is no capture now. `made` is the last one that this operator created, which may have been deleted;
    `recovered_unix_seconds` is when the run was last healthy for a while."""
    of_run = list(captures_of_run)
    for capture in of_run:
        if not capture.is_finished and not capture.deleting:
            return f"capture {capture.name} of the run is under way"
    pasts = [Past(c.created_unix_seconds, c.annotations.get(FINDING, "")) for c in of_run if is_automatic(c)]
    last = max(
        [*pasts, *([made] if made is not None else [])], key=lambda past: past.created_unix_seconds, default=None
    )
    if last is not None:
        rest = last.created_unix_seconds + spec.cooldown_seconds - now_unix_seconds
        if rest > 0:
            return f"the run was captured recently; again in {rest:.0f} s"
        recovered = recovered_unix_seconds is not None and recovered_unix_seconds > last.created_unix_seconds
        if last.finding == finding and not recovered:
            return "this finding has had its capture"
    known = list(captures)
    if captures_today(known, now_unix_seconds)[policy.namespace, policy.name] >= spec.per_day:
        return f"the policy's {spec.per_day} captures a day are used up"
    running = sum(not capture.is_finished and not capture.deleting for capture in _of(known, policy))
    return f"{running} captures of the policy are under way" if running >= spec.concurrent else None


def capture_name(run: RunObject, captures_of_run: Iterable[CaptureObject]) -> str:
    before = max(filter(is_automatic, captures_of_run), key=lambda c: (c.created_unix_seconds, c.name), default=None)
    digest = hashlib.sha256(f"{run.uid} {'' if before is None else before.uid}".encode()).hexdigest()[:10]
    return f"{run.name[:200]}-auto-{digest}"


def capture_body(
    name: str, run: RunObject, policy: PolicyObject, spec: AutomaticCaptures, state: JobState, ranks: tuple[int, ...]
) -> Document:
    wanted: Document = {
        "run": run.name,
        "ranks": ",".join(map(str, ranks)),
        "ttlSecondsAfterFinished": int(max(spec.ttl_seconds_after_finished, spec.cooldown_seconds, DAY_SECONDS)),
        "reason": f"policy {policy.name}: {state.verdict.reason}"[:1024],
    }
    if isinstance(spec.steps, int) and state.step_seconds is not None:
        wanted["steps"] = spec.steps
    wanted |= job_number(state.job)
    annotations = {TRIGGER: BY_POLICY, POLICY: policy.name, FINDING: finding_of(state)}
    return capture_document(name, run, wanted, annotations)


def capture_document(name: str, run: RunObject, spec: Document, annotations: dict[str, str]) -> Document:
    owner = {"apiVersion": API_VERSION, "kind": "TrainingRun", "name": run.name, "uid": run.uid}
    return {
        "apiVersion": API_VERSION,
        "kind": "Capture",
        "metadata": {
            "name": name,
            "namespace": run.namespace,
            "labels": MANAGED,
            "annotations": annotations,
            "ownerReferences": [owner],
        },
        "spec": spec,
    }


def _of(captures: Iterable[CaptureObject], policy: PolicyObject) -> Iterable[CaptureObject]:
    return (
        capture
        for capture in captures
        if capture.namespace == policy.namespace and capture.annotations.get(POLICY) == policy.name
    )


log = logging.getLogger(__name__)

WORKERS = 4
# A capture that was deleted before the watch reported it is forgotten after this.
UNSEEN_SECONDS = 60.0
MAX_REMEMBERED_RUNS = 10_000


class CaptureMaker:
    """Creates captures, and counts them before the watch reports them. Thread-safe."""

    def __init__(self, api: ObjectApi, watched: Watched[CaptureObject], clock: Callable[[], float] = time.time) -> None:
        self._api = api
        self._watched = watched
        self._clock = clock
        self._lock = threading.Lock()
        self._unseen: dict[str, CaptureObject] = {}  # made, and not yet in the watch
        self._past: dict[str, Past] = {}  # by the run's uid; its object may have been deleted

    def known(self) -> list[CaptureObject]:
        """Those in the watch and those just created."""
        seen, now = self._watched.objects, self._clock()
        with self._lock:
            self._unseen = {
                uid: capture
                for uid, capture in self._unseen.items()
                if uid not in seen and now - capture.created_unix_seconds < UNSEEN_SECONDS
            }
            return [*seen.values(), *self._unseen.values()]

    def create(self, run: RunObject, body: Document, past: Past) -> None:
        """The capture counts against the limits from now on."""
        made = read_capture_object(self._api.create(collection("captures", run.namespace), body))
        assert made is not None
        with self._lock:
            self._unseen[made.uid] = made
        self._remember(run, past)

    def _remember(self, run: RunObject, past: Past) -> None:
        with self._lock:
            self._past[run.uid] = past
            while len(self._past) > MAX_REMEMBERED_RUNS:
                del self._past[next(iter(self._past))]


class AutomaticCaptureMaker(CaptureMaker):
    """`reconcile` is called about once a second, in one thread; objects are created in others, one at a time
    for each policy."""

    def __init__(
        self,
        api: ObjectApi,
        events: Events,
        leases: ShardLeases,
        runs: RunsController,
        watched: Watched[CaptureObject],
        states: Callable[[], Mapping[str, JobState]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(api, watched, clock)
        self._events = events
        self._leases = leases
        self._runs = runs
        self._states = states
        self._recovered: dict[str, float] = {}  # run to when it was last seen healthy for a while
        self._busy: set[str] = set()  # uids of policies
        self._logged: dict[str, str] = {}  # job to why no capture was created, so that it is logged once
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="rankscope-automatic")

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def reconcile(self, policies: Mapping[str, PolicyObject]) -> Sequence[CaptureObject] | None:
        """`policies` is run to the policy that holds. Returns all captures there are; None while they are not known."""
        if not self._watched.listed.is_set() or not self._runs.watched.listed.is_set():
            return None
        now, states = self._clock(), self._states()
        self._note_recoveries(states, now)
        self._logged = {job: text for job, text in self._logged.items() if job in states}
        jobs: dict[str, list[JobState]] = {}
        for job in sorted(states):
            jobs.setdefault(job.partition("#")[0], []).append(states[job])
        for name, policy in policies.items():
            spec = policy.spec.automatic_captures if policy.spec is not None else None
            if isinstance(spec, resources.AutomaticCaptures) and name in jobs and self._leases.holds(name):
                for state in jobs[name]:
                    self._consider(name, policy, spec, state, now)
        return self.known()

    def _note_recoveries(self, states: Mapping[str, JobState], now: float) -> None:
        self._recovered = {name: at for name, at in self._recovered.items() if name in states}
        for name, state in states.items():
            is_well = state.verdict.kind is Kind.HEALTHY
            if is_well and now - state.since_unix_seconds > RECOVERED_SECONDS:
                self._recovered[name] = now

    def _consider(
        self,
        name: str,
        policy: PolicyObject,
        spec: resources.AutomaticCaptures,
        state: JobState,
        now: float,
    ) -> None:
        namespace, _, run_name = name.partition("/")
        run = self._runs.object_of(namespace, run_name)
        if not wants_capture(spec, state) or run is None or run.deleting:
            self._logged.pop(state.job, None)
            return
        with self._lock:
            if policy.uid in self._busy:
                return  # its result counts for the next
            past = self._past.get(run.uid)
        captures = self.known()  # after that: captures of other runs since this round began count too
        of_run = [c for c in captures if c.namespace == namespace and c.spec is not None and c.spec.run == run_name]
        finding, (_, ranks) = finding_of(state), ranks_to_capture(state)
        reason = objection(spec, policy, finding, of_run, captures, past, self._recovered.get(state.job), now)
        if reason is None and not ranks:
            reason = "no rank of the run reports"
        if reason is not None:
            text = f"{finding}: {reason.partition(';')[0]}"  # without the seconds that are left
            if self._logged.get(state.job) != text:
                self._logged[state.job] = text
                log.info("%s: %s: no capture by policy %s: %s", name, finding, policy.name, reason)
            return
        body = capture_body(capture_name(run, of_run), run, policy, spec, state, ranks)
        with self._lock:
            self._busy.add(policy.uid)
        self._pool.submit(self._make, run, policy, body, Past(now, finding))

    def _make(self, run: RunObject, policy: PolicyObject, body: Document, past: Past) -> None:
        name, capture = run.place, body["metadata"]["name"]
        try:
            self.create(run, body, past)
        except ConflictError:
            log.info("%s: capture %s exists already", name, capture)
        except UnreachableError as error:
            log.debug("%s: capture %s waits: %s", name, capture, error)
        except ApiError as error:
            # It would be refused again at once: by a role or a quota that somebody has to correct.
            self._remember(run, past)
            log.warning("%s: capture %s cannot be created: %s", name, capture, error)
        except Exception:
            log.exception("%s: capture %s", name, capture)
        else:
            text = f"policy {policy.name}: capture {capture} of ranks {body['spec']['ranks']} for {past.finding}"
            target = Target(resources.API_VERSION, "TrainingRun", run.namespace, run.name, run.uid)
            self._events.emit(target, "Normal", "CaptureStarted", text, capture)
        finally:
            with self._lock:
                self._busy.discard(policy.uid)
