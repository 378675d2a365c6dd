"""The daemon's side of libkineto's protocol: a thread that answers polls, on one socket per network namespace.

What keeps trainers alive, and is tested: an answer leaves through the very socket on which the poll came in, goes to
the very address it came from, and only if the kernel vouches for a sender that lives in that namespace. From any other
socket an answer makes libkineto abort its process. In doubt: silence, which libkineto takes for "nothing to do"."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rankscope.daemon.captures import wire
from rankscope.daemon.captures.clients import Client, Clients
from rankscope.daemon.captures.namespaces import SocketError, bind_here, bind_in, network_namespace

log = logging.getLogger(__name__)

_CREDENTIALS: Final = struct.Struct("=iII")
# A job polls once a second at most; what comes above this rate on one socket waits, so that a flood costs the daemon
# two hundredths of a core and nobody in another namespace anything.
DATAGRAMS_PER_SECOND: Final = 2000
BATCH: Final = 64
RETRY_SECONDS: Final = 30.0
HOUSEKEEPING_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = BATCH / DATAGRAMS_PER_SECOND


@dataclass(frozen=True)
class Offer:
    """A configuration that waits for its process to poll. `handed` is called once, in the endpoint's thread."""

    text: str
    hand_before: float  # monotonic: later its start time would be too near
    handed: Callable[[], object]


@dataclass(frozen=True)
class Tallies:
    answered: int = 0
    malformed: int = 0
    unvouched: int = 0
    deferred: int = 0  # batches put off by the rate limit


@dataclass
class _Place:
    """One socket. `socket_directory` is set for file sockets, which serve all namespaces."""

    endpoint: socket.socket
    namespace: int | None
    socket_directory: str | None
    allowance: float = DATAGRAMS_PER_SECOND
    filled_at: float = 0.0
    is_paused: bool = False


class Endpoint:
    """`watch` tells which processes there are; `offer` leaves a configuration for one of them."""

    def __init__(
        self,
        *,
        socket_directory: str | None = None,
        proc_root: Path = Path("/proc"),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc_root = proc_root
        self._monotonic = monotonic
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._socket_directory = socket_directory
        self._places: dict[int | str, _Place] = {}
        self._failures: dict[int | str, tuple[str, float]] = {}
        self._clients = Clients()
        self._offers: dict[int, Offer] = {}
        self._wanted: Mapping[int, int] = {}
        self._lock = threading.Lock()
        self._tallies = dict.fromkeys(Tallies.__dataclass_fields__, 0)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rankscope-kineto", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(2.0)
        for place in list(self._places.values()):
            self._close(place)
        self._wake_reader.close()
        self._wake_writer.close()
        self._selector.close()

    def watch(self, namespaces: Mapping[int, int]) -> None:
        """Network namespaces to be present in, each with a process that lives there. Returns at once."""
        self._wanted = dict(namespaces)
        self._wake()

    def offer(self, pid: int, offer: Offer) -> None:
        with self._lock:
            self._offers[pid] = offer

    def withdraw(self, pid: int) -> bool:
        """Whether the offer was still there: False means that it has been handed out."""
        with self._lock:
            return self._offers.pop(pid, None) is not None

    def client(self, pid: int) -> Client | None:
        with self._lock:
            return self._clients.of(pid)

    def client_count(self) -> int:
        with self._lock:
            return len(self._clients)

    def failure(self, namespace: int) -> str | None:
        """Why there is no socket in a namespace."""
        found = self._failures.get(namespace) or self._failures.get(self._socket_directory or "")
        return found[0] if found else None

    @property
    def tallies(self) -> Tallies:
        return Tallies(**self._tallies)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway
            self._wake_writer.send(b"\0")

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:  # whatever a datagram did, the next one is answered
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
        self._settle_places()
        with self._lock:
            self._clients.forget_stale(self._monotonic())

    def _settle_places(self) -> None:
        """Sockets where ranks live, and nowhere else."""
        if self._socket_directory is not None:
            self._ensure(self._socket_directory, self._bind_file)
        wanted, here = self._wanted, network_namespace(proc_root=self._proc_root)
        for namespace, pid in wanted.items():
            self._ensure(namespace, bind_here if namespace == here else partial(bind_in, pid, self._proc_root))
        for key in [key for key in self._places if isinstance(key, int) and key not in wanted]:
            self._close(self._places.pop(key))
            with self._lock:
                self._clients.forget_namespace(key)
        for gone in [key for key in self._failures if isinstance(key, int) and key not in wanted]:
            del self._failures[gone]

    def _ensure(self, key: int | str, bind: Callable[[], socket.socket]) -> None:
        if key in self._places:
            return
        _, failed_at = self._failures.get(key, ("", float("-inf")))
        now = self._monotonic()
        if now - failed_at < RETRY_SECONDS:
            return
        try:
            endpoint = bind()
        except SocketError as error:
            if key not in self._failures:
                log.warning("captures: %s", error)
            self._failures[key] = (str(error), now)
            return
        self._failures.pop(key, None)
        place = _Place(
            endpoint,
            namespace=key if isinstance(key, int) else None,
            socket_directory=key if isinstance(key, str) else None,
            filled_at=now,
        )
        self._places[key] = place
        self._selector.register(endpoint, selectors.EVENT_READ, place)

    def _bind_file(self) -> socket.socket:
        assert self._socket_directory is not None
        path = f"{self._socket_directory}/dynolog"
        endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            if Path(path).is_socket():
                Path(path).unlink()  # a stale one: the daemon's own lock says that no other daemon of ours lives
            endpoint.bind(path)
            Path(path).chmod(0o666)  # trainers run as other users
        except OSError as error:
            endpoint.close()
            raise SocketError(f"{path} cannot be bound: {error.strerror}; make the directory writable") from error
        return endpoint

    def _close(self, place: _Place) -> None:
        if not place.is_paused:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(place.endpoint)
        place.endpoint.close()
        if place.socket_directory is not None:
            # A socket file that nobody serves would make every trainer wait 8 s at its exit.
            Path(f"{place.socket_directory}/dynolog").unlink(missing_ok=True)

    def _serve(self, place: _Place) -> None:
        now = self._monotonic()
        place.allowance = min(DATAGRAMS_PER_SECOND, place.allowance + (now - place.filled_at) * DATAGRAMS_PER_SECOND)
        place.filled_at = now
        for _ in range(BATCH):
            if place.allowance < 1:
                self._tallies["deferred"] += 1
                self._selector.unregister(place.endpoint)
                place.is_paused = True
                return
            place.allowance -= 1
            try:
                datagram, ancillary, flags, address = place.endpoint.recvmsg(
                    wire.DATAGRAM_LIMIT, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except (BlockingIOError, InterruptedError):
                return
            if flags & socket.MSG_TRUNC:
                self._tallies["malformed"] += 1
                continue
            self._answer(place, datagram, _sender(ancillary), address, now)

    def _resume(self) -> None:
        now = self._monotonic()
        for place in self._places.values():
            if place.is_paused and (now - place.filled_at) * DATAGRAMS_PER_SECOND >= BATCH:
                place.is_paused = False
                self._selector.register(place.endpoint, selectors.EVENT_READ, place)

    def _answer(self, place: _Place, datagram: bytes, pid: int, address: bytes | str, now: float) -> None:
        try:
            message = wire.parse(datagram)
        except wire.MalformedError:
            self._tallies["malformed"] += 1
            return
        namespace = self._vouched_namespace(place, pid, address)
        if namespace is None:
            self._tallies["unvouched"] += 1
            return
        if isinstance(message, wire.Registration):
            with self._lock:
                registered = len(self._clients)
            self._send(place, wire.count(registered + 1), address)
            return
        with self._lock:
            self._clients.polled(namespace, address, pid, message.is_ready, now)
            offer = self._offers.get(pid)
        if offer is not None and not (message.is_ready and now < offer.hand_before):
            offer = None
        if self._send(place, wire.configuration(offer.text if offer else ""), address) and offer is not None:
            with self._lock:
                self._offers.pop(pid, None)
            offer.handed()

    def _vouched_namespace(self, place: _Place, pid: int, address: bytes | str) -> int | None:
        """The namespace of the sender, if it is who it seems to be and can be answered."""
        if pid <= 0 or not address:
            return None
        if place.socket_directory is not None:
            # libkineto compares the directory as a string, and aborts where it differs.
            if not isinstance(address, str) or address.rpartition("/")[0] != place.socket_directory:
                return None
        elif not isinstance(address, bytes) or address[:1] != b"\0":
            return None
        try:
            namespace = network_namespace(pid, self._proc_root)
        except OSError:
            return None
        return namespace if place.namespace in (None, namespace) else None

    def _send(self, place: _Place, answer: bytes, address: bytes | str) -> bool:
        try:
            place.endpoint.sendto(answer, address)
        except OSError:  # gone, or its queue is full: it polls again
            return False
        self._tallies["answered"] += 1
        return True


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    """The sender's pid as the kernel knows it, in our pid namespace; 0 if it has none here."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack_from(data)[0])
    return 0
