"""The init container that brings the probe: it has to fit into any pod, under the rules that hold for that pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Document = dict[str, Any]

VOLUME = "rankscope-probe"  # the init container's name too
FOLDER = "/rankscope-probe"
NOBODY = 65534
_AMOUNTS = {"cpu": "100m", "memory": "64Mi"}
# What the pod's author chose for their own container passes the policies of their namespace: so it does for ours.
_COPIED = ("runAsUser", "runAsGroup", "runAsNonRoot", "seLinuxOptions", "seccompProfile", "appArmorProfile")


def init_container(spec: Mapping[str, Any], container: Mapping[str, Any], image: str) -> Document:
    made: Document = {
        "name": VOLUME,
        "image": image,
        "command": ["python3", "-m", "rankscope.probe.injecting", FOLDER],
        "volumeMounts": [{"name": VOLUME, "mountPath": FOLDER}],
        "securityContext": _security(_mapping(spec.get("securityContext")), _mapping(container.get("securityContext"))),
    }
    if any(_asks(resources) for resources in _resources(spec)):
        # As much as it may use, or a Guaranteed pod would be one no longer and lose its own CPUs. The largest init
        # container counts, not the sum: the pod asks for no more than before.
        made["resources"] = {"requests": dict(_AMOUNTS), "limits": dict(_AMOUNTS)}
    return made


def _security(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Document:
    made: Document = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    made.update({name: container[name] for name in _COPIED if container.get(name) is not None})
    non_root = made.get("runAsNonRoot", pod.get("runAsNonRoot"))
    user = made.get("runAsUser", pod.get("runAsUser"))
    if non_root and user is None:
        made["runAsUser"] = NOBODY  # whatever our image says: a kubelet refuses one whose user it cannot tell
    return made


def _resources(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for kind in ("containers", "initContainers"):
        items = spec.get(kind)
        for item in items if isinstance(items, list) else ():
            yield _mapping(_mapping(item).get("resources"))


def _asks(resources: Mapping[str, Any]) -> bool:
    return any(name in _AMOUNTS for part in ("requests", "limits") for name in _mapping(resources.get(part)))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
