"""What a policy does, as its status. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from rankscope.operator.kube.captures.automatic import NEVER
from rankscope.operator.kube.policies.objects import PolicyObject
from rankscope.operator.kube.resources import AutomaticCaptures, Condition, ConditionStatus, ProfilingPolicyStatus
from rankscope.operator.kube.runs.status import merged_conditions

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
        never = sorted(kind.value for kind in NEVER if kind.value in automatic.on)
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
