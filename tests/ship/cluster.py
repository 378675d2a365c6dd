"""What a cluster knows: which kinds there are, where a document of some kind goes, and everything that is in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.kube.api_server import ApiError, User

Document = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    collection: str  # /apis/apps/v1
    plural: str
    namespaced: bool

    def path(self, namespace: str | None) -> str:
        if self.namespaced and namespace:
            return f"{self.collection}/namespaces/{namespace}/{self.plural}"
        return f"{self.collection}/{self.plural}"


def resources(admin: User) -> dict[tuple[str, str], Resource]:
    """By apiVersion and kind, whatever can be listed, in every version that is served."""
    found = {}
    groups = admin.get("/apis")["groups"]
    versions = [("/api/v1", "v1")] + [
        (f"/apis/{version['groupVersion']}", version["groupVersion"])
        for group in groups
        for version in group["versions"]
    ]
    for path, version in versions:
        for resource in admin.get(path)["resources"]:
            if "list" in resource["verbs"] and "/" not in resource["name"]:
                found[version, resource["kind"]] = Resource(path, resource["name"], resource["namespaced"])
    return found


def path_of(kinds: dict[tuple[str, str], Resource], document: Document, namespace: str) -> str:
    """Of the collection that a document belongs to."""
    kind = (document["apiVersion"], document["kind"])
    assert kind in kinds, f"this API server has no {kind[0]} {kind[1]}"
    return kinds[kind].path(document["metadata"].get("namespace", namespace))


def everything(admin: User) -> set[str]:
    """Kind, namespace and name of every object of the cluster, but for what the API server changes by itself."""
    return {f"{each.kind} {each.namespace}/{each.name}" for each in _objects(admin)}


def collect_garbage(admin: User) -> None:
    """What a cluster's controllers do and no API server does: objects go when all of their owners are gone."""
    objects = _objects(admin)
    living = {each.uid for each in objects}
    for each in objects:
        if each.owners and not living & each.owners:
            admin.delete(f"{each.collection}/{each.name}")


@dataclass(frozen=True)
class _Object:
    kind: str
    collection: str
    namespace: str
    name: str
    uid: str
    owners: frozenset[str]


def _objects(admin: User) -> list[_Object]:
    found = []
    seen = set()
    for (_, kind), resource in resources(admin).items():
        # One object is often served in several versions, an event in two groups.
        if (kind, resource.plural) in seen or kind in ("Event", "ComponentStatus", "APIService"):
            continue
        seen.add((kind, resource.plural))
        for item in admin.get(resource.path(None))["items"]:
            metadata = item["metadata"]
            namespace = metadata.get("namespace", "")
            owners = frozenset(owner["uid"] for owner in metadata.get("ownerReferences", ()))
            path = resource.path(namespace)
            found.append(_Object(kind, path, namespace, metadata["name"], metadata["uid"], owners))
    return found


def refused(admin: User, path: str, document: Document) -> str | None:
    """What the API server says against a document, None if it would take it. Nothing is stored."""
    try:
        answer = admin.create(f"{path}?dryRun=All", document)
    except ApiError as error:
        return str(error)
    dropped = sorted(_dropped(document, answer, ""))
    return f"fields unknown to this API server: {', '.join(dropped)}" if dropped else None


def _dropped(asked: Any, kept: Any, where: str) -> list[str]:
    """Fields that the API server left out: it does not know them, and says nothing."""
    if isinstance(asked, dict):
        if not isinstance(kept, dict):
            return [where] if asked else []
        return [name for key, value in asked.items() for name in _dropped(value, kept.get(key), f"{where}.{key}")]
    if isinstance(asked, list):
        kept = kept if isinstance(kept, list) else []
        padded = [*kept, *[None] * (len(asked) - len(kept))]
        return [name for i, value in enumerate(asked) for name in _dropped(value, padded[i], f"{where}[{i}]")]
    # False, zero and "" are often left out in the answer, quantities are rewritten: only presence counts.
    return [where] if asked and kept is None else []
