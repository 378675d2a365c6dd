"""A copy of objects of the API server, kept through outages and lost history.

Every listing replaces the whole copy, so that an object that was deleted during an outage is reported as deleted. Watch
frameworks that only pass events on never report it, and the pod would be followed forever."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from rankscope.operator.kube.api_client import ApiError, Document, GoneError, ObjectApi, UnreachableError

log = logging.getLogger(__name__)

MAX_OBJECTS = 200_000
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 10.0
# The server ends a watch after this long; a connection on which nothing at all came for longer is dead.
WATCH_SECONDS = 240
IDLE_SECONDS = WATCH_SECONDS + 30.0

Kept = TypeVar("Kept")
Read = TypeVar("Read", contravariant=True)


class Follower(Protocol[Read]):
    """Called in the watch's own thread, for one object at a time: must be quick."""

    def changed(self, uid: str, thing: Read, /) -> None: ...

    def deleted(self, uid: str, /) -> None: ...


class Watched(Generic[Kept]):
    """The objects that `path` lists, converted by `read` (None: not wanted). Runs from `start` to `stop`."""

    def __init__(
        self,
        api: ObjectApi,
        path: str,
        read: Callable[[Document], Kept | None],
        follower: Follower[Kept] | None = None,
        label_selector: str = "",
    ) -> None:
        self.path = path
        self.listed = threading.Event()  # once the copy has been whole
        self.connected = False
        self._api = api
        self._read = read
        self._follower = follower
        self._query = {"labelSelector": label_selector} if label_selector else {}
        self._known: dict[str, Kept] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def objects(self) -> Mapping[str, Kept]:
        """By uid, at this moment."""
        with self._lock:
            return dict(self._known)

    def find(self, uid: str) -> Kept | None:
        with self._lock:
            return self._known.get(uid)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"watch {self.path}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        # Its thread may block in a read for minutes: it is not joined, and changes nothing from now on.
        self._stopping.set()

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        version = ""
        while not self._stopping.is_set():
            try:
                if not version:
                    version = self._list()
                    self.listed.set()
                self.connected = True
                version = self._follow(version)
                pause = FIRST_PAUSE_SECONDS
                continue
            except GoneError:
                log.info("the API server no longer has the history of %s: listing again", self.path)
                version = ""
            except UnreachableError as error:
                self._log_outage(error)
            except ApiError as error:
                log.warning("cannot watch %s: %s", self.path, error)
                version = ""
            except Exception:
                log.exception("the watch of %s failed; listing again", self.path)
                version = ""
            self.connected = False
            # Randomized, or all replicas come back in the same moment.
            self._stopping.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _log_outage(self, error: UnreachableError) -> None:
        level = logging.WARNING if self.connected else logging.DEBUG
        log.log(level, "%s cannot be watched, the copy stays: %s", self.path, error)

    def _list(self) -> str:
        seen: set[str] = set()
        version = ""
        for page in self._api.pages(self.path, **self._query):
            version = page["metadata"].get("resourceVersion") or ""
            for document in page.get("items") or ():
                seen.add(self._take(document))
        for uid in self.objects.keys() - seen:
            self._drop(uid)
        return version

    def _follow(self, version: str) -> str:
        query = {**self._query, "resourceVersion": version, "allowWatchBookmarks": "true"}
        for event in self._api.watch(self.path, IDLE_SECONDS, timeoutSeconds=WATCH_SECONDS, **query):
            if self._stopping.is_set():
                break
            document = event["object"]
            kind = event["type"]
            if kind in ("ADDED", "MODIFIED"):
                self._take(document)
            elif kind == "DELETED":
                self._drop(_uid(document))
            version = document["metadata"].get("resourceVersion") or version
        return version

    def _take(self, document: Document) -> str:
        uid = _uid(document)
        try:
            thing = self._read(document)
        except Exception:  # or everything would be listed again, forever
            log.exception("an object of %s could not be read", self.path)
            thing = None
        if thing is None or self._stopping.is_set():
            self._drop(uid)
            return uid
        with self._lock:
            if uid not in self._known and len(self._known) >= MAX_OBJECTS:
                return uid
            if self._known.get(uid) == thing:
                return uid
            self._known[uid] = thing
        self._notify(lambda follower: follower.changed(uid, thing))
        return uid

    def _drop(self, uid: str) -> None:
        with self._lock:
            was_known = self._known.pop(uid, None) is not None
        if was_known and not self._stopping.is_set():
            self._notify(lambda follower: follower.deleted(uid))

    def _notify(self, call: Callable[[Follower[Kept]], None]) -> None:
        try:
            if self._follower is not None:
                call(self._follower)
        except Exception:  # one odd object must not end the watch of all others
            log.exception("an object of %s could not be taken in", self.path)


def _uid(document: Document) -> str:
    return str(document["metadata"]["uid"])
