"""Writes to the API server: queued, at a bounded pace, and only when the content is new; Kubernetes Events too.

The newest write of an object replaces the one before. While the API server is away writes wait, so that verdicts and
metrics go on, and afterwards the present state is written, not the backlog."""

from __future__ import annotations

import hashlib
import logging
import random
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Literal

import msgspec

from rankscope.common.token_bucket import TokenBucket
from rankscope.operator.kube.api_client import (
    Api,
    ApiError,
    ConflictError,
    Document,
    MissingError,
    ObjectApi,
    UnreachableError,
)
from rankscope.operator.kube.leader_election import Leases
from rankscope.operator.kube.objects import KubeObject, status_patch

log = logging.getLogger(__name__)

WRITES_PER_SECOND = 20.0
BURST_WRITES = 100
MAX_WAITING = 50_000
MAX_NAMESPACES = 10_000
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 15.0
# A refused write is tried again, later and later: an API server that has just started refuses everything until it has
# read its roles, and somebody may have corrected a role meanwhile.
FIRST_REFUSED_SECONDS = 1.0
MAX_REFUSED_SECONDS = 60.0


@dataclass(frozen=True)
class Write:
    """`send` writes `content`, which is compared so that the same thing is not written twice. Namespaces take turns:
    one whose objects change all the time does not hold up the others."""

    key: str
    content: object = field(repr=False)
    send: Callable[[], object] = field(repr=False)
    namespace: str = ""


class Outbox:
    """`put` never blocks. Runs from `start` to `stop`; `stop` gives waiting writes a moment."""

    def __init__(self) -> None:
        self.written_total = 0
        self.failed_total = 0
        self._bucket = TokenBucket(BURST_WRITES, WRITES_PER_SECOND)
        self._waiting: OrderedDict[str, Write] = OrderedDict()
        self._written: OrderedDict[str, object] = OrderedDict()
        self._refused: dict[str, tuple[float, float]] = {}  # until when, and how long it was put off
        self._served: OrderedDict[str, int] = OrderedDict()  # namespace to the number of its last turn
        self._turns = 0
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        with self._changed:
            return len(self._waiting)

    def put(self, write: Write) -> None:
        with self._changed:
            if self._written.get(write.key) == write.content:
                self._waiting.pop(write.key, None)
                return
            if write.key not in self._waiting and len(self._waiting) >= MAX_WAITING:
                self._refused.pop(self._waiting.popitem(last=False)[0], None)
            self._waiting[write.key] = write
            self._changed.notify()

    def forget(self, key: str) -> None:
        """Of an object that is gone, or that somebody else has written."""
        with self._changed:
            self._waiting.pop(key, None)
            self._written.pop(key, None)
            self._refused.pop(key, None)

    def forget_all(self) -> None:
        """When another replica was in charge meanwhile."""
        with self._changed:
            self._written.clear()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rankscope-writes", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 3.0) -> None:
        give_up = time.monotonic() + seconds
        while self.waiting and time.monotonic() < give_up:
            time.sleep(0.05)
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            write = self._next()
            if write is None:
                return
            time.sleep(self._bucket.wait_seconds(time.monotonic()))
            self._bucket.spend(time.monotonic())
            if self._send(write):
                pause = FIRST_PAUSE_SECONDS
            else:
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _next(self) -> Write | None:
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                first: dict[str, Write] = {}
                for key, write in self._waiting.items():
                    if write.namespace not in first and self._refused.get(key, (0.0, 0.0))[0] <= now:
                        first[write.namespace] = write
                if first:
                    return self._turn_of(min(first, key=lambda namespace: self._served.get(namespace, 0)), first)
                self._changed.wait(1.0)
            return None

    def _turn_of(self, namespace: str, first: Mapping[str, Write]) -> Write:
        self._turns += 1
        self._served[namespace] = self._turns
        self._served.move_to_end(namespace)
        if len(self._served) > MAX_NAMESPACES:
            self._served.popitem(last=False)
        return first[namespace]

    def _send(self, write: Write) -> bool:
        """False if the API server is away: everything waits."""
        try:
            write.send()
        except UnreachableError as error:
            self.failed_total += 1
            log.debug("%s waits: %s", write.key, error)
            return False
        except (MissingError, ConflictError) as error:
            # Deleted, or written by somebody else: the controller sees that in a watch and decides again.
            log.debug("%s is void: %s", write.key, error)
            self._done(write, stands=False)
        except ApiError as error:
            self.failed_total += 1
            put_off = self._put_off(write.key)
            log.warning("%s cannot be written, trying again in %.0f s: %s", write.key, put_off, error)
        except Exception:
            self.failed_total += 1
            log.exception("%s could not be written", write.key)
            self._done(write, stands=False)
        else:
            self.written_total += 1
            self._done(write, stands=True)
        return True

    def _put_off(self, key: str) -> float:
        with self._changed:
            _, before = self._refused.get(key, (0.0, FIRST_REFUSED_SECONDS / 2))
            seconds = min(2 * before, MAX_REFUSED_SECONDS)
            self._refused[key] = (time.monotonic() + seconds, seconds)
        return seconds

    def _done(self, write: Write, stands: bool) -> None:
        with self._changed:
            if self._waiting.get(write.key) is write:
                del self._waiting[write.key]
            self._refused.pop(write.key, None)
            if stands:
                self._written[write.key] = write.content
                self._written.move_to_end(write.key)
                if len(self._written) > MAX_WAITING:
                    self._written.popitem(last=False)


class ObjectWriter:
    """Writes our own kinds. Queued writes are dropped once another replica acts for `place`, a run or policy."""

    def __init__(self, api: ObjectApi, outbox: Outbox, leases: Leases) -> None:
        self._api = api
        self._outbox = outbox
        self._leases = leases

    def queue(self, key: str, place: str, content: object, send: Callable[[], object]) -> None:
        def send_if_held() -> None:
            # It may have waited through an outage, and another replica acts for the object by now.
            if not self._leases.holds(place):
                raise ConflictError(409, "NotHeld", f"another replica may act for {place}")
            send()

        self._outbox.put(Write(key, content, send_if_held, place.partition("/")[0]))

    def queue_status(self, thing: KubeObject, status: msgspec.Struct) -> None:
        body = status_patch(thing, status)
        self.queue(_status_key(thing), thing.place, body, lambda: self._api.merge(f"{thing.path}/status", body))

    def write_status(self, thing: KubeObject, status: msgspec.Struct) -> Document:
        """At once, and only if the object is still as it was read. Raises ConflictError."""
        body = {"metadata": {"resourceVersion": thing.version}, **status_patch(thing, status)}
        return self._api.merge(f"{thing.path}/status", body)

    def forget(self, thing: KubeObject) -> None:
        """Of an object that is gone."""
        for key in (_status_key(thing), f"create {thing.plural} {thing.place}"):
            self._outbox.forget(key)

    def forget_key(self, key: str) -> None:
        self._outbox.forget(key)


def _status_key(thing: KubeObject) -> str:
    return f"status {thing.plural} {thing.place}"


# Events, for `kubectl describe`: one for each change, never one for each window.


COMPONENT = "rankscope-operator"
MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True)
class Target:
    """The object of an event."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


class Events:
    def __init__(self, api: Api, outbox: Outbox) -> None:
        self._api = api
        self._outbox = outbox

    def emit(self, target: Target, kind: Literal["Normal", "Warning"], reason: str, message: str, change: str) -> None:
        """`change` identifies what happened: the same change of an object makes one event, also of another replica."""
        digest = hashlib.sha256(f"{target.uid} {reason} {change}".encode()).hexdigest()[:16]
        name = f"{target.name[:200]}.{digest}"
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        body: Document = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": target.namespace},
            "involvedObject": {
                "apiVersion": target.api_version,
                "kind": target.kind,
                "namespace": target.namespace,
                "name": target.name,
                "uid": target.uid,
            },
            "type": kind,
            "reason": reason,
            "message": message[:MESSAGE_CHARACTERS],
            "source": {"component": COMPONENT, "host": socket.gethostname()},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        path = f"/api/v1/namespaces/{target.namespace}/events"
        key = f"event {target.namespace}/{name}"
        self._outbox.put(Write(key, message, lambda: self._create(path, body), target.namespace))

    def _create(self, path: str, body: Document) -> None:
        try:
            self._api.create(path, body)
        except ConflictError:
            return  # made already, before a restart or by another replica
