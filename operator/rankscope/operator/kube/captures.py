"""Capture objects carried out: planned once, asked of the daemons, followed to their end, whoever restarts in between.

What was decided is written to the object before any daemon is asked, under the version that was read, and the capture's
id is the object's own: a second operator, or the same one after a restart, asks for the very same capture."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import structs

from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.kube.api import Api, ApiError, ConflictError, Document, MissingError, UnreachableError
from rankscope.operator.kube.capture_calls import DaemonAwayError, DaemonCalls, DaemonRefusedError
from rankscope.operator.kube.capture_objects import FINALIZER, PATH, CaptureObject, read_capture_object
from rankscope.operator.kube.capture_planning import START_AHEAD_SECONDS, PlanError, by_node, plan
from rankscope.operator.kube.capture_status import failed_ranks, is_ended, summarised, told_ranks
from rankscope.operator.kube.electing import ShardLeases
from rankscope.operator.kube.resources import CapturePhase, CaptureSpec, CaptureStatus, Condition
from rankscope.operator.kube.run_status import merged_conditions, moment, unix_seconds
from rankscope.operator.kube.watching import Watched
from rankscope.v1 import capture_service_pb2 as pb

log = logging.getLogger(__name__)

WORKERS = 16
RUNNING_LIMIT = 32
RANKS_LIMIT = 64
# How long a daemon may be away before its ranks are given up, and how long a deletion waits for it.
AWAY_SECONDS = 120.0
# A start that is nearer than this is not asked for any more: the daemon would refuse it.
LAST_CALL_SECONDS = 4.0
# Between a capture's start and its last word: recording, writing, cutting, uploading.
LONGEST_SECONDS = 1800.0


class CapturesController:
    """`reconcile` is called about once a second; the work is done in threads, one at a time for each capture."""

    def __init__(
        self,
        api: Api,
        leases: ShardLeases,
        calls: DaemonCalls,
        states: Callable[[], Mapping[str, JobState]],
        addresses: Callable[[], Mapping[str, str]],
        daemon_job: Callable[[str], str | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._leases = leases
        self._calls = calls
        self._states = states
        self._addresses = addresses
        self._daemon_job = daemon_job
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, CaptureObject] = {}  # by uid
        self._busy: set[str] = set()
        self._away_since: dict[tuple[str, str], float] = {}  # uid, node
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="rankscope-captures")
        self.watched = Watched(api, f"{PATH}/captures", read_capture_object, self)

    def changed(self, uid: str, thing: CaptureObject) -> None:
        with self._lock:
            self._objects[uid] = thing

    def deleted(self, uid: str) -> None:
        with self._lock:
            self._objects.pop(uid, None)
            for key in [key for key in self._away_since if key[0] == uid]:
                del self._away_since[key]

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def reconcile(self) -> None:
        with self._lock:
            idle = [thing for uid, thing in self._objects.items() if uid not in self._busy]
        for thing in idle:
            if self._holds(thing) and self._is_due(thing):
                with self._lock:
                    self._busy.add(thing.uid)
                self._pool.submit(self._attend_safely, thing)

    def _holds(self, thing: CaptureObject) -> bool:
        run = thing.spec.run if thing.spec is not None else thing.name
        return self._leases.holds(f"{thing.namespace}/{run}")

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
            pass  # changed or gone meanwhile: the watch brings what is now
        except UnreachableError as error:
            log.debug("capture %s/%s waits: %s", thing.namespace, thing.name, error)
        except ApiError as error:
            log.warning("capture %s/%s: %s", thing.namespace, thing.name, error)
        except Exception:
            log.exception("capture %s/%s", thing.namespace, thing.name)
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

    # --- beginning ---------------------------------------------------------------------------------------------------

    def _begin(self, thing: CaptureObject) -> None:
        if thing.spec is None:
            self._refuse(thing, "Invalid", thing.mistake)
            return
        ahead = self._ahead_of(thing)
        if ahead is not None:
            if thing.status.message != ahead:
                self._write(thing, structs.replace(thing.status, phase="Pending", message=ahead))
            return
        run = f"{thing.namespace}/{thing.spec.run}"
        try:
            planned = plan(thing.spec, thing.spec.run, self._states().get(run), self._daemon_job(run), RANKS_LIMIT)
        except PlanError as error:
            self._refuse(thing, error.reason, str(error))
            return
        if FINALIZER not in thing.finalizers:
            metadata = {"finalizers": [*thing.finalizers, FINALIZER], "resourceVersion": thing.version}
            thing = self._taken(self._api.merge(thing.path, {"metadata": metadata}))
        now = self._clock()
        status = structs.replace(
            thing.status,
            phase="Running",
            message="",
            job=planned.job[:256],
            capture_id=f"k-{thing.uid}",
            start_unix_ms=round((now + START_AHEAD_SECONDS) * 1000),
            started_at=moment(now),
            ranks=list(planned.ranks),
            delivered=f"0/{len(planned.ranks)}",
        )
        begun = self._write(thing, status)
        self._follow(begun)

    def _ahead_of(self, thing: CaptureObject) -> str | None:
        """Why it has to wait: one capture of a run at a time, and so many of the fleet."""
        assert thing.spec is not None
        with self._lock:
            running = [known for known in self._objects.values() if known.is_begun and not known.is_finished]
        for other in running:
            if other.spec is not None and (other.namespace, other.spec.run) == (thing.namespace, thing.spec.run):
                return f"waits for capture {other.name} of the same run"
        return f"waits: {RUNNING_LIMIT} captures are under way" if len(running) >= RUNNING_LIMIT else None

    # --- following ---------------------------------------------------------------------------------------------------

    def _follow(self, thing: CaptureObject) -> None:
        status, spec = thing.status, thing.spec
        assert spec is not None and isinstance(status.capture_id, str) and isinstance(status.start_unix_ms, int)
        told: dict[str, pb.Capture] = {}
        ranks = list(status.ranks)
        open_ranks = {rank.rank: rank for rank in ranks if not is_ended(rank)}
        for node, numbers in by_node(open_ranks).items():
            try:
                told[node] = self._ask(thing, spec, node, numbers)
                self._away_since.pop((thing.uid, node), None)
            except DaemonRefusedError as error:
                ranks = failed_ranks(ranks, node, str(error))
            except DaemonAwayError as error:
                since = self._away_since.setdefault((thing.uid, node), self._clock())
                if self._clock() - since > AWAY_SECONDS:
                    ranks = failed_ranks(ranks, node, f"the daemon of {node} is away: {error}")
        if self._clock() - status.start_unix_ms / 1000 > LONGEST_SECONDS:
            for node in by_node(open_ranks):
                ranks = failed_ranks(ranks, node, f"nothing came of it in {LONGEST_SECONDS / 60:.0f} minutes")
        after = summarised(structs.replace(status, ranks=told_ranks(ranks, told)), told)
        if after.phase != "Running":
            after = self._finished(thing, after)
        if after != status:
            self._write(thing, after)

    def _ask(self, thing: CaptureObject, spec: CaptureSpec, node: str, numbers: list[int]) -> pb.Capture:
        status = thing.status
        assert isinstance(status.capture_id, str) and isinstance(status.start_unix_ms, int)
        address = self._addresses().get(node)
        if address is None:
            raise DaemonAwayError("there is no daemon on this node")
        known = self._calls.get(address, status.capture_id)
        if known is not None:
            return known
        if self._clock() > status.start_unix_ms / 1000 - LAST_CALL_SECONDS:
            raise DaemonRefusedError("the daemon does not know of it: it was restarted before, or asked too late")
        why = spec.reason if isinstance(spec.reason, str) else ""
        why = f"Capture {thing.namespace}/{thing.name}" + (f": {why}" if why else "")
        job = status.job if isinstance(status.job, str) else ""
        return self._calls.start(address, status.capture_id, job, numbers, spec, status.start_unix_ms, why)

    def _finished(self, thing: CaptureObject, status: CaptureStatus) -> CaptureStatus:
        now = self._clock()
        errors = dict.fromkeys(str(rank.error) for rank in status.ranks if isinstance(rank.error, str))
        message = "; ".join(errors)[:1000]
        reason = {"Succeeded": "Delivered", "Cancelled": "Cancelled"}.get(str(status.phase), "RanksFailed")
        return self._concluded(thing, status, reason, message, now)

    def _refuse(self, thing: CaptureObject, reason: str, message: str) -> None:
        failed: CapturePhase = "Failed"
        status = structs.replace(thing.status, phase=failed)
        self._write(thing, self._concluded(thing, status, reason, message, self._clock()))

    def _concluded(
        self, thing: CaptureObject, status: CaptureStatus, reason: str, message: str, now: float
    ) -> CaptureStatus:
        done = Condition(
            type="Complete",
            status="True" if status.phase == "Succeeded" else "False",
            reason=reason,
            message=message or f"{status.delivered} ranks delivered",
            last_transition_time="",
        )
        conditions = merged_conditions(status.conditions, [done], thing.generation, now)
        return structs.replace(status, message=message, finished_at=moment(now), conditions=conditions)

    # --- ending ------------------------------------------------------------------------------------------------------

    def _clear(self, thing: CaptureObject) -> None:
        """Cancel what runs, remove the traces if that was asked, and let the object go."""
        capture_id = thing.status.capture_id
        if isinstance(capture_id, str):
            nodes = {rank.node: rank for rank in thing.status.ranks if isinstance(rank.node, str)}
            for node in nodes:
                if not self._is_cleared(thing, str(node), capture_id):
                    return  # asked again at the next pulse
        finalizers = [name for name in thing.finalizers if name != FINALIZER]
        self._api.merge(thing.path, {"metadata": {"finalizers": finalizers, "resourceVersion": thing.version}})

    def _is_cleared(self, thing: CaptureObject, node: str, capture_id: str) -> bool:
        address = self._addresses().get(node)
        try:
            if address is None:
                raise DaemonAwayError("there is no daemon on this node")
            if not thing.is_finished:
                self._calls.cancel(address, capture_id)
            if thing.spec is not None and thing.spec.delete_artifacts:
                self._calls.delete(address, capture_id)
        except DaemonAwayError as error:
            since = self._away_since.setdefault((thing.uid, node), self._clock())
            if self._clock() - since < AWAY_SECONDS:
                return False
            log.warning("capture %s/%s: traces may be left on %s: %s", thing.namespace, thing.name, node, error)
        except DaemonRefusedError as error:
            log.warning("capture %s/%s: %s: %s", thing.namespace, thing.name, node, error)
        return True

    # --- writing -----------------------------------------------------------------------------------------------------

    def _write(self, thing: CaptureObject, status: CaptureStatus) -> CaptureObject:
        status = structs.replace(status, observed_generation=thing.generation)
        content = msgspec.to_builtins(status)
        missing = {name: None for name in msgspec.to_builtins(thing.status) if name not in content}
        body = {"metadata": {"resourceVersion": thing.version}, "status": {**content, **missing}}
        return self._taken(self._api.merge(f"{thing.path}/status", body))

    def _taken(self, document: Document) -> CaptureObject:
        """What we have just written is what holds, before the watch says so."""
        thing = read_capture_object(document)
        assert thing is not None
        with self._lock:
            if thing.uid in self._objects:
                self._objects[thing.uid] = thing
        return thing
