"""ProfilingPolicy objects as the API server has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.operator.kube.api_client import Document
from rankscope.operator.kube.resources import API_VERSION, ProfilingPolicySpec, ProfilingPolicyStatus, Thresholds
from rankscope.operator.runs.inventory import Run
from rankscope.operator.runs.pods import MFU_TARGET, read_wishes

PATH = f"/apis/{API_VERSION}"


@dataclass(frozen=True)
class PolicyObject:
    namespace: str
    name: str
    uid: str
    generation: int
    created: str  # RFC 3339: sorts by time
    spec: ProfilingPolicySpec | None  # None: it cannot be read, `mistake` says why
    mistake: str
    status: ProfilingPolicyStatus

    @property
    def path(self) -> str:
        return f"{PATH}/namespaces/{self.namespace}/profilingpolicies/{self.name}"


def read_policy_object(document: Document) -> PolicyObject | None:
    """None for one that is being deleted: it holds no more."""
    metadata = document["metadata"]
    if metadata.get("deletionTimestamp"):
        return None
    spec, mistake = None, ""
    try:
        spec = msgspec.convert(document.get("spec") or {}, ProfilingPolicySpec)
    except msgspec.ValidationError as error:
        mistake = str(error)  # made before the schema was there, or by another version's
    try:
        status = msgspec.convert(document.get("status") or {}, ProfilingPolicyStatus)
    except msgspec.ValidationError:
        status = ProfilingPolicyStatus()  # written by an older version: written anew
    return PolicyObject(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=int(metadata.get("generation") or 0),
        created=str(metadata.get("creationTimestamp") or ""),
        spec=spec,
        mistake=mistake,
        status=status,
    )


# Which policy holds for a run, and what it makes of the thresholds. Pure.


@dataclass(frozen=True)
class Match:
    """The policy that holds, and others of the same priority that would hold as well: a mistake worth telling."""

    policy: PolicyObject
    rivals: tuple[PolicyObject, ...] = ()


def match(policies: Iterable[PolicyObject], run: Run) -> Match | None:
    """Of the policies of the run's namespace that select it: the highest priority, then the oldest, then by name."""
    found = sorted((policy for policy in policies if selects(policy, run)), key=_order)
    if not found:
        return None
    best = found[0]
    return Match(best, tuple(policy for policy in found[1:] if _priority(policy) == _priority(best)))


def selects(policy: PolicyObject, run: Run) -> bool:
    """One pod with all the labels is enough: launchers and helpers of a run often have fewer than its workers."""
    if policy.spec is None or policy.namespace != run.key.namespace:
        return False
    wanted = policy.spec.selector.match_labels
    if not wanted:
        return True
    pods = run.live_pods or tuple(run.pods.values())
    return any(all(pod.labels.get(name) == value for name, value in wanted.items()) for pod in pods)


def mfu_target_of(run: Run) -> float | None:
    """What people wrote on the run's pods; where they disagree, the first pod by name has it."""
    annotated = [pod for pod in run.pods.values() if MFU_TARGET in pod.annotations]
    for pod in sorted(annotated, key=lambda pod: pod.name):
        target = read_wishes(pod.annotations).mfu_target
        if target is not None:
            return target
    return None


def thresholds(base: Policy, policy: PolicyObject | None, mfu_target: float | None) -> Policy:
    """What a run is judged by: `mfu_target`, which people gave to this very run, stands above its policy's."""
    changes: dict[str, float] = {}
    asked = policy.spec.thresholds if policy is not None and policy.spec is not None else None
    if isinstance(asked, Thresholds):
        changes = _changes(base, asked)
    if mfu_target is not None:
        changes["mfu_target_ratio"] = mfu_target
    return replace(base, **changes) if changes else base  # type: ignore[arg-type]  # fields of Policy, all floats


def _changes(base: Policy, asked: Thresholds) -> dict[str, float]:
    changes: dict[str, float] = {}
    if isinstance(asked.ratio, float):
        changes["rank_ratio"] = changes["device_rank_ratio"] = asked.ratio
        # A rank that only waits for a CPU must not be named sooner than one that works too long.
        changes["starved_rank_ratio"] = max(base.starved_rank_ratio, asked.ratio)
    if isinstance(asked.score, float):
        changes["rank_score"] = asked.score
    if isinstance(asked.impact_ratio, float):
        changes["impact_ratio"] = asked.impact_ratio
    if isinstance(asked.mfu_target, float):
        changes["mfu_target_ratio"] = asked.mfu_target
    return changes


def by_namespace(policies: Iterable[PolicyObject]) -> Mapping[str, list[PolicyObject]]:
    found: dict[str, list[PolicyObject]] = {}
    for policy in policies:
        found.setdefault(policy.namespace, []).append(policy)
    return found


def _priority(policy: PolicyObject) -> int:
    return policy.spec.priority if policy.spec is not None else 0


def _order(policy: PolicyObject) -> tuple[int, str, str]:
    return -_priority(policy), policy.created, policy.name
