"""When a verdict becomes a capture by itself, and of which ranks. Pure: what limits it is in Capture objects, so that
a restarted operator and another replica find the same limits.

The objects are kept for a day and for the cooldown at least, whatever time to live was asked for: they are the memory.
A capture's name is made of the run and of the automatic capture before it, so that two operators that decide at once,
or one that has not yet seen what the other did, ask for one and the same object."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from rankscope.analysis.verdict import Kind
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.suspecting import suspects
from rankscope.operator.kube.api import Document
from rankscope.operator.kube.captures.objects import CaptureObject
from rankscope.operator.kube.policies.objects import PolicyObject
from rankscope.operator.kube.resources import API_VERSION, AutomaticCaptures
from rankscope.operator.kube.runs.controlling import RunObject

TRIGGER = "rankscope.dev/trigger"
POLICY = "rankscope.dev/policy"
FINDING = "rankscope.dev/finding"
BY_POLICY, BY_ALERT = "policy", "alert"
DAY_SECONDS = 86400.0
# A finding that has been gone for so long and comes again is another one. Shorter than that, or an operator that has
# just begun and does not see it yet, is not "gone".
RECOVERED_SECONDS = 60.0
# What a capture is about fits on a few ranks; a list of hundreds is a job-wide trouble, of which these are samples.
ACCUSED_MOST = 7
SAMPLES = 2
# For ranks whose steps nobody sees.
SECONDS = 2.0
# There are no steps to record, and the stacks are in the verdict.
NEVER = frozenset({Kind.HANG, Kind.HEALTHY, Kind.INSUFFICIENT_DATA})


@dataclass(frozen=True)
class Past:
    """An automatic capture, as far as the next one depends on it."""

    created_unix_seconds: float
    finding: str


def is_automatic(capture: CaptureObject) -> bool:
    return capture.annotations.get(TRIGGER) in (BY_POLICY, BY_ALERT)


def finding_of(state: JobState) -> str:
    verdict = state.verdict
    ranks = ",".join(map(str, verdict.culprits[:64]))
    number = state.job.partition("#")[2]
    return (
        f"{verdict.kind.value} {ranks}"
        + ("" if verdict.stage is None else f" stage {verdict.stage}")
        + (f" job {number}" if number else "")
    )


def job_number(job: str) -> Document:
    """For the spec of a capture: nothing for a run's first job."""
    number = job.partition("#")[2]
    return {"jobNumber": int(number)} if number else {}


def wants_capture(spec: AutomaticCaptures, state: JobState) -> bool:
    return state.verdict.is_alarm and state.verdict.kind not in NEVER and state.verdict.kind.value in spec.on


def captures_lately(captures: Iterable[CaptureObject], policy: PolicyObject, now_unix_seconds: float) -> int:
    """That the policy caused in the last 24 hours."""
    return sum(now_unix_seconds - capture.created_unix_seconds < DAY_SECONDS for capture in _of(captures, policy))


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
    """Why there is no capture now. `made` is what this operator remembers of its own, which somebody may have deleted;
    `recovered_unix_seconds` is when the run was last seen healthy for a while."""
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
            return f"the run was captured lately; again in {rest:.0f} s"
        recovered = recovered_unix_seconds is not None and recovered_unix_seconds > last.created_unix_seconds
        if last.finding == finding and not recovered:
            return "this finding has had its capture"
    known = list(captures)
    if captures_lately(known, policy, now_unix_seconds) >= spec.per_day:
        return f"the policy's {spec.per_day} captures a day are used up"
    running = sum(not capture.is_finished and not capture.deleting for capture in _of(known, policy))
    return f"{running} captures of the policy are under way" if running >= spec.concurrent else None


def chosen_ranks(state: JobState) -> tuple[int, ...]:
    """Those accused and a healthy one beside them, or a few typical ones; none where no rank reports."""
    suspected = suspects(state)
    reporting = state.identities
    accused = [rank for rank in suspected.culprits if rank in reporting][:ACCUSED_MOST]
    peers = [rank for rank in suspected.peers if rank not in accused]
    return tuple(sorted([*accused, *peers[: 1 if accused else SAMPLES]]))


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
    wanted |= {"steps": spec.steps} if state.step_seconds is not None else {"seconds": SECONDS}
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
            "labels": {"app.kubernetes.io/managed-by": "rankscope"},
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
