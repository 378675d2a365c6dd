"""ProfilingPolicy objects as the API server has them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from rankscope.operator.kube.api import Document
from rankscope.operator.kube.resources import API_VERSION, ProfilingPolicySpec, ProfilingPolicyStatus

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
