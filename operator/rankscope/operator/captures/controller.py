"""Controller of Capture objects: planned once, requested from the daemons, followed to their end, also over restarts.

The plan is written to the object before any daemon is asked, with the version that was read as a condition, and the
capture's id is made of the object's uid: a second operator, or one after a restart, requests the same capture.

A user may write the status of their own objects. It says how far a capture is, and where to look for it; what is
captured is derived from the run's own pods whenever a daemon is asked to record."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec import UNSET, structs

from rankscope.analysis.traces.joins.comparison import UNMEASURED_SECONDS, LiveSteps, steps_to_record
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.common.rank_selection import SUSPECTS, ChoiceError, choose_ranks
from rankscope.common.run_names import run_name
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.captures.daemon_calls import CaptureRequests, DaemonCalls, Target
from rankscope.operator.captures.status import concluded, failed_ranks, findings_of, is_ended, summarised, updated_ranks
from rankscope.operator.correlation.correlator import JobState, suspects
from rankscope.operator.correlation.job_service import verdict_message
from rankscope.operator.kube.api_client import (
    ApiError,
    ConflictError,
    Document,
    MissingError,
    ObjectApi,
    UnreachableError,
)
from rankscope.operator.kube.leader_election import Leases
from rankscope.operator.kube.object_writer import ObjectWriter
from rankscope.operator.kube.objects import (
    FINALIZER,
    MAX_RANKS,
    CaptureObject,
    collection,
    read_capture_object,
    timestamp,
    unix_seconds,
)
from rankscope.operator.kube.resources import CapturedRank, CapturePhase, CaptureSpec, CaptureStatus
from rankscope.operator.kube.watch_cache import Watched
from rankscope.v1 import capture_service_pb2 as pb

# libkineto polls every five seconds; clock differences of the nodes and our calls add to that.
START_AHEAD_SECONDS = 12.0


class PlanError(Exception):
    """Nothing can be captured: a CamelCase reason and a sentence with the next step."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Plan:
    job: str
    ranks: tuple[CapturedRank, ...]
    # Chosen by the steps of the ranks; both None if the spec has a length.
    steps: int | None = None
    seconds: float | None = None


def plan(spec: CaptureSpec, run: str, state: JobState | None, ranks_limit: int) -> Plan:
    if state is None:
        number = spec.job_number
        which = f"job #{number} of run {run}" if isinstance(number, int) and number > 1 else f"run {run}"
        raise PlanError("NoRanks", f"no rank of {which} reports; `kubectl get trainingrun {run}` shows its state")
    identities = state.identities
    try:
        chosen = choose_ranks(spec.ranks, identities.keys(), state.world_size, suspects(state))
    except ChoiceError as error:
        is_about_suspects = spec.ranks in SUSPECTS
        raise PlanError("NoStraggler" if is_about_suspects else "BadRanks", str(error)) from error
    if len(chosen) > ranks_limit:
        raise PlanError("TooManyRanks", f"{len(chosen)} ranks at once; at most {ranks_limit}: name some of them")
    ranks = []
    for rank in chosen:
        identity = identities.get(rank)
        if identity is None:
            ranks.append(CapturedRank(rank=rank, state="failed", error="the rank does not report: has it ended?"))
        else:
            ranks.append(
                CapturedRank(rank=rank, node=identity.node, pod=identity.pod_name or identity.pod, state="accepted")
            )
    if all(rank.state == "failed" for rank in ranks):
        raise PlanError("NoRanks", f"none of the ranks {spec.ranks} reports")
    if isinstance(spec.steps, int) or isinstance(spec.seconds, float):
        return Plan(state.job, tuple(ranks))
    steps = steps_to_record(_live_steps(state, chosen), state.verdict.culprits)
    return Plan(state.job, tuple(ranks), steps, UNMEASURED_SECONDS if steps is None else None)


def _live_steps(state: JobState, ranks: Collection[int]) -> dict[int, LiveSteps]:
    live = {}
    for window in state.windows:
        if window.identity.rank in ranks and window.HasField("step_seconds"):
            own = window.self_seconds if window.HasField("self_seconds") else None
            figures = () if own is None else (own.mean, own.p10, own.p90)
            live[window.identity.rank] = LiveSteps(window.step_seconds.mean, *figures)
    return live


def by_node(ranks: Mapping[int, CapturedRank]) -> dict[str, list[int]]:
    nodes: dict[str, list[int]] = {}
    for number, rank in ranks.items():
        if isinstance(rank.node, str):
            nodes.setdefault(rank.node, []).append(number)
    return nodes


def _run_of(thing: CaptureObject) -> str:
    return run_name(thing.namespace, thing.name if thing.spec is None else thing.spec.run)


def _share(thing: CaptureObject) -> tuple[str, bool]:
    return thing.namespace, thing.is_begun


log = logging.getLogger(__name__)

WORKERS = 32
MAX_RUNNING = 32
# Of one namespace: captures that run, and those that are attended to at a time, running and others. No namespace takes
# all workers.
MAX_PER_NAMESPACE = 8
# Until a capture ends: recording, writing, cutting, uploading.
MAX_CAPTURE_SECONDS = 1800.0


class CapturesController:
    """`reconcile` is called about once a second; the work is done in threads, one at a time for each capture."""

    def __init__(
        self,
        api: ObjectApi,
        writer: ObjectWriter,
        leases: Leases,
        calls: DaemonCalls,
        states: Callable[[], Mapping[str, JobState]],
        addresses: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.time,
        audit: CaptureAudit | None = None,
        policy_of: Callable[[str], Policy] = lambda job: DEFAULT_POLICY,
    ) -> None:
        self._api = api
        self._writer = writer
        self._leases = leases
        self._policy_of = policy_of
        self._states = states
        self._clock = clock
        self._audit = audit or CaptureAudit()
        self._lock = threading.Lock()
        self._objects: dict[str, CaptureObject] = {}  # by uid
        self._busy: set[str] = set()
        self._attended_at: dict[str, float] = {}
        self._followed_since: dict[str, float] = {}
        self._beginning: set[tuple[str, str]] = set()  # namespace, run
        self._requests = CaptureRequests(calls, addresses, self._target, self._audit.begun, clock)
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="rankscope-captures")
        self.watched = Watched(api, collection(CaptureObject.plural), read_capture_object, self)

    def changed(self, uid: str, thing: CaptureObject) -> None:
        with self._lock:
            self._objects[uid] = thing

    def deleted(self, uid: str) -> None:
        with self._lock:
            thing = self._objects.pop(uid, None)
            self._attended_at.pop(uid, None)
            self._followed_since.pop(uid, None)
        self._requests.forget(uid)
        if thing is not None and not thing.is_finished and self._holds(thing):
            self._audit.asked(thing)
            self._audit.ended(thing, thing.status, "Deleted")

    def last_captures(self) -> Mapping[tuple[str, str], str]:
        """Namespace and run to the capture of it that ended last."""
        with self._lock:
            ended = [thing for thing in self._objects.values() if isinstance(thing.status.finished_at, str)]
        ended.sort(key=lambda thing: str(thing.status.finished_at))
        return {(thing.namespace, thing.spec.run): thing.name for thing in ended if thing.spec is not None}

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._requests.stop()

    def reconcile(self) -> None:
        with self._lock:
            due = [thing for uid, thing in self._objects.items() if uid not in self._busy and self._is_due(thing)]
            busy = Counter(_share(self._objects[uid]) for uid in self._busy & self._objects.keys())
            due.sort(key=lambda thing: self._attended_at.get(thing.uid, 0.0))
        for thing in due:
            if busy[_share(thing)] < MAX_PER_NAMESPACE and self._holds(thing):
                busy[_share(thing)] += 1
                with self._lock:
                    self._busy.add(thing.uid)
                    self._attended_at[thing.uid] = self._clock()
                self._pool.submit(self._attend_safely, thing)

    def _holds(self, thing: CaptureObject) -> bool:
        return self._leases.holds(_run_of(thing))

    def _is_due(self, thing: CaptureObject) -> bool:
        if thing.deleting:
            return FINALIZER in thing.finalizers
        return not thing.is_finished or self._is_expired(thing)

    def _is_expired(self, thing: CaptureObject) -> bool:
        spec, finished = thing.spec, thing.status.finished_at
        if spec is None or not isinstance(spec.ttl_seconds_after_finished, int) or not isinstance(finished, str):
            return False
        return self._clock() - unix_seconds(finished) > spec.ttl_seconds_after_finished

    def _attend_safely(self, thing: CaptureObject) -> None:
        try:
            self._attend(thing)
        except (ConflictError, MissingError):
            pass  # changed or deleted meanwhile: the watch reports it
        except UnreachableError as error:
            log.debug("capture %s waits: %s", thing.place, error)
        except ApiError as error:
            log.warning("capture %s: %s", thing.place, error)
        except Exception:
            log.exception("capture %s", thing.place)
        finally:
            with self._lock:
                self._busy.discard(thing.uid)

    def _attend(self, thing: CaptureObject) -> None:
        if thing.deleting:
            self._clear(thing)
        elif thing.is_finished:
            self._api.delete(thing.path, {"preconditions": {"uid": thing.uid}})
        elif thing.is_begun:
            self._follow(thing)
        else:
            self._begin(thing)

    def _begin(self, thing: CaptureObject) -> None:
        self._audit.asked(thing)
        if thing.spec is None:
            self._refuse(thing, "Invalid", thing.mistake)
            return
        if thing.is_cancelled:
            self._refuse(thing, "Cancelled", "cancelled before it began", "Cancelled")
            return
        with self._turn(thing) as ahead:
            if ahead is not None:
                self._wait(thing, ahead)
                return
            try:
                planned = self._plan(thing)
            except PlanError as error:
                if self._may_change(thing, error):
                    self._wait(thing, str(error))
                else:
                    self._refuse(thing, error.reason, str(error))
                return
            if FINALIZER not in thing.finalizers:
                metadata = {"finalizers": [*thing.finalizers, FINALIZER], "resourceVersion": thing.version}
                thing = self._taken(thing, self._api.merge(thing.path, {"metadata": metadata}))
            begun = self._write(thing, self._begun_status(thing, planned))
        self._follow(begun)

    def _plan(self, thing: CaptureObject) -> Plan:
        assert thing.spec is not None
        return plan(thing.spec, thing.spec.run, self._states().get(thing.job), MAX_RANKS)

    def _target(self, thing: CaptureObject) -> Target | None:
        state = self._states().get(thing.job)
        if state is None:
            return None
        return Target(state.job, state.identities, verdict_message(state.verdict, state.since_unix_seconds))

    def _may_change(self, thing: CaptureObject, error: PlanError) -> bool:
        """Ranks may still appear, and after a restart the straggler is not known yet."""
        if error.reason not in ("NoRanks", "NoStraggler"):
            return False
        assert thing.spec is not None
        patience = thing.spec.patience_seconds if error.reason == "NoRanks" else 0.0
        is_early = self._clock() - thing.created_unix_seconds < patience
        return is_early or self._leases.is_settling(_run_of(thing))

    def _begun_status(self, thing: CaptureObject, planned: Plan) -> CaptureStatus:
        now = self._clock()
        return structs.replace(
            thing.status,
            phase="Running",
            message="",
            job=planned.job[:256],
            capture_id=thing.capture_id,
            start_unix_ms=round((now + START_AHEAD_SECONDS) * 1000),
            steps=UNSET if planned.steps is None else planned.steps,
            seconds=UNSET if planned.seconds is None else planned.seconds,
            started_at=timestamp(now),
            ranks=list(planned.ranks),
            delivered=f"0/{len(planned.ranks)}",
        )

    def _wait(self, thing: CaptureObject, message: str) -> None:
        if thing.status.message != message or thing.status.phase != "Pending":
            self._write(thing, structs.replace(thing.status, phase="Pending", message=message))

    @contextmanager
    def _turn(self, thing: CaptureObject) -> Iterator[str | None]:
        """None, or why it has to wait: one capture of a run at a time, and a limit for the fleet."""
        assert thing.spec is not None
        place = (thing.namespace, thing.spec.run)
        with self._lock:
            running = [known for known in self._objects.values() if known.is_begun and not known.is_finished]
            ahead = self._ahead_of(place, running)
            if ahead is None:
                self._beginning.add(place)
        try:
            yield ahead
        finally:
            if ahead is None:
                with self._lock:
                    self._beginning.discard(place)

    def _ahead_of(self, place: tuple[str, str], running: list[CaptureObject]) -> str | None:
        for other in running:
            if other.spec is not None and (other.namespace, other.spec.run) == place:
                return f"waits for capture {other.name} of the same run"
        if place in self._beginning:
            return "waits for another capture of the same run"
        counts = Counter([other.namespace for other in running] + [namespace for namespace, _ in self._beginning])
        if counts[place[0]] >= MAX_PER_NAMESPACE:
            return f"waits: {MAX_PER_NAMESPACE} captures of the namespace are under way"
        if sum(min(count, MAX_PER_NAMESPACE) for count in counts.values()) >= MAX_RUNNING:
            return f"waits: {MAX_RUNNING} captures are under way"
        return None

    def _follow(self, thing: CaptureObject) -> None:
        since = self._followed_since.setdefault(thing.uid, self._clock())
        if thing.spec is None:
            self._refuse(thing, "Invalid", thing.mistake)
            return
        open_ranks = {rank.rank: rank for rank in thing.captured_ranks if not is_ended(rank)}
        answers = self._requests.progress(thing, by_node(open_ranks))
        reported = {node: answer for node, answer in answers.items() if isinstance(answer, pb.Capture)}
        ranks = updated_ranks(thing.captured_ranks, reported)
        for node, answer in answers.items():
            if isinstance(answer, str):
                ranks = failed_ranks(ranks, node, answer)
        if self._clock() - since > MAX_CAPTURE_SECONDS:
            for node in by_node(open_ranks):
                ranks = failed_ranks(ranks, node, f"nothing came of it in {MAX_CAPTURE_SECONDS / 60:.0f} minutes")
        after = summarised(structs.replace(thing.status, ranks=ranks))
        if after.phase != "Running":
            after = structs.replace(after, findings=self._findings(thing, reported))
            after = concluded(after, "", "", thing.generation, self._clock())
            self._audit.ended(thing, after)
        if after != thing.status:
            self._write(thing, after)

    def _findings(self, thing: CaptureObject, reported: Mapping[str, pb.Capture]) -> list[str]:
        """Of all nodes together: those that finished earlier are asked once more."""
        analysed = [rank for rank in thing.captured_ranks if rank.state == "analysed"]
        again = self._requests.progress(thing, by_node({r.rank: r for r in analysed if r.node not in reported}))
        every = {**reported, **{node: one for node, one in again.items() if isinstance(one, pb.Capture)}}
        return findings_of(every, self._policy_of(thing.job))

    def _refuse(self, thing: CaptureObject, reason: str, message: str, phase: CapturePhase = "Failed") -> None:
        status = structs.replace(thing.status, phase=phase)
        status = concluded(status, reason, message, thing.generation, self._clock())
        self._audit.ended(thing, status)
        self._write(thing, status)

    def _clear(self, thing: CaptureObject) -> None:
        """Cancels the capture, deletes its traces if requested, and removes the finalizer."""
        if thing.is_begun:
            if not self._requests.clear(thing):
                return  # tried again at the next pulse
            if not thing.is_finished:
                self._audit.ended(thing, thing.status, "Deleted")
        finalizers = [name for name in thing.finalizers if name != FINALIZER]
        self._api.merge(thing.path, {"metadata": {"finalizers": finalizers, "resourceVersion": thing.version}})

    def _write(self, thing: CaptureObject, status: CaptureStatus) -> CaptureObject:
        status = structs.replace(status, observed_generation=thing.generation)
        return self._taken(thing, self._writer.write_status(thing, status))

    def _taken(self, before: CaptureObject, document: Document) -> CaptureObject:
        """The written object is current, before the watch reports it. Unless the watch was faster: then it may have
        reported what came after, and a deletion is reported once."""
        thing = read_capture_object(document)
        assert thing is not None
        with self._lock:
            known = self._objects.get(thing.uid)
            if known is not None and known.version == before.version:
                self._objects[thing.uid] = thing
        return thing
