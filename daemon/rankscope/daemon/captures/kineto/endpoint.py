"""The daemon's side of libkineto's protocol: a thread that answers polls, on one socket per network namespace.

These rules keep trainers alive, and are tested: an answer leaves through the socket on which the poll arrived, goes
to the address it came from, only if the kernel attests a sender in that namespace, and only while the sender waits
for it. An answer from any other socket makes libkineto abort its process. An answer that it does not wait for is
taken as the answer to its next poll, and so on forever: every configuration then arrives a poll late. In doubt, do
not answer: libkineto takes silence for "nothing to do", and it puts such a client in step again."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from rankscope.common.token_bucket import TokenBucket
from rankscope.daemon import procfs
from rankscope.daemon.captures.kineto import datagrams
from rankscope.daemon.captures.kineto.clients import MAX_CLIENTS, Address, Client, Clients
from rankscope.daemon.captures.kineto.datagrams import Datagram, receive
from rankscope.daemon.captures.kineto.sockets import (
    NO_TENANTS,
    Binder,
    Key,
    belongs_to_client,
    network_namespace,
    unbind_file,
)

# A job polls at most once a second. Datagrams above this rate on one socket wait, so that a flood costs the daemon a
# few hundredths of a core and other namespaces nothing.
DATAGRAMS_PER_SECOND: Final = 2000
BATCH: Final = 64
MAX_KNOWN: Final = 4096
PAUSE_SECONDS: Final = BATCH / DATAGRAMS_PER_SECOND
log = logging.getLogger(__name__)
HOUSEKEEPING_SECONDS: Final = 1.0
# libkineto looks for the answer at least five times, 10 ms apart, and then gives up.
ANSWER_WITHIN_SECONDS: Final = 0.04
# libkineto tries to send for 10 s and sleeps for half of that before its last try. If the last try succeeds, libkineto
# treats it as failed and does not wait for the answer. So the first datagram of a client on a young socket is not
# answered.
SETTLING_SECONDS: Final = 15.0
NICENESS: Final = -10


# A socket that receives polls: its rate limit, and which senders it may answer.


@dataclass
class Place:
    """Either `namespace` is set, or `directory`: a file socket, which serves all namespaces."""

    endpoint: socket.socket
    namespace: int | None
    directory: str | None
    bound_at: float  # monotonic
    bucket: TokenBucket = field(default_factory=lambda: TokenBucket(DATAGRAMS_PER_SECOND, DATAGRAMS_PER_SECOND))
    is_paused: bool = False
    known: set[Address] = field(default_factory=set)

    def is_stranger(self, address: Address, is_young: bool) -> bool:
        """Whether this is the first datagram of a client while the socket is young."""
        if not is_young:
            self.known.clear()
            return False
        if address in self.known:
            return False
        if len(self.known) < MAX_KNOWN:
            self.known.add(address)
        return True

    def vouched_namespace(self, datagram: Datagram, proc_root: Path) -> int | None:
        """The network namespace of the sender, if the kernel attests it and an answer reaches only the sender."""
        address = datagram.address
        if datagram.pid <= 0 or not address:
            return None
        if self.directory is not None:
            if not isinstance(address, str) or not belongs_to_client(address, self.directory, datagram.uid):
                return None
        elif not isinstance(address, bytes) or address[:1] != b"\0":
            return None
        try:
            namespace = network_namespace(datagram.pid, proc_root)
        except OSError:
            return None
        return namespace if self.namespace in (None, namespace) else None


@dataclass(frozen=True)
class Offer:
    """A configuration for one incarnation of a process, sent at its next poll. Both functions are called in the
    endpoint's thread, under its lock: they must be quick and must not call the endpoint."""

    start_ticks: int
    compose: Callable[[], str | None]  # the text for a process that is ready now; None: not at this poll
    handed: Callable[[], object]  # called once, when the composed text has been sent


class Endpoint:
    """`watch` sets the processes to serve; `offer` leaves a configuration for one of them.

    `tallies` counts datagrams: answered, malformed, unvouched (not attested by the kernel, or not of this namespace or
    directory), late, skipped and unsent; and batches that were deferred by the rate limit."""

    def __init__(
        self,
        *,
        socket_directory: str | None = None,
        proc_root: Path = Path("/proc"),
        monotonic: Callable[[], float] = time.monotonic,
        settling_seconds: float = SETTLING_SECONDS,
    ) -> None:
        self._proc_root = proc_root
        self._settling_seconds = settling_seconds
        self._monotonic = monotonic
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._changes: SimpleQueue[tuple[Key, socket.socket | None]] = SimpleQueue()
        self._binder = Binder(self._change, socket_directory, proc_root, monotonic)
        self._places: dict[Key, Place] = {}
        self._clients = Clients()
        self._offers: dict[int, Offer] = {}
        self._skipped: set[int] = set()
        self._lock = threading.Lock()
        self.tallies: Counter[str] = Counter()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rankscope-kineto", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._binder.start()

    def stop(self) -> None:
        self._stopping = True
        self._binder.stop()
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(2.0)
        self._take_changes()
        for key in list(self._places):
            self._let_go(key)
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def watch(self, namespaces: Mapping[int, int], tenants: Mapping[int, str] = NO_TENANTS) -> None:
        """The network namespaces to serve, each with a process that lives there and the tenant that it is for. Returns
        at once."""
        self._binder.want(namespaces, tenants)

    def offer(self, pid: int, offer: Offer) -> None:
        with self._lock:
            self._offers[pid] = offer

    def withdraw(self, pid: int) -> bool:
        """Whether the offer was still open: False means that it has been sent."""
        with self._lock:
            return self._offers.pop(pid, None) is not None

    def skip_next_poll(self, pid: int) -> None:
        """Do not answer the next poll of a process that seems to be an answer behind."""
        with self._lock:
            if len(self._skipped) < MAX_CLIENTS:
                self._skipped.add(pid)

    def skips_next_poll_of(self, pid: int) -> bool:
        with self._lock:
            return pid in self._skipped

    def client(self, pid: int) -> Client | None:
        with self._lock:
            return self._clients.of(pid)

    def client_count(self) -> int:
        with self._lock:
            return len(self._clients)

    def failure(self, namespace: int) -> str | None:
        """Why there is no socket in a namespace."""
        return self._binder.failure(namespace)

    def served_seconds(self, namespace: int) -> float | None:
        """For how long processes in a namespace have been served; None: they are not."""
        places = [place for place in list(self._places.values()) if place.namespace in (None, namespace)]
        return max((self._monotonic() - place.bound_at for place in places), default=None)

    def _change(self, key: Key, endpoint: socket.socket | None) -> None:
        self._changes.put((key, endpoint))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway
            self._wake_writer.send(b"\0")

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # without the privilege it answers slightly later
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._stopping:
            try:
                self._turn()
            except Exception:  # a failing datagram must not stop the next answer
                log.exception("libkineto endpoint")
                time.sleep(0.1)

    def _turn(self) -> None:
        paused = any(place.is_paused for place in self._places.values())
        for key, _ in self._selector.select(PAUSE_SECONDS if paused else HOUSEKEEPING_SECONDS):
            if key.fileobj is self._wake_reader:
                with contextlib.suppress(BlockingIOError):
                    self._wake_reader.recv(4096)
            else:
                self._serve(key.data)
        self._resume()
        self._take_changes()
        with self._lock:
            self._clients.forget_stale(self._monotonic())

    def _take_changes(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                key, endpoint = self._changes.get_nowait()
                if endpoint is None:
                    self._let_go(key)
                else:
                    self._move_in(key, endpoint)

    def _move_in(self, key: Key, endpoint: socket.socket) -> None:
        now = self._monotonic()
        namespace, directory = (key, None) if isinstance(key, int) else (None, key)
        place = Place(endpoint, namespace, directory, bound_at=now)
        self._places[key] = place
        self._selector.register(endpoint, selectors.EVENT_READ, place)

    def _let_go(self, key: Key) -> None:
        place = self._places.pop(key)
        if not place.is_paused:
            self._selector.unregister(place.endpoint)
        if place.directory is not None:
            unbind_file(place.directory, place.endpoint)
        place.endpoint.close()
        if place.namespace is not None:
            with self._lock:
                self._clients.forget_namespace(place.namespace)

    def _serve(self, place: Place) -> None:
        now = self._monotonic()
        for _ in range(BATCH):
            if not place.bucket.take(now):
                self.tallies["deferred"] += 1
                self._selector.unregister(place.endpoint)
                place.is_paused = True
                return
            datagram = receive(place.endpoint)
            if datagram is None:
                return
            self._answer(place, datagram)

    def _resume(self) -> None:
        now = self._monotonic()
        for place in self._places.values():
            if place.is_paused and place.bucket.wait_seconds(now, BATCH) == 0:
                place.is_paused = False
                self._selector.register(place.endpoint, selectors.EVENT_READ, place)

    def _answer(self, place: Place, datagram: Datagram) -> None:
        try:
            if not datagram.is_whole:
                raise datagrams.MalformedError("longer than any datagram of this protocol")
            message = datagrams.parse(datagram.content)
        except datagrams.MalformedError:
            self.tallies["malformed"] += 1
            return
        namespace = place.vouched_namespace(datagram, self._proc_root)
        if namespace is None:
            self.tallies["unvouched"] += 1
            return
        now = self._monotonic()
        is_settling = place.is_stranger(datagram.address, now - place.bound_at < self._settling_seconds)
        with self._lock:
            if isinstance(message, datagrams.Request):
                self._clients.polled(namespace, datagram.address, datagram.pid, message.is_ready, now)
            if is_settling or datagram.pid in self._skipped:
                self._skipped.discard(datagram.pid)
                self.tallies["skipped"] += 1
                return
            if isinstance(message, datagrams.Registration):
                self._send(place, datagrams.count(len(self._clients) + 1), datagram)
                return
            offer, text = self._offered(datagram.pid) if message.is_ready else (None, None)
            if self._send(place, datagrams.configuration(text or ""), datagram) and offer is not None:
                del self._offers[datagram.pid]
                offer.handed()

    def _offered(self, pid: int) -> tuple[Offer | None, str | None]:
        offer = self._offers.get(pid)
        if offer is None or not procfs.is_alive(f"{self._proc_root}/{pid}", offer.start_ticks):
            return None, None
        text = offer.compose()
        return (None, None) if text is None else (offer, text)

    def _send(self, place: Place, answer: bytes, datagram: Datagram) -> bool:
        # Checked last: any delay on the way here counts.
        if not -0.001 <= time.time() - datagram.sent_unix_seconds < ANSWER_WITHIN_SECONDS:
            self.tallies["late"] += 1
            return False
        try:
            place.endpoint.sendto(answer, socket.MSG_DONTWAIT, datagram.address)
        except OSError:  # gone, or its queue is full: it polls again
            self.tallies["unsent"] += 1
            return False
        self.tallies["answered"] += 1
        return True
