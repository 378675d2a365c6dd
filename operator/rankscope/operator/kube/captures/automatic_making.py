"""Captures made by themselves when a policy wants them. What may be made is decided in automatic_captures."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from rankscope.analysis.verdict import Kind
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.kube import resources
from rankscope.operator.kube.api import Api, ApiError, ConflictError, Document, UnreachableError
from rankscope.operator.kube.captures import automatic as rules
from rankscope.operator.kube.captures.objects import PATH, CaptureObject, read_capture_object
from rankscope.operator.kube.electing import ShardLeases
from rankscope.operator.kube.events import Events, Target
from rankscope.operator.kube.policies.objects import PolicyObject
from rankscope.operator.kube.runs.controlling import RunObject, RunsController
from rankscope.operator.kube.watching import Watched

log = logging.getLogger(__name__)

WORKERS = 4
# What was made and then deleted before the watch told of it is forgotten after this.
UNSEEN_SECONDS = 60.0
REMEMBERED_RUNS = 10_000


class AutomaticCaptures:
    """`reconcile` is called about once a second, in one thread; objects are made in others, one at a time
    of a policy."""

    def __init__(
        self,
        api: Api,
        events: Events,
        leases: ShardLeases,
        runs: RunsController,
        watched: Watched[CaptureObject],
        states: Callable[[], Mapping[str, JobState]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._events = events
        self._leases = leases
        self._runs = runs
        self._watched = watched
        self._states = states
        self._clock = clock
        self._recovered: dict[str, float] = {}  # run to when it was last seen healthy for a while
        self._lock = threading.Lock()
        self._unseen: dict[str, CaptureObject] = {}  # made, and not yet in the watch
        self._past: dict[str, rules.Past] = {}  # by the run's uid; its object may have been deleted
        self._busy: set[str] = set()  # uids of policies
        self._told: dict[str, str] = {}  # job to why nothing is made, so that the log says it once
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="rankscope-automatic")

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def reconcile(self, policies: Mapping[str, PolicyObject]) -> Sequence[CaptureObject] | None:
        """`policies` is run to the policy that holds. Returns all captures there are; None while they are not known."""
        if not self._watched.listed.is_set() or not self._runs.watched.listed.is_set():
            return None
        now, states = self._clock(), self._states()
        self._note_recoveries(states, now)
        self._told = {job: told for job, told in self._told.items() if job in states}
        jobs: dict[str, list[JobState]] = {}
        for job in sorted(states):
            jobs.setdefault(job.partition("#")[0], []).append(states[job])
        for name, policy in policies.items():
            wish = policy.spec.automatic_captures if policy.spec is not None else None
            if isinstance(wish, resources.AutomaticCaptures) and name in jobs and self._leases.holds(name):
                for state in jobs[name]:
                    self._consider(name, policy, wish, state, now)
        return self.known()

    def known(self) -> list[CaptureObject]:
        """Those that the watch tells of and those just made."""
        seen, now = self._watched.objects, self._clock()
        with self._lock:
            self._unseen = {
                uid: capture
                for uid, capture in self._unseen.items()
                if uid not in seen and now - capture.created_unix_seconds < UNSEEN_SECONDS
            }
            return [*seen.values(), *self._unseen.values()]

    def _note_recoveries(self, states: Mapping[str, JobState], now: float) -> None:
        self._recovered = {name: at for name, at in self._recovered.items() if name in states}
        for name, state in states.items():
            is_well = state.verdict.kind is Kind.HEALTHY
            if is_well and now - state.since_unix_seconds > rules.RECOVERED_SECONDS:
                self._recovered[name] = now

    def _consider(
        self,
        name: str,
        policy: PolicyObject,
        wish: resources.AutomaticCaptures,
        state: JobState,
        now: float,
    ) -> None:
        namespace, _, run_name = name.partition("/")
        run = self._runs.object_of(namespace, run_name)
        if not rules.wants_capture(wish, state) or run is None or run.deleting:
            self._told.pop(state.job, None)
            return
        with self._lock:
            if policy.uid in self._busy:
                return  # what comes of it counts for the next
            past = self._past.get(run.uid)
        captures = self.known()  # after that: what another run's has become since this round began counts too
        of_run = [c for c in captures if c.namespace == namespace and c.spec is not None and c.spec.run == run_name]
        finding, ranks = rules.finding_of(state), rules.chosen_ranks(state)
        objection = rules.objection(wish, policy, finding, of_run, captures, past, self._recovered.get(state.job), now)
        if objection is None and not ranks:
            objection = "no rank of the run reports"
        if objection is not None:
            news = f"{finding}: {objection.partition(';')[0]}"  # how many seconds are left is none
            if self._told.get(state.job) != news:
                self._told[state.job] = news
                log.info("%s: %s: no capture by policy %s: %s", name, finding, policy.name, objection)
            return
        body = rules.capture_body(rules.capture_name(run, of_run), run, policy, wish, state, ranks)
        with self._lock:
            self._busy.add(policy.uid)
        self._pool.submit(self._make, run, policy, body, rules.Past(now, finding))

    def _make(self, run: RunObject, policy: PolicyObject, body: Document, past: rules.Past) -> None:
        name, capture = f"{run.namespace}/{run.name}", body["metadata"]["name"]
        try:
            self.create(run, body, past)
        except ConflictError:
            log.info("%s: capture %s was made already", name, capture)
        except UnreachableError as error:
            log.debug("%s: capture %s waits: %s", name, capture, error)
        except ApiError as error:
            # Asked again at once it would be refused again: by a role or a quota that somebody has to mend.
            self._remember(run, past)
            log.warning("%s: capture %s cannot be made: %s", name, capture, error)
        except Exception:
            log.exception("%s: capture %s", name, capture)
        else:
            text = f"policy {policy.name}: capture {capture} of ranks {body['spec']['ranks']} for {past.finding}"
            target = Target(resources.API_VERSION, "TrainingRun", run.namespace, run.name, run.uid)
            self._events.say(target, "Normal", "CaptureStarted", text, capture)
        finally:
            with self._lock:
                self._busy.discard(policy.uid)

    def create(self, run: RunObject, body: Document, past: rules.Past) -> None:
        """From any thread. It counts against the limits from now on."""
        made = read_capture_object(self._api.create(f"{PATH}/namespaces/{run.namespace}/captures", body))
        assert made is not None
        with self._lock:
            self._unseen[made.uid] = made
        self._remember(run, past)

    def _remember(self, run: RunObject, past: rules.Past) -> None:
        with self._lock:
            self._past[run.uid] = past
            while len(self._past) > REMEMBERED_RUNS:
                del self._past[next(iter(self._past))]
