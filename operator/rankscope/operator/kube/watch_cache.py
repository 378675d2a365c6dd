"""Keeping a copy of some objects of the API server, through outages and lost history.

Every listing replaces the copy as a whole, so that what was deleted while nobody looked is told as deleted: watching
frameworks that only pass events on never tell it, and a pod gone during an outage would be watched for ever."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from rankscope.operator.kube.api_client import Api, ApiError, Document, GoneError, UnreachableError

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
# The server ends a watch after this long; a connection on which nothing at all came for longer is dead.
WATCH_SECONDS = 240
IDLE_SECONDS = WATCH_SECONDS + 30.0

Kept = TypeVar("Kept")
Read = TypeVar("Read", contravariant=True)


class Follower(Protocol[Read]):
    """Told in the watch's own thread, one thing at a time: be quick."""

    def changed(self, uid: str, thing: Read, /) -> None: ...

    def deleted(self, uid: str, /) -> None: ...


class Watched(Generic[Kept]):
    """A copy of what `path` lists, as `read` makes it (None: not wanted). `start` follows until `stop`."""

    def __init__(
        self,
        api: Api,
        path: str,
        read: Callable[[Document], Kept | None],
        follower: Follower[Kept],
        label_selector: str = "",
        limit: int = 200_000,
    ) -> None:
        self.path = path
        self.listed = threading.Event()  # once the copy has been whole
        self.connected = False
        self.limit_reached = False
        self._api = api
        self._read = read
        self._follower = follower
        self._query = {"labelSelector": label_selector} if label_selector else {}
        self._limit = limit
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
        # Its thread may sit in a read for minutes: it is not waited for, and touches nothing once it is told.
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
                log.info("the API server no longer has the history of %s: listing anew", self.path)
                version = ""
            except UnreachableError as error:
                self._tell_outage(error)
            except ApiError as error:
                log.warning("cannot watch %s: %s", self.path, error)
                version = ""
            except Exception:
                log.exception("the watch of %s failed; listing anew", self.path)
                version = ""
            self.connected = False
            # Spread, or all replicas come back in the same moment.
            self._stopping.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _tell_outage(self, error: UnreachableError) -> None:
        level = logging.WARNING if self.connected else logging.DEBUG
        log.log(level, "lost sight of %s, keeping what is known: %s", self.path, error)

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
        except Exception:  # else all would be listed anew, for ever
            log.exception("an object of %s could not be read", self.path)
            thing = None
        if thing is None or self._stopping.is_set():
            self._drop(uid)
            return uid
        with self._lock:
            if uid not in self._known and len(self._known) >= self._limit:
                self.limit_reached = True
                return uid
            if self._known.get(uid) == thing:
                return uid
            self._known[uid] = thing
        self._tell(lambda: self._follower.changed(uid, thing))
        return uid

    def _drop(self, uid: str) -> None:
        with self._lock:
            was_known = self._known.pop(uid, None) is not None
        if was_known and not self._stopping.is_set():
            self._tell(lambda: self._follower.deleted(uid))

    def _tell(self, say: Callable[[], None]) -> None:
        try:
            say()
        except Exception:  # one odd object must not end the watch of all others
            log.exception("an object of %s could not be taken in", self.path)


def _uid(document: Document) -> str:
    return str(document["metadata"]["uid"])
