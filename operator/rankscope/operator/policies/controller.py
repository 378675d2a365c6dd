"""ProfilingPolicy objects put in force: a run has one at most, which sets its thresholds, brings rates to its daemons
and makes captures of what is found in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.operator.captures.automatic import NEVER, AutomaticCaptureMaker, captures_lately
from rankscope.operator.captures.capture_object import CaptureObject
from rankscope.operator.kube.api_client import Api
from rankscope.operator.kube.events import Events, Target
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.kube.object_writer import Outbox, Write
from rankscope.operator.kube.resources import (
    API_VERSION,
    AutomaticCaptures,
    Condition,
    ConditionStatus,
    DutyCycle,
    ProfilingPolicySpec,
    ProfilingPolicyStatus,
    Sampling,
)
from rankscope.operator.kube.watch_cache import Watched
from rankscope.operator.policies.policy import (
    PATH,
    Match,
    PolicyObject,
    by_namespace,
    match,
    mfu_target_of,
    read_policy_object,
    thresholds,
)
from rankscope.operator.policies.rates import PolicyPusher, Wanted
from rankscope.operator.runs.controller import RunsController, void
from rankscope.operator.runs.inventory import Inventory, Run
from rankscope.operator.runs.status import merged_conditions
from rankscope.v1.policy_service_pb2 import RunPolicy

# What a policy does, as its status. Pure.

NAMES_SHOWN = 3


def policy_status(
    policy: PolicyObject, runs: int, lost: Sequence[tuple[str, str]], captures_today: int, now_unix_seconds: float
) -> ProfilingPolicyStatus:
    """`lost` are runs that it selects and another policy of the same priority has: pairs of run and that policy."""
    conditions = [_accepted(policy), _conflict(lost)]
    automatic = policy.spec.automatic_captures if policy.spec is not None else UNSET
    if isinstance(automatic, AutomaticCaptures):
        conditions.append(_budget(automatic, captures_today))
    kept = {condition.type for condition in conditions}
    before = [condition for condition in policy.status.conditions if condition.type in kept]
    return ProfilingPolicyStatus(
        observed_generation=policy.generation,
        runs=runs,
        captures_today=captures_today if isinstance(automatic, AutomaticCaptures) else UNSET,
        conditions=merged_conditions(before, conditions, policy.generation, now_unix_seconds),
    )


def _accepted(policy: PolicyObject) -> Condition:
    if policy.spec is None:
        return _condition("Accepted", "False", "Invalid", policy.mistake)
    automatic = policy.spec.automatic_captures
    message = "the policy is in force"
    if isinstance(automatic, AutomaticCaptures):
        never = sorted(kind.value for kind in NEVER if kind in automatic.on)
        if never:
            message += f"; {', '.join(never)} in automaticCaptures.on causes no capture: there are no steps to record"
    return _condition("Accepted", "True", "InForce", message)


def _conflict(lost: Sequence[tuple[str, str]]) -> Condition:
    if not lost:
        return _condition("Conflict", "False", "NoRival", "no other policy of the same priority selects the same runs")
    runs = ", ".join(f"{run} (by {other})" for run, other in lost[:NAMES_SHOWN])
    more = f" and {len(lost) - NAMES_SHOWN} more" if len(lost) > NAMES_SHOWN else ""
    message = f"an older policy of the same priority has {runs}{more}; give them different priorities or selectors"
    return _condition("Conflict", "True", "SamePriority", message)


def _budget(automatic: AutomaticCaptures, captures_today: int) -> Condition:
    message = f"{captures_today} of {automatic.per_day} in the last 24 hours"
    if captures_today >= automatic.per_day:
        return _condition("CapturesLeft", "False", "BudgetSpent", message)
    return _condition("CapturesLeft", "True", "WithinBudget", message)


def _condition(type_: str, status: ConditionStatus, reason: str, message: str) -> Condition:
    return Condition(type=type_, status=status, reason=reason, message=message[:1024], last_transition_time="")


log = logging.getLogger(__name__)

# What tens of thousands of pods should have is not worked out with every pulse.
RATES_SECONDS = 5.0


@dataclass(frozen=True)
class Daemons:
    """The nodes as they are at this moment."""

    addresses: Mapping[str, str]
    connected: frozenset[str]


class PoliciesController:
    """`reconcile` is called about once a second, in one thread. `policy_of` may be asked from any."""

    def __init__(
        self,
        api: Api,
        outbox: Outbox,
        events: Events,
        inventory: Inventory,
        leases: ShardLeases,
        runs: RunsController,
        captures: AutomaticCaptureMaker,
        daemons: Callable[[], Daemons],
        pusher: Callable[[Callable[[str, str], None]], PolicyPusher],
        base: Policy,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._outbox = outbox
        self._events = events
        self._inventory = inventory
        self._leases = leases
        self._runs = runs
        self._captures = captures
        self._daemons = daemons
        self._base = base
        self._clock = clock
        self._pusher = pusher(self._tell_daemon)
        self._rated_at = 0.0
        self._thresholds: dict[str, Policy] = {}
        self._matches: dict[str, Match] = {}
        self.watched: Watched[PolicyObject] = Watched(api, f"{PATH}/profilingpolicies", read_policy_object, self)

    # --- told by the watch -------------------------------------------------------------------------------------------

    def changed(self, uid: str, policy: PolicyObject) -> None:
        """Everything is decided in `reconcile`, from what the watch keeps."""

    def deleted(self, uid: str) -> None:
        pass

    # --- asked -------------------------------------------------------------------------------------------------------

    def policy_of(self, job: str) -> Policy:
        """What a job of a run is judged by."""
        return self._thresholds.get(job.partition("#")[0], self._base)

    def mfu_target_of(self, job: str) -> float | None:
        return self.policy_of(job).mfu_target_ratio

    def stop(self) -> None:
        self._pusher.stop()

    # --- told by time ------------------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        if not self.watched.listed.is_set():
            return
        policies = by_namespace(self.watched.objects.values())
        # A workload made anew under the same name has the run's name: the newer pods count.
        ordered = sorted(self._inventory.runs().values(), key=lambda run: run.last_created)
        runs = {f"{run.key.namespace}/{run.key.object_name}": run for run in ordered}
        found = {name: match(policies.get(run.key.namespace, ()), run) for name, run in runs.items()}
        self._matches = {name: matched for name, matched in found.items() if matched is not None}
        self._set_thresholds(runs)
        daemons = self._daemons()
        self._pusher.forget_all_but(daemons.connected)
        if self._clock() - self._rated_at >= RATES_SECONDS:
            self._rated_at = self._clock()
            self._pusher.follow(self._rates(runs), daemons.addresses, daemons.connected, self._leases.keeps)
        holding = {name: matched.policy for name, matched in self._matches.items()}
        captures = self._captures.reconcile(holding)
        if captures is not None:
            self._write_statuses(policies, captures)

    def _set_thresholds(self, runs: Mapping[str, Run]) -> None:
        # Equal ones are one and the same object: jobs are compared in groups of it.
        known = {policy: policy for policy in self._thresholds.values()}
        by_wish: dict[tuple[str, float | None], Policy] = {}
        made: dict[str, Policy] = {}
        for name, run in runs.items():
            matched = self._matches.get(name)
            thing = self._runs.object_of(run.key.namespace, run.key.object_name)
            target = mfu_target_of(run) if thing is None or thing.mfu_target is None else thing.mfu_target
            if matched is None and target is None:
                continue
            wish = (matched.policy.uid if matched else "", target)
            if wish not in by_wish:
                policy = thresholds(self._base, matched.policy if matched else None, target)
                by_wish[wish] = known.setdefault(policy, policy)
            if by_wish[wish] is not self._base:
                made[name] = by_wish[wish]
        self._thresholds = made

    # --- rates -------------------------------------------------------------------------------------------------------

    def _rates(self, runs: Mapping[str, Run]) -> Wanted:
        wanted: dict[str, dict[str, RunPolicy]] = {}
        for name, matched in self._matches.items():
            spec = matched.policy.spec
            # Not `holds`: rates stay in force while the API server is away.
            if spec is None or not self._leases.keeps(name):
                continue
            if not isinstance(spec.sampling, Sampling) and not isinstance(spec.duty_cycle, DutyCycle):
                continue
            pods: dict[str, list[str]] = {}
            for pod in runs[name].live_pods:
                if pod.node:
                    pods.setdefault(pod.node, []).append(pod.uid)
            for node, uids in pods.items():
                wanted.setdefault(node, {})[name] = _rates_of(name, spec, sorted(uids))
        return wanted

    def _tell_daemon(self, run: str, note: str) -> None:
        matched = self._matches.get(run)
        log.info("policy of %s: %s", run, note)
        if matched is not None:
            policy = matched.policy
            target = Target(API_VERSION, "ProfilingPolicy", policy.namespace, policy.name, policy.uid)
            self._events.say(target, "Warning", "RatesNotTaken", note, note)

    # --- status ------------------------------------------------------------------------------------------------------

    def _write_statuses(self, policies: Mapping[str, list[PolicyObject]], captures: Sequence[CaptureObject]) -> None:
        runs: dict[str, int] = {}
        lost: dict[str, list[tuple[str, str]]] = {}
        for name, matched in sorted(self._matches.items()):
            runs[matched.policy.uid] = runs.get(matched.policy.uid, 0) + 1
            for rival in matched.rivals:
                lost.setdefault(rival.uid, []).append((name.partition("/")[2], matched.policy.name))
        now = self._clock()
        for policy in (policy for group in policies.values() for policy in group):
            if not self._leases.holds(f"{policy.namespace}/{policy.name}"):
                continue
            today = captures_lately(captures, policy, now)
            status = policy_status(policy, runs.get(policy.uid, 0), lost.get(policy.uid, []), today, now)
            if status != policy.status:
                self._write(policy, status)

    def _write(self, policy: PolicyObject, status: ProfilingPolicyStatus) -> None:
        content = msgspec.to_builtins(status)
        missing = {name: None for name in msgspec.to_builtins(policy.status) if name not in content}
        body = {"status": {**content, **missing}}
        path = f"{policy.path}/status"
        self._outbox.put(Write(f"policy {policy.uid}", body, lambda: void(self._api.merge(path, body))))


def _rates_of(name: str, spec: ProfilingPolicySpec, pods: list[str]) -> RunPolicy:
    rates = RunPolicy(run=name, pods=pods)
    if isinstance(spec.sampling, Sampling) and isinstance(spec.sampling.stack_rate_hertz, float):
        rates.stack_rate_hertz = spec.sampling.stack_rate_hertz
    if isinstance(spec.duty_cycle, DutyCycle):
        rates.duty_cycle_steps = spec.duty_cycle.steps
        rates.duty_cycle_seconds = spec.duty_cycle.every_seconds
    return rates
