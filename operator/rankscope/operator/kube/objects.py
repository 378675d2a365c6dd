"""TrainingRun, Capture and ProfilingPolicy objects as the API server has them, and the patches of their status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import ClassVar, TypeVar

import msgspec
from msgspec import structs

from rankscope.common.run_names import run_name
from rankscope.operator.kube.api_client import Document
from rankscope.operator.kube.resources import (
    API_VERSION,
    GROUP,
    CapturedRank,
    CaptureSpec,
    CaptureStatus,
    Condition,
    ConditionStatus,
    ProfilingPolicySpec,
    ProfilingPolicyStatus,
    TrainingRunStatus,
)

PATH = f"/apis/{API_VERSION}"
MANAGED = {"app.kubernetes.io/managed-by": "rankscope"}
# Asks for the end of a capture; the object stays, with the result.
CANCEL = "rankscope.dev/cancel"
TEXT_CHARACTERS = 1024
FINALIZER = "rankscope.dev/capture"
FINISHED = frozenset({"Succeeded", "Failed", "Cancelled"})
MAX_RANKS = 64  # of a capture

Read = TypeVar("Read")


def collection(plural: str, namespace: str = "") -> str:
    return f"{PATH}/namespaces/{namespace}/{plural}" if namespace else f"{PATH}/{plural}"


@dataclass(frozen=True, kw_only=True)
class KubeObject:
    plural: ClassVar[str]
    namespace: str
    name: str
    uid: str
    generation: int
    version: str  # of the object as it was read
    deleting: bool
    status: TrainingRunStatus | CaptureStatus | ProfilingPolicyStatus

    @property
    def path(self) -> str:
        return f"{collection(self.plural, self.namespace)}/{self.name}"

    @property
    def place(self) -> str:
        return run_name(self.namespace, self.name)


@dataclass(frozen=True, kw_only=True)
class RunObject(KubeObject):
    plural: ClassVar[str] = "trainingruns"
    is_ours: bool
    workload_uid: str
    mfu_target: float | None
    status: TrainingRunStatus


@dataclass(frozen=True, kw_only=True)
class PolicyObject(KubeObject):
    plural: ClassVar[str] = "profilingpolicies"
    created: str  # RFC 3339: sorts by time
    spec: ProfilingPolicySpec | None  # None: it cannot be read, for the reason in `mistake`
    mistake: str
    status: ProfilingPolicyStatus


@dataclass(frozen=True, kw_only=True)
class CaptureObject(KubeObject):
    plural: ClassVar[str] = "captures"
    created_unix_seconds: float
    finalizers: tuple[str, ...]
    requested_by: str
    annotations: Mapping[str, str]  # ours only
    spec: CaptureSpec | None  # None: it cannot be read, for the reason in `mistake`
    mistake: str
    status: CaptureStatus

    @property
    def job(self) -> str:
        """The job that is captured, as the correlation names it: a run's first job has the run's name."""
        if self.spec is None:
            return self.place
        number = self.spec.job_number
        name = run_name(self.namespace, self.spec.run)
        return f"{name}#{number}" if isinstance(number, int) and number > 1 else name

    @property
    def is_finished(self) -> bool:
        return self.status.phase in FINISHED

    @property
    def is_cancelled(self) -> bool:
        return CANCEL in self.annotations

    @property
    def is_begun(self) -> bool:
        return isinstance(self.status.start_unix_ms, int)

    # What follows leads to the daemons. Users may have written the status: it never names a capture.

    @property
    def capture_id(self) -> str:
        """At the daemons. Nobody can choose a uid, so nobody can name the capture of another."""
        return f"k-{self.uid}"

    @property
    def captured_ranks(self) -> Sequence[CapturedRank]:
        return self.status.ranks[:MAX_RANKS]

    @property
    def nodes(self) -> Sequence[str]:
        """Where the capture may be known."""
        return sorted({rank.node for rank in self.captured_ranks if isinstance(rank.node, str)})


def read_run_object(document: Document) -> RunObject | None:
    spec = document.get("spec") or {}
    return RunObject(
        **_metadata(document),
        is_ours=MANAGED.items() <= (document["metadata"].get("labels") or {}).items(),
        workload_uid=str((spec.get("workload") or {}).get("uid") or ""),
        mfu_target=spec.get("mfuTarget"),
        status=_status(document, TrainingRunStatus) or TrainingRunStatus(),
    )


def read_policy_object(document: Document) -> PolicyObject | None:
    """None for one that is being deleted: it is no longer in force."""
    if document["metadata"].get("deletionTimestamp"):
        return None
    spec, mistake = _spec(document, ProfilingPolicySpec)
    return PolicyObject(
        **_metadata(document),
        created=str(document["metadata"].get("creationTimestamp") or ""),
        spec=spec,
        mistake=mistake,
        status=_status(document, ProfilingPolicyStatus) or ProfilingPolicyStatus(),
    )


def read_capture_object(document: Document) -> CaptureObject | None:
    metadata = document["metadata"]
    annotations = metadata.get("annotations") or {}
    spec, mistake = _spec(document, CaptureSpec)
    unreadable = CaptureStatus(phase="Failed", message="its status cannot be read; make another Capture")
    return CaptureObject(
        **_metadata(document),
        created_unix_seconds=unix_seconds(metadata["creationTimestamp"]),
        finalizers=tuple(metadata.get("finalizers") or ()),
        requested_by=str(annotations.get("rankscope.dev/requested-by") or "")[:256],
        annotations={k: str(v)[:1024] for k, v in annotations.items() if k.startswith(f"{GROUP}/")},
        spec=spec,
        mistake=mistake,
        status=_status(document, CaptureStatus) or unreadable,
    )


def _metadata(document: Document) -> Document:
    metadata = document["metadata"]
    return {
        "namespace": metadata.get("namespace") or "",  # none without Kubernetes
        "name": metadata["name"],
        "uid": metadata["uid"],
        "generation": int(metadata.get("generation") or 0),
        "version": str(metadata.get("resourceVersion") or ""),
        "deleting": bool(metadata.get("deletionTimestamp")),
    }


def _spec(document: Document, kind: type[Read]) -> tuple[Read | None, str]:
    try:
        return msgspec.convert(document.get("spec") or {}, kind), ""
    except msgspec.ValidationError as error:
        return None, str(error)  # made before the schema was installed, or with another version of it


def _status(document: Document, kind: type[Read]) -> Read | None:
    try:
        return msgspec.convert(document.get("status") or {}, kind)
    except msgspec.ValidationError:
        return None  # written by an older version


def status_patch(thing: KubeObject, status: msgspec.Struct) -> Document:
    """A merge patch keeps fields that it does not name: those that are no longer known are set to null."""
    content = msgspec.to_builtins(status)
    missing = {name: None for name in msgspec.to_builtins(thing.status) if name not in content}
    return {"status": {**content, **missing}}


def condition(type_: str, status: ConditionStatus, reason: str, message: str) -> Condition:
    """For `merged_conditions`, which sets the time."""
    text = message[:TEXT_CHARACTERS]
    return Condition(type=type_, status=status, reason=reason, message=text, last_transition_time="")


def merged_conditions(
    before: Sequence[Condition], now: Sequence[Condition], generation: int, now_unix_seconds: float
) -> list[Condition]:
    """Conditions keep the time of their last change; those that are not mentioned stay."""
    known = {condition.type: condition for condition in before}
    for condition in now:
        old = known.get(condition.type)
        changed = old is None or old.status != condition.status
        at = timestamp(now_unix_seconds) if changed or old is None else old.last_transition_time
        known[condition.type] = structs.replace(condition, last_transition_time=at, observed_generation=generation)
    return list(known.values())


def timestamp(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def unix_seconds(text: str) -> float:
    """0 for what is no time here: users may write a status, and the API server takes more than Python, year 0 for
    example."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return 0.0
