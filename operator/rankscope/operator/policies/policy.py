"""Which policy is in force for a run, and the thresholds that follow from it. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.operator.kube.objects import PolicyObject
from rankscope.operator.kube.resources import Thresholds
from rankscope.operator.runs.inventory import Run
from rankscope.operator.runs.pods import MFU_TARGET, read_annotations

# Every run of a namespace is compared with so many of its policies.
MAX_POLICIES = 64


@dataclass(frozen=True)
class Match:
    """The policy in force, and others of the same priority that select the run too: a mistake to report."""

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
    """One pod with all labels is enough: launchers and helpers of a run often have fewer than its workers."""
    if policy.spec is None or policy.namespace != run.key.namespace:
        return False
    wanted = policy.spec.selector.match_labels
    if not wanted:
        return True
    pods = run.live_pods or tuple(run.pods.values())
    return any(all(pod.labels.get(name) == value for name, value in wanted.items()) for pod in pods)


def mfu_target_of(run: Run) -> float | None:
    """From the annotations of the run's pods; where they disagree, of the first pod by name."""
    annotated = [pod for pod in run.pods.values() if MFU_TARGET in pod.annotations]
    for pod in sorted(annotated, key=lambda pod: pod.name):
        target = read_annotations(pod.annotations).mfu_target
        if target is not None:
            return target
    return None


def thresholds(base: Policy, policy: PolicyObject | None, mfu_target: float | None) -> Policy:
    """The thresholds of a run. `mfu_target`, which was given for this run, overrides its policy's."""
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


class RunThresholds:
    """What each run is judged by. Set by the policies' controller; may be asked from any thread."""

    def __init__(self, base: Policy) -> None:
        self.base = base
        self._of_runs: Mapping[str, Policy] = {}

    def set(self, of_runs: Mapping[str, Policy]) -> None:
        """Equal thresholds become one and the same object: jobs are compared in groups of it."""
        known = {policy: policy for policy in self._of_runs.values()}
        self._of_runs = {
            run: known.setdefault(policy, policy) for run, policy in of_runs.items() if policy is not self.base
        }

    def policy_of(self, job: str) -> Policy:
        return self._of_runs.get(job.partition("#")[0], self.base)

    def mfu_target_of(self, job: str) -> float | None:
        return self.policy_of(job).mfu_target_ratio


def by_namespace(policies: Iterable[PolicyObject]) -> Mapping[str, list[PolicyObject]]:
    """The highest priority first; of each namespace the first MAX_POLICIES are in force."""
    found: dict[str, list[PolicyObject]] = {}
    for policy in policies:
        found.setdefault(policy.namespace, []).append(policy)
    return {namespace: sorted(group, key=_order) for namespace, group in found.items()}


def _priority(policy: PolicyObject) -> int:
    return policy.spec.priority if policy.spec is not None else 0


def _order(policy: PolicyObject) -> tuple[int, str, str]:
    return -_priority(policy), policy.created, policy.name
