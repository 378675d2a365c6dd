"""What the operator says of the runs on this node: the names of their ranks, by pod, and the rates that policies set.

Rates hold on lease and within the daemon's own bounds: an operator that is gone, or a policy that asks for too much,
must not leave a node sampling harder than its owner said. A name holds until the operator withdraws it: a run keeps its
name while the operator is away."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grpc

from rankscope.common.text import printable
from rankscope.daemon.samples import PodRun, RankKey, RankProcess
from rankscope.daemon.server.grpc_server import Service, abort
from rankscope.daemon.windows.window import NAME_CHARACTERS
from rankscope.v1 import policy_service_pb2 as pb
from rankscope.v1 import policy_service_pb2_grpc
from rankscope.v1.policy_service_pb2 import ApplyPoliciesRequest, HeldPolicy, RunPolicy

log = logging.getLogger(__name__)

MAX_RUNS = 1024
MAX_PODS = 1024
MAX_NAMED_PODS = 4096  # of all runs; a kubelet runs some hundreds
TEXT_CHARACTERS = 512
MIN_LEASE_SECONDS, MAX_LEASE_SECONDS = 5.0, 3600.0
# As the daemon's own settings allow.
MAX_RATE_HERTZ = 100.0
MAX_DUTY_STEPS = 100
DUTY_SECONDS = (60.0, 86400.0)
MAX_NOTES = 32


class BadPolicyError(ValueError):
    """The request as a whole makes no sense; nothing of it was taken."""


@dataclass(frozen=True)
class PolicyDutyCycle:
    steps: int
    period_seconds: float


@dataclass(frozen=True)
class _Held:
    policy: RunPolicy  # within bounds
    until_seconds: float


class PolicyBoard:
    """All methods may be called from any thread. `base_hertz` is the daemon's own stack rate, 0 where it is off."""

    def __init__(self, base_hertz: float, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._base_hertz = base_hertz
        self._monotonic_seconds = monotonic_seconds
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._runs: dict[str, PodRun] = {}  # by pod

    def run_of_pod(self, uid: str) -> PodRun | None:
        with self._lock:
            return self._runs.get(uid)

    def apply(self, request: ApplyPoliciesRequest) -> list[str]:
        """What was not taken as it was asked for."""
        lease = request.lease_seconds
        if not MIN_LEASE_SECONDS <= lease <= MAX_LEASE_SECONDS:
            raise BadPolicyError(f"a lease of {lease:g} s; from {MIN_LEASE_SECONDS:g} to {MAX_LEASE_SECONDS:g}")
        notes: list[str] = []
        until = self._monotonic_seconds() + lease
        with self._lock:
            self._forget_expired()
            for policy in request.policies:
                run = policy.run[:TEXT_CHARACTERS]
                notes.extend(self._name_pods(policy))
                if not policy.pods or not _has_rates(policy):
                    if self._held.pop(run, None) is not None:
                        log.info("policy of %r: withdrawn", run[:128])
                elif run not in self._held and len(self._held) >= MAX_RUNS:
                    notes.append(f"{run[:128]}: this node keeps policies of {MAX_RUNS} runs at most")
                else:
                    kept = _bounded(policy, self._base_hertz, notes)
                    before = self._held.get(run)
                    if before is None or before.policy != kept:
                        log.info("policy of %r: %s", run[:128], _told(kept))
                    self._held[run] = _Held(kept, until)
        return notes[:MAX_NOTES]

    def _name_pods(self, policy: RunPolicy) -> list[str]:
        """Replaces the pods of the run. The oldest are forgotten first where there are too many."""
        namespace, _, run = policy.run.partition("/")
        if not (namespace and run and printable(policy.run, NAME_CHARACTERS) == policy.run):
            return [f"{printable(policy.run, 128)}: not the name of a run; it is NAMESPACE/RUN"]
        named = PodRun(policy.run, policy.attempt)
        runs = {uid: known for uid, known in self._runs.items() if known.name != named.name}
        runs |= {uid[:TEXT_CHARACTERS]: named for uid in policy.pods[:MAX_PODS]}
        self._runs = dict(list(runs.items())[-MAX_NAMED_PODS:])
        return []

    def held(self) -> list[HeldPolicy]:
        with self._lock:
            self._forget_expired()
            now = self._monotonic_seconds()
            return [
                HeldPolicy(policy=held.policy, lease_left_seconds=held.until_seconds - now)
                for held in self._held.values()
            ]

    def stack_rates(self, ranks: Sequence[RankProcess], budget_hertz: float) -> dict[RankKey, float]:
        """Of the ranks that a policy gives a rate of their own. `budget_hertz` is what the budget leaves of the
        daemon's own rate: once it has to save, nobody has more than the daemon's own, and all are lowered alike."""
        by_pod = self._by_pod()
        if not by_pod or self._base_hertz <= 0:
            return {}
        rates = {}
        for rank in ranks:
            policy = by_pod.get(rank.pod or "")
            if policy is not None and policy.HasField("stack_rate_hertz"):
                asked = policy.stack_rate_hertz
                if budget_hertz < self._base_hertz:
                    asked = min(asked, self._base_hertz) * budget_hertz / self._base_hertz
                rates[rank.key] = asked
        return rates

    def duty_cycle_of_policy(self, ranks: Sequence[RankProcess]) -> PolicyDutyCycle | None:
        """For the ranks of one job: None leaves it to the daemon's own settings."""
        by_pod = self._by_pod()
        for rank in ranks if by_pod else ():
            policy = by_pod.get(rank.pod or "")
            if policy is not None and policy.HasField("duty_cycle_steps"):
                return PolicyDutyCycle(policy.duty_cycle_steps, policy.duty_cycle_seconds)
        return None

    def _by_pod(self) -> Mapping[str, RunPolicy]:
        with self._lock:
            if not self._held:
                return {}
            self._forget_expired()
            return {pod: held.policy for held in self._held.values() for pod in held.policy.pods}

    def _forget_expired(self) -> None:
        now = self._monotonic_seconds()
        for run in [run for run, held in self._held.items() if held.until_seconds <= now]:
            del self._held[run]
            log.warning("policy of %r: the operator has gone silent; the daemon's own settings hold again", run[:128])


def _bounded(policy: RunPolicy, base_hertz: float, notes: list[str]) -> RunPolicy:
    run = policy.run[:TEXT_CHARACTERS]
    kept = RunPolicy(run=run, pods=[pod[:TEXT_CHARACTERS] for pod in policy.pods[:MAX_PODS]])
    if policy.HasField("stack_rate_hertz"):
        if base_hertz <= 0:
            notes.append(f"{run[:128]}: stacks are off on this node by its own configuration (stack_rate_hertz)")
        else:
            kept.stack_rate_hertz = _clamped(policy.stack_rate_hertz, 0.0, MAX_RATE_HERTZ, f"{run[:128]}: Hz", notes)
    if policy.HasField("duty_cycle_steps"):
        kept.duty_cycle_steps = min(policy.duty_cycle_steps, MAX_DUTY_STEPS)
        seconds = policy.duty_cycle_seconds
        kept.duty_cycle_seconds = _clamped(seconds, *DUTY_SECONDS, f"{run[:128]}: seconds of the duty cycle", notes)
    return kept


def _has_rates(policy: RunPolicy) -> bool:
    return policy.HasField("stack_rate_hertz") or policy.HasField("duty_cycle_steps")


def _clamped(value: float, low: float, high: float, what: str, notes: list[str]) -> float:
    kept = min(high, max(low, value)) if math.isfinite(value) else low
    if kept != value:
        notes.append(f"{what}: {value:g} is not between {low:g} and {high:g}; {kept:g} holds")
    return kept


def _told(policy: RunPolicy) -> str:
    parts = []
    if policy.HasField("stack_rate_hertz"):
        parts.append(f"stacks at {policy.stack_rate_hertz:g} Hz")
    if policy.HasField("duty_cycle_steps"):
        parts.append(f"{policy.duty_cycle_steps} steps every {policy.duty_cycle_seconds:g} s")
    return f"{', '.join(parts) or 'nothing of its own'} in {len(policy.pods)} pods"


# PolicyService over gRPC.


class PolicyServicer(policy_service_pb2_grpc.PolicyServiceServicer):
    def __init__(self, board: PolicyBoard) -> None:
        self._board = board

    def ApplyPolicies(
        self, request: pb.ApplyPoliciesRequest, context: grpc.ServicerContext
    ) -> pb.ApplyPoliciesResponse:
        try:
            return pb.ApplyPoliciesResponse(notes=self._board.apply(request))
        except BadPolicyError as error:
            abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def ListPolicies(self, request: pb.ListPoliciesRequest, context: grpc.ServicerContext) -> pb.ListPoliciesResponse:
        return pb.ListPoliciesResponse(policies=self._board.held())


def policy_service(board: PolicyBoard) -> Service:
    add = policy_service_pb2_grpc.add_PolicyServiceServicer_to_server
    return Service.of("PolicyService", add, PolicyServicer(board))
