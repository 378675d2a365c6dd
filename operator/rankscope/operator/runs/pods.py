"""The part of a pod that the operator needs, from the API server's JSON. Everybody who may create pods writes that
JSON: it is hostile input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

MAX_LABELS = 64
TEXT_CHARACTERS = 253

# Pods have the same texts; without this each would keep its own copy. Bounded, unlike sys.intern.
_shared = lru_cache(maxsize=1 << 16)(str)


@dataclass(frozen=True, slots=True)
class Owner:
    api_version: str
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Pod:
    uid: str
    name: str
    namespace: str
    node: str = ""  # empty until it is scheduled
    address: str = ""
    phase: str = ""
    deleting: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)  # ours only
    owner: Owner | None = None
    created: str = ""
    restarts: int = 0  # of its containers, the most
    image: str = ""  # of the container that trains

    @property
    def is_over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def read_pod(document: Mapping[str, Any]) -> Pod | None:
    """None without uid, name or namespace: the API server guarantees the shape, not every field."""
    metadata, spec, status = (_mapping(document.get(part)) for part in ("metadata", "spec", "status"))
    uid, name, namespace = (_text(metadata.get(part)) for part in ("uid", "name", "namespace"))
    if not uid or not name or not namespace:
        return None
    return Pod(
        uid=uid,
        name=name,
        namespace=_shared(namespace),
        node=_shared(_text(spec.get("nodeName"))),
        address=_text(status.get("podIP")),
        phase=_shared(_text(status.get("phase"))),
        deleting=bool(metadata.get("deletionTimestamp")),
        labels=_texts(metadata.get("labels")),
        annotations={k: v for k, v in _texts(metadata.get("annotations"), 1024).items() if "rankscope.dev/" in k},
        owner=_owner(metadata.get("ownerReferences")),
        created=_shared(_text(metadata.get("creationTimestamp"))),
        restarts=_restarts(status.get("containerStatuses")),
        image=_shared(_image(spec.get("containers"))),
    )


def _owner(references: object) -> Owner | None:
    """The controller; else the first there is."""
    if not isinstance(references, list):
        return None
    known = [_mapping(reference) for reference in references]
    known.sort(key=lambda reference: not reference.get("controller"))
    for reference in known:
        parts = [_text(reference.get(part)) for part in ("apiVersion", "kind", "name", "uid")]
        if all(parts):
            return Owner(*map(_shared, parts))
    return None


def _restarts(statuses: object) -> int:
    found = [_mapping(each).get("restartCount") for each in (statuses if isinstance(statuses, list) else ())]
    return max((count for count in found if isinstance(count, int)), default=0)


def _image(containers: object) -> str:
    """Of the first container that asks for a device (nvidia.com/gpu, amd.com/gpu), else of the first."""
    known = [_mapping(each) for each in (containers if isinstance(containers, list) else ())]
    known.sort(key=lambda each: not any("/gpu" in str(name) for name in _limits(each)))
    return _text(known[0].get("image")) if known else ""


def _limits(container: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(_mapping(container.get("resources")).get("limits"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= TEXT_CHARACTERS else ""


def _texts(value: object, characters: int = TEXT_CHARACTERS) -> dict[str, str]:
    pairs = [(k, v) for k, v in _mapping(value).items() if isinstance(k, str) and isinstance(v, str)]
    # Labels that group pods into runs must be kept for a pod with hundreds of labels.
    pairs.sort(key=lambda pair: "/" not in pair[0])
    return {_shared(k): _shared(v[:characters]) for k, v in pairs[:MAX_LABELS]}


PREFIX = "rankscope.dev/"
MFU_TARGET = f"{PREFIX}mfu-target"
WATCH = f"{PREFIX}watch"
# Labels of a pod that say for whom it trains. Without the first, the namespace is the team.
TEAM = f"{PREFIX}team"
USER = f"{PREFIX}user"


@dataclass(frozen=True)
class PodAnnotations:
    """Settings of users in annotations. A value that cannot be read becomes an Event of the pod and is ignored."""

    mfu_target: float | None = None
    watch: bool = True
    mistakes: tuple[str, ...] = ()  # in words, with what it may be


def read_annotations(annotations: Mapping[str, str]) -> PodAnnotations:
    mistakes: list[str] = []
    target: float | None = None
    if MFU_TARGET in annotations:
        text = annotations[MFU_TARGET]
        try:
            target = float(text)
        except ValueError:
            target = math.nan
        if not 0 < target <= 1:
            mistakes.append(f"{MFU_TARGET}: {text[:40]!r} is not a ratio; write a number over 0 and up to 1, as in 0.4")
            target = None
    watch = annotations.get(WATCH, "true")
    if watch not in ("true", "false"):
        mistakes.append(f"{WATCH}: {watch[:40]!r} is neither true nor false")
    return PodAnnotations(target, watch != "false", tuple(mistakes))
