"""What the injection webhook adds to a pod: from the pod as it was sent to a JSON patch. No I/O.

Nothing that the pod's author set is removed or changed in meaning. A pod that has everything already gets an empty
patch: other webhooks may change a pod after us, and then the API server calls us again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Document = dict[str, Any]

VOLUME = "rankscope-probe"  # the init container's name too
FOLDER = "/rankscope-probe"
NOBODY = 65534
_AMOUNTS = {"cpu": "100m", "memory": "64Mi"}
# The author's own container passes the policies of its namespace: with the same settings, so does ours.
_COPIED = ("runAsUser", "runAsGroup", "runAsNonRoot", "seLinuxOptions", "seccompProfile", "appArmorProfile")


def init_container(spec: Mapping[str, Any], container: Mapping[str, Any], image: str) -> Document:
    """Brings the probe. It has to fit into any pod, under the rules of that pod."""
    made: Document = {
        "name": VOLUME,
        "image": image,
        "command": ["python3", "-m", "rankscope.probe.injection", FOLDER],
        "volumeMounts": [{"name": VOLUME, "mountPath": FOLDER}],
        "securityContext": _security(_mapping(spec.get("securityContext")), _mapping(container.get("securityContext"))),
    }
    if any(_asks(resources) for resources in _resources(spec)):
        # Requests equal to limits, or a Guaranteed pod would no longer be one and lose its own CPUs. The largest init
        # container counts, not the sum: the pod requests no more than before.
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
        made["runAsUser"] = NOBODY  # a kubelet refuses an image that does not name its user by number
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


Mode = Literal["true", "kineto", "probe"]

INJECT = "rankscope.dev/inject"  # a label, for the API server selects by labels only
CONTAINERS = "rankscope.dev/inject-containers"
IMAGE_PYTHONPATH = "rankscope.dev/image-pythonpath"
INJECTED = "rankscope.dev/injected"
NOT_INJECTED = "rankscope.dev/not-injected"
MODES: tuple[Mode, ...] = ("true", "kineto", "probe")

KINETO = {"KINETO_USE_DAEMON": "1", "TEARDOWN_CUPTI": "1"}
PYTHONPATH = "PYTHONPATH"
GIVEN_PYTHONPATH = "RANKSCOPE_GIVEN_PYTHONPATH"
NOTE_CHARACTERS = 200
MAX_NOTES = 8
# Of a pod that is injected: a review has no end of them, and the API server applies our patch one by one.
MAX_CONTAINERS = 128


@dataclass(frozen=True)
class Injection:
    patch: tuple[Document, ...] = ()
    notes: tuple[str, ...] = ()  # what was requested and is not done, and why


@dataclass
class _Work:
    pod: Mapping[str, Any]
    mode: Mode
    probe_image: str | None
    patch: list[Document] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    volume: Literal["ours", "other"] | None = None  # that has the name of ours
    kineto: list[str] = field(default_factory=list)
    probe: list[str] = field(default_factory=list)

    @property
    def spec(self) -> Mapping[str, Any]:
        return _mapping(self.pod.get("spec"))

    @property
    def annotations(self) -> Mapping[str, Any]:
        return _mapping(_mapping(self.pod.get("metadata")).get("annotations"))

    def add(self, path: str, value: Any) -> None:
        self.patch.append({"op": "add", "path": path, "value": value})

    def append(self, place: str, present: object, values: Sequence[Document]) -> None:
        """To a list that may be missing: a patch cannot append to a missing list."""
        if not values:
            return
        if _items(present):
            for value in values:
                self.add(f"{place}/-", value)
        else:
            self.add(place, list(values))


def mode_of(text: str) -> Mode | None:
    return next((mode for mode in MODES if mode == text), None)


def inject(pod: Mapping[str, Any], mode: Mode, probe_image: str | None) -> Injection:
    work = _Work(pod, mode, probe_image)
    work.volume = _volume(work)
    why_not = _unfit(work)
    if why_not:
        return Injection(notes=(why_not,))
    chosen = _chosen(work)
    probed: list[Mapping[str, Any]] = []
    for index, container in chosen:
        if _add_kineto(work, index, container):
            work.kineto.append(str(container["name"]))
        if mode != "kineto" and _add_probe(work, index, container):
            work.probe.append(str(container["name"]))
            probed.append(container)
    if probed:
        _add_source(work, probed[0])
    _annotate(work)
    return Injection(tuple(work.patch), tuple(work.notes))


def _unfit(work: _Work) -> str:
    if "kubernetes.io/config.mirror" in work.annotations:
        return "a static pod's mirror cannot be changed"
    system = _mapping(work.spec.get("os")).get("name")
    selected = _mapping(work.spec.get("nodeSelector")).get("kubernetes.io/os")
    if "windows" in (system, selected):
        return "Rankscope does not run on Windows"
    if len(_items(work.spec.get("containers"))) > MAX_CONTAINERS:
        return f"the pod has more than {MAX_CONTAINERS} containers"
    return ""


def _chosen(work: _Work) -> list[tuple[int, Mapping[str, Any]]]:
    """The annotated containers, or all. Init containers do not train."""
    known = [
        (index, container)
        for index, container in enumerate(_items(work.spec.get("containers")))
        if isinstance(container, Mapping) and isinstance(container.get("name"), str)
    ]
    named = work.annotations.get(CONTAINERS)
    if not isinstance(named, str):
        return known
    wanted = {name.strip() for name in named.split(",")} - {""}
    missing = wanted - {container["name"] for _, container in known}
    if missing or not wanted:
        _note(work, f"{CONTAINERS}: no container is called {', '.join(sorted(missing)) or 'that'}")
    return [(index, container) for index, container in known if container["name"] in wanted]


def _add_kineto(work: _Work, index: int, container: Mapping[str, Any]) -> bool:
    """True if the container has both variables then."""
    env = container.get("env")
    values = {name: _variable(env, name) for name in KINETO}
    wanted = [{"name": name, "value": KINETO[name]} for name, (place, _) in values.items() if place is None]
    work.append(f"/spec/containers/{index}/env", env, wanted)
    return all(place is None or entry.get("value") == KINETO[name] for name, (place, entry) in values.items())


def _add_probe(work: _Work, index: int, container: Mapping[str, Any]) -> bool:
    """True if the container has the probe's folder then: first on PYTHONPATH, and mounted."""
    name = container["name"]
    if work.probe_image is None:
        _note(work, f"{name}: no probe: the operator was given no --probe-image")
        return False
    mounts = container.get("volumeMounts")
    mounted = _mount(mounts)
    if mounted == "other" or work.volume == "other":
        _note(work, f"{name}: no probe: the pod has something else at {FOLDER}, or its own volume {VOLUME}")
        return False
    if not _prepend(work, index, container):
        return False
    if mounted is None:
        mount = {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}
        work.append(f"/spec/containers/{index}/volumeMounts", mounts, [mount])
    return True


def _prepend(work: _Work, index: int, container: Mapping[str, Any]) -> bool:
    env = container.get("env")
    place, entry = _variable(env, PYTHONPATH)
    root = f"/spec/containers/{index}/env"
    if place is not None:
        value = entry.get("value")
        if isinstance(value, str) and FOLDER in value.split(":"):
            return True
        if entry.get("valueFrom") is not None:
            # Kept under another name, which the kubelet expands behind ours: it may be in a ConfigMap or a Secret.
            work.add(f"{root}/{place}", {"name": GIVEN_PYTHONPATH, "valueFrom": entry["valueFrom"]})
            new = f"{FOLDER}:$({GIVEN_PYTHONPATH})"
            work.patch.append(
                {"op": "replace", "path": f"{root}/{place + 1}", "value": {"name": PYTHONPATH, "value": new}}
            )
            return True
        new = f"{FOLDER}:{value}" if value else FOLDER
        work.patch.append({"op": "replace", "path": f"{root}/{place}", "value": {"name": PYTHONPATH, "value": new}})
        return True
    given = work.annotations.get(IMAGE_PYTHONPATH)
    if work.mode == "true" and not isinstance(given, str):
        # A variable of the pod hides the image's, which is not visible here: the training would not find its code.
        _note(
            work,
            f"{container['name']}: no probe, because its image may set {PYTHONPATH}: give it in the annotation "
            f"{IMAGE_PYTHONPATH}, or set the variable",
        )
        return False
    parts = [FOLDER, *([given] if isinstance(given, str) and given else [])]
    if _may_come_from_elsewhere(container):
        parts.append(f"$({PYTHONPATH})")  # from envFrom, which our variable would hide
    # The variables of level 1 come first, and make the list where there was none.
    has_list = bool(_items(env)) or any(_variable(env, name)[0] is None for name in KINETO)
    variable = {"name": PYTHONPATH, "value": ":".join(parts)}
    work.add(f"{root}/-" if has_list else root, variable if has_list else [variable])
    return True


def _add_source(work: _Work, container: Mapping[str, Any]) -> None:
    spec = work.spec
    if work.volume is None:
        volume = {"name": VOLUME, "emptyDir": {"sizeLimit": "16Mi"}}
        work.append("/spec/volumes", spec.get("volumes"), [volume])
    present = spec.get("initContainers")
    if not any(_mapping(item).get("name") == VOLUME for item in _items(present)):
        assert work.probe_image is not None
        work.append("/spec/initContainers", present, [init_container(spec, container, work.probe_image)])


def _annotate(work: _Work) -> None:
    injected = []
    if work.kineto:
        injected.append(f"kineto={','.join(work.kineto)}")
    if work.probe:
        injected.append(f"probe={','.join(work.probe)}")
    wanted = {INJECTED: " ".join(injected), NOT_INJECTED: "; ".join(work.notes)}
    given = {name: text for name, text in wanted.items() if text and work.annotations.get(name) != text}
    if not given or not isinstance(work.pod.get("metadata"), Mapping):
        return
    if not work.annotations:
        work.add("/metadata/annotations", given)
        return
    for name, text in given.items():
        work.add(f"/metadata/annotations/{name.replace('/', '~1')}", text)


def _variable(env: object, name: str) -> tuple[int | None, Mapping[str, Any]]:
    """The last of that name, which is the one in effect."""
    for index, entry in reversed(list(enumerate(_items(env)))):
        if isinstance(entry, Mapping) and entry.get("name") == name:
            return index, entry
    return None, {}


def _may_come_from_elsewhere(container: Mapping[str, Any]) -> bool:
    sources = (_mapping(source) for source in _items(container.get("envFrom")))
    return any(PYTHONPATH.startswith(str(source.get("prefix") or "")) for source in sources)


def _volume(work: _Work) -> Literal["ours", "other"] | None:
    for item in _items(work.spec.get("volumes")):
        volume = _mapping(item)
        if volume.get("name") == VOLUME:
            return "ours" if "emptyDir" in volume else "other"
    return None


def _mount(mounts: object) -> Literal["ours", "other"] | None:
    for item in _items(mounts):
        mount = _mapping(item)
        path = str(mount.get("mountPath") or "").rstrip("/")
        if path == FOLDER:
            return "ours" if mount.get("name") == VOLUME else "other"
    return None


def _note(work: _Work, text: str) -> None:
    if len(work.notes) < MAX_NOTES and text[:NOTE_CHARACTERS] not in work.notes:
        work.notes.append(text[:NOTE_CHARACTERS])


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
