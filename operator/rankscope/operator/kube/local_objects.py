"""Objects of our own kinds in a folder, in place of an API server: what a correlator without Kubernetes keeps.

The same calls with the same meaning as `Api`, so that controllers need not know the difference: names are unique,
writes may be conditional on the version that was read, finalizers delay a deletion, and a watch continues a list."""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rankscope.common.private_folder import claim, write_whole
from rankscope.operator.kube.api_client import ApiError, ConflictError, Document, GoneError, MissingError
from rankscope.operator.kube.objects import timestamp

log = logging.getLogger(__name__)

MAX_OBJECTS = 10_000
OBJECT_BYTES = 4 << 20
HISTORY_EVENTS = 10_000
# How long a watch without events lasts.
WATCH_SECONDS = 5.0
_STATUS = "/status"
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,252}")


class LocalObjects:
    """Thread-safe. One process at a time: a second one in the same folder would not see the first one's objects."""

    def __init__(self, folder: Path) -> None:
        """Raises FolderError if the folder cannot be used."""
        self._folder = folder
        self._changed = threading.Condition()
        self._objects: dict[str, Document] = {}  # by path
        self._version = 0
        self._events: deque[tuple[int, str, str, Document]] = deque(maxlen=HISTORY_EVENTS)
        self._descriptor = claim(folder)
        for path in sorted(folder.glob("*.json")):
            self._load(path)

    def create(self, path: str, body: Any, **query: Any) -> Document:
        document: Document = copy.deepcopy(body)
        metadata = document["metadata"]
        if _NAME.fullmatch(metadata["name"]) is None:
            raise ApiError(422, "Invalid", f"not a name: {metadata['name'][:100]!r}")
        place = f"{path}/{metadata['name']}"
        with self._changed:
            if place in self._objects:
                raise ConflictError(409, "AlreadyExists", f"{metadata['name']} exists")
            if len(self._objects) >= MAX_OBJECTS:
                raise ApiError(507, "TooMany", f"{MAX_OBJECTS} captures are kept; delete some of them")
            metadata |= {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": timestamp(time.time())}
            return self._keep("ADDED", place, document)

    def merge(self, path: str, body: Any, **query: Any) -> Document:
        is_status = path.endswith(_STATUS)
        place = path.removesuffix(_STATUS)
        with self._changed:
            before = self._known(place, body.get("metadata") or {})
            # Of the metadata, only what is checked may be part of a write of the status.
            patch = {"status": body["status"]} if is_status else body
            after = _merged(before, patch)
            kept = {name: before["metadata"][name] for name in ("name", "uid", "creationTimestamp")}
            after["metadata"] = {**after["metadata"], **kept}
            if after["metadata"].get("deletionTimestamp") and not after["metadata"].get("finalizers"):
                return self._drop(place)
            return self._keep("MODIFIED", place, after)

    def delete(self, path: str, body: Any = None, **query: Any) -> Document:
        with self._changed:
            before = self._known(path, (body or {}).get("preconditions") or {})
            if not before["metadata"].get("finalizers"):
                return self._drop(path)
            after = copy.deepcopy(before)
            after["metadata"].setdefault("deletionTimestamp", timestamp(time.time()))
            return self._keep("MODIFIED", path, after)

    def pages(self, path: str, **query: Any) -> Iterator[Document]:
        with self._changed:
            items = [document for place, document in self._objects.items() if place.startswith(f"{path}/")]
            page = {"metadata": {"resourceVersion": str(self._version)}, "items": items}
        yield page

    def watch(self, path: str, idle_seconds: float, **query: Any) -> Iterator[Document]:
        seen = int(query.get("resourceVersion") or 0)
        give_up = time.monotonic() + min(idle_seconds, WATCH_SECONDS)
        while time.monotonic() < give_up:
            with self._changed:
                if self._events and self._events[0][0] > seen + 1 and len(self._events) == HISTORY_EVENTS:
                    raise GoneError(410, "Expired", "the history is no longer kept")
                if self._version <= seen:
                    self._changed.wait(give_up - time.monotonic())
                new = [event for event in self._events if event[0] > seen]
            for version, kind, place, document in new:
                seen = version
                if place.startswith(f"{path}/"):
                    yield {"type": kind, "object": document}

    def close(self) -> None:
        os.close(self._descriptor)

    def _known(self, place: str, conditions: Document) -> Document:
        found = self._objects.get(place)
        if found is None:
            raise MissingError(404, "NotFound", place)
        for name in ("uid", "resourceVersion"):
            if conditions.get(name, found["metadata"][name]) != found["metadata"][name]:
                raise ConflictError(409, "Conflict", f"{place} was changed meanwhile")
        return found

    def _keep(self, kind: str, place: str, document: Document) -> Document:
        """Written before it is known: what was answered outlives a crash."""
        document["metadata"]["resourceVersion"] = str(self._version + 1)
        content = msgspec.json.encode({"path": place, "object": document})
        file = self._file(place)
        try:
            write_whole(file, content)
        except OSError as error:
            text = f"{file}: {error.strerror}; make room, or give this user the folder"
            raise ApiError(507, "NotWritten", text) from error
        self._objects[place] = document
        self._happened(kind, place, document)
        return document

    def _drop(self, place: str) -> Document:
        document = self._objects[place]
        try:
            self._file(place).unlink(missing_ok=True)
        except OSError as error:
            raise ApiError(507, "NotRemoved", f"{self._file(place)}: {error.strerror}") from error
        del self._objects[place]
        self._happened("DELETED", place, document)
        return document

    def _happened(self, kind: str, place: str, document: Document) -> None:
        self._version += 1
        self._events.append((self._version, kind, place, document))
        self._changed.notify_all()

    def _file(self, place: str) -> Path:
        plural, _, name = place.rpartition("/")
        return self._folder / f"{plural.rpartition('/')[2]}-{name}.json"

    def _load(self, path: Path) -> None:
        try:
            if path.stat().st_size > OBJECT_BYTES:
                raise ValueError(f"larger than {OBJECT_BYTES >> 20} MiB")
            kept = msgspec.json.decode(path.read_bytes())
            place, document = kept["path"], kept["object"]
            metadata = document["metadata"]
            if self._file(place) != path or place.rpartition("/")[2] != metadata["name"]:
                raise ValueError("its name is not the object's")
            self._version = max(self._version, int(metadata["resourceVersion"]))
            self._objects[place] = document
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is not read: %s; remove the file, or put a whole one there", path, error)


def _merged(target: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged(merged.get(name), value)
    return merged
