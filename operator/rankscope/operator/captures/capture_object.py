"""Capture objects as the API server has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from rankscope.operator.kube.api_client import Document
from rankscope.operator.kube.resources import API_VERSION, GROUP, CaptureSpec, CaptureStatus
from rankscope.operator.runs.status import unix_seconds

FINALIZER = "rankscope.dev/capture"
# Who wants it to end; the object stays, and tells how it ended.
CANCEL = "rankscope.dev/cancel"
PATH = f"/apis/{API_VERSION}"
FINISHED = frozenset({"Succeeded", "Failed", "Cancelled"})


@dataclass(frozen=True)
class CaptureObject:
    namespace: str
    name: str
    uid: str
    created_unix_seconds: float
    generation: int
    version: str
    deleting: bool
    finalizers: tuple[str, ...]
    requested_by: str
    annotations: Mapping[str, str]  # ours only
    spec: CaptureSpec | None  # None: it cannot be read, `mistake` says why
    mistake: str
    status: CaptureStatus

    @property
    def path(self) -> str:
        return f"{PATH}/namespaces/{self.namespace}/captures/{self.name}"

    @property
    def job(self) -> str:
        """What it is a capture of, as the correlation calls it: a run's first job has the run's name."""
        if self.spec is None:
            return f"{self.namespace}/{self.name}"
        number = self.spec.job_number
        return f"{self.namespace}/{self.spec.run}" + (f"#{number}" if isinstance(number, int) and number > 1 else "")

    @property
    def is_finished(self) -> bool:
        return self.status.phase in FINISHED

    @property
    def is_cancelled(self) -> bool:
        return CANCEL in self.annotations

    @property
    def is_begun(self) -> bool:
        return isinstance(self.status.capture_id, str)


def read_capture_object(document: Document) -> CaptureObject | None:
    metadata = document["metadata"]
    annotations = metadata.get("annotations") or {}
    spec, mistake = None, ""
    try:
        spec = msgspec.convert(document.get("spec") or {}, CaptureSpec)
    except msgspec.ValidationError as error:
        mistake = str(error)  # made before the schema was there, or by another version's
    try:
        status = msgspec.convert(document.get("status") or {}, CaptureStatus)
    except msgspec.ValidationError:
        status = CaptureStatus(phase="Failed", message="its status cannot be read; make another Capture")
    return CaptureObject(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        created_unix_seconds=unix_seconds(metadata["creationTimestamp"]),
        generation=int(metadata.get("generation") or 0),
        version=str(metadata.get("resourceVersion") or ""),
        deleting=bool(metadata.get("deletionTimestamp")),
        finalizers=tuple(metadata.get("finalizers") or ()),
        requested_by=str(annotations.get("rankscope.dev/requested-by") or "")[:256],
        annotations={k: str(v)[:1024] for k, v in annotations.items() if k.startswith(f"{GROUP}/")},
        spec=spec,
        mistake=mistake,
        status=status,
    )
