"""Controller of ProfilingPolicy objects: a run has at most one policy, which sets its thresholds, the sampling rates of
its daemons and the automatic captures. The daemons get the names of all runs with the rates."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import grpc
from msgspec import UNSET

from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.operator.captures.automatic import NEVER, AutomaticCaptureMaker, captures_today
from rankscope.operator.kube.api_client import Api
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.kube.object_writer import Events, ObjectWriter, Target
from rankscope.operator.kube.objects import (
    CaptureObject,
    PolicyObject,
    collection,
    condition,
    merged_conditions,
    read_policy_object,
)
from rankscope.operator.kube.resources import (
    API_VERSION,
    AutomaticCaptures,
    Condition,
    DutyCycle,
    ProfilingPolicySpec,
    ProfilingPolicyStatus,
    Sampling,
)
from rankscope.operator.kube.watch_cache import Watched
from rankscope.operator.policies.policy import (
    MAX_POLICIES,
    Match,
    RunThresholds,
    by_namespace,
    match,
    mfu_target_of,
    thresholds,
)
from rankscope.operator.policies.rates import PolicyPusher, Wanted
from rankscope.operator.runs.controller import RunsController
from rankscope.operator.runs.inventory import Inventory, Run
from rankscope.v1.policy_service_pb2 import RunPolicy

NAMES_SHOWN = 3
TOO_MANY = f"the namespace has more than {MAX_POLICIES} policies, of which those of the highest priority are in force"


def policy_status(
    policy: PolicyObject, runs: int, lost: Sequence[tuple[str, str]], captures_today: int, now_unix_seconds: float
) -> ProfilingPolicyStatus:
    """`lost` are selected runs that another policy of the same priority has: pairs of run and that policy."""
    conditions = [_accepted(policy), _conflict(lost)]
    automatic = policy.spec.automatic_captures if policy.spec is not None else UNSET
    if isinstance(automatic, AutomaticCaptures):
        conditions.append(_budget(automatic, captures_today))
    kept = {each.type for each in conditions}
    before = [each for each in policy.status.conditions if each.type in kept]
    return ProfilingPolicyStatus(
        observed_generation=policy.generation,
        runs=runs,
        captures_today=captures_today if isinstance(automatic, AutomaticCaptures) else UNSET,
        conditions=merged_conditions(before, conditions, policy.generation, now_unix_seconds),
    )


def _accepted(policy: PolicyObject) -> Condition:
    if policy.spec is None:
        return condition("Accepted", "False", "Invalid", policy.mistake)
    automatic = policy.spec.automatic_captures
    message = "the policy is in force"
    if isinstance(automatic, AutomaticCaptures):
        never = sorted(kind.value for kind in NEVER if kind in automatic.on)
        if never:
            message += f"; {', '.join(never)} in automaticCaptures.on causes no capture: there are no steps to record"
    return condition("Accepted", "True", "InForce", message)


def _conflict(lost: Sequence[tuple[str, str]]) -> Condition:
    if not lost:
        return condition("Conflict", "False", "NoRival", "no other policy of the same priority selects the same runs")
    runs = ", ".join(f"{run} (by {other})" for run, other in lost[:NAMES_SHOWN])
    more = f" and {len(lost) - NAMES_SHOWN} more" if len(lost) > NAMES_SHOWN else ""
    message = f"an older policy of the same priority has {runs}{more}; give them different priorities or selectors"
    return condition("Conflict", "True", "SamePriority", message)


def _budget(automatic: AutomaticCaptures, captures_today: int) -> Condition:
    message = f"{captures_today} of {automatic.per_day} in the last 24 hours"
    if captures_today >= automatic.per_day:
        return condition("CapturesLeft", "False", "BudgetSpent", message)
    return condition("CapturesLeft", "True", "WithinBudget", message)


log = logging.getLogger(__name__)

# The entries of tens of thousands of pods are too expensive for every pulse.
PUSH_SECONDS = 3.0


class PoliciesController:
    """`reconcile` is called about once a second, in one thread. `addresses` and `connected` are the daemons at this
    moment: node to HOST:PORT, and the nodes whose windows arrive with the number of their connection."""

    def __init__(
        self,
        api: Api,
        writer: ObjectWriter,
        events: Events,
        inventory: Inventory,
        leases: ShardLeases,
        runs: RunsController,
        captures: AutomaticCaptureMaker,
        thresholds: RunThresholds,
        channel: Callable[[str], grpc.Channel],
        addresses: Callable[[], Mapping[str, str]],
        connected: Callable[[], Mapping[str, int]],
    ) -> None:
        self._writer = writer
        self._events = events
        self._inventory = inventory
        self._leases = leases
        self._runs = runs
        self._captures = captures
        self._thresholds = thresholds
        self._addresses = addresses
        self._connected = connected
        self._pusher = PolicyPusher(channel, self._report_refusal)
        self._pushed_at = 0.0
        self._matches: dict[str, Match] = {}
        self.watched: Watched[PolicyObject] = Watched(api, collection(PolicyObject.plural), read_policy_object)

    def stop(self) -> None:
        self._pusher.stop()

    def reconcile(self) -> None:
        if not self.watched.listed.is_set():
            return
        policies = by_namespace(self.watched.objects.values())
        # A new workload with the name of an old one has the run's name: the newer pods count.
        ordered = sorted(self._inventory.runs().values(), key=lambda run: run.last_created)
        runs = {run.key.full_name: run for run in ordered}
        in_force = {namespace: group[:MAX_POLICIES] for namespace, group in policies.items()}
        found = {name: match(in_force.get(run.key.namespace, ()), run) for name, run in runs.items()}
        self._matches = {name: matched for name, matched in found.items() if matched is not None}
        self._set_thresholds(runs)
        connected = self._connected()
        self._pusher.forget_interrupted(connected)
        if time.time() - self._pushed_at >= PUSH_SECONDS:
            self._pushed_at = time.time()
            self._pusher.follow(self._entries(runs), self._addresses(), connected.keys(), self._leases.keeps)
        holding = {name: matched.policy for name, matched in self._matches.items()}
        captures = self._captures.reconcile(holding)
        if captures is not None:
            self._write_statuses(policies, captures)

    def _set_thresholds(self, runs: Mapping[str, Run]) -> None:
        base = self._thresholds.base
        made: dict[tuple[str, float | None], Policy] = {}  # by policy and MFU target
        of_runs: dict[str, Policy] = {}
        for name, run in runs.items():
            matched = self._matches.get(name)
            thing = self._runs.object_of(run.key.namespace, run.key.object_name)
            target = mfu_target_of(run) if thing is None or thing.mfu_target is None else thing.mfu_target
            if matched is None and target is None:
                continue
            key = (matched.policy.uid if matched else "", target)
            if key not in made:
                made[key] = thresholds(base, matched.policy if matched else None, target)
            of_runs[name] = made[key]
        self._thresholds.set(of_runs)

    def _entries(self, runs: Mapping[str, Run]) -> Wanted:
        """For every node with pods of a run: the run's name and attempt, and the rates of its policy."""
        wanted: dict[str, dict[str, RunPolicy]] = {}
        for name, run in runs.items():
            # Not `holds`: names and rates stay in force while the API server is away.
            if not self._leases.keeps(name):
                continue
            matched = self._matches.get(name)
            spec = None if matched is None else matched.policy.spec
            pods: dict[str, list[str]] = {}
            for pod in run.live_pods:
                if pod.node:
                    pods.setdefault(pod.node, []).append(pod.uid)
            thing = self._runs.object_of(run.key.namespace, run.key.object_name)
            attempt = 0 if thing is None or not isinstance(thing.status.attempt, int) else thing.status.attempt
            for node, uids in pods.items():
                entry = RunPolicy(run=name, pods=sorted(uids), attempt=attempt)
                if spec is not None:
                    _add_rates(entry, spec)
                wanted.setdefault(node, {})[name] = entry
        return wanted

    def _report_refusal(self, run: str, note: str) -> None:
        matched = self._matches.get(run)
        log.info("policy of %s: %s", run, note)
        if matched is not None:
            policy = matched.policy
            target = Target(API_VERSION, "ProfilingPolicy", policy.namespace, policy.name, policy.uid)
            self._events.emit(target, "Warning", "RatesNotTaken", note, note)

    def _write_statuses(self, policies: Mapping[str, list[PolicyObject]], captures: Sequence[CaptureObject]) -> None:
        runs: dict[str, int] = {}
        lost: dict[str, list[tuple[str, str]]] = {}
        for name, matched in sorted(self._matches.items()):
            runs[matched.policy.uid] = runs.get(matched.policy.uid, 0) + 1
            for rival in matched.rivals:
                lost.setdefault(rival.uid, []).append((name.partition("/")[2], matched.policy.name))
        now = time.time()
        today = captures_today(captures, now)
        for group in policies.values():
            for number, policy in enumerate(group[: 2 * MAX_POLICIES]):
                if number >= MAX_POLICIES:
                    policy = replace(policy, spec=None, mistake=TOO_MANY)
                if not self._leases.holds(policy.place):
                    continue
                made = today[policy.namespace, policy.name]
                status = policy_status(policy, runs.get(policy.uid, 0), lost.get(policy.uid, []), made, now)
                if status != policy.status:
                    self._writer.queue_status(policy, status)


def _add_rates(entry: RunPolicy, spec: ProfilingPolicySpec) -> None:
    if isinstance(spec.sampling, Sampling) and isinstance(spec.sampling.stack_rate_hertz, float):
        entry.stack_rate_hertz = spec.sampling.stack_rate_hertz
    if isinstance(spec.duty_cycle, DutyCycle):
        entry.duty_cycle_steps = spec.duty_cycle.steps
        entry.duty_cycle_seconds = spec.duty_cycle.every_seconds
