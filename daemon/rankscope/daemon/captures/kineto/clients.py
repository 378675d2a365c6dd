"""Polling libkineto clients: one entry per client, keyed by its socket; the kernel attests the process."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeAlias

# libkineto polls every 5 s (1 s where configured); after some missed polls the process is gone or stopped.
STALE_SECONDS: Final = 30.0
# A namespace is a container or the host: a flood from one displaces only its own clients.
CLIENTS_PER_NAMESPACE: Final = 1024
MAX_CLIENTS: Final = 16384
# Clients of one process: usually one, but a process that reloads libkineto may leave an old one behind.
CLIENTS_PER_PROCESS: Final = 4
DEFAULT_POLL_SECONDS: Final = 5.0

Address: TypeAlias = bytes | str
_Key: TypeAlias = tuple[int, Address]


@dataclass(frozen=True)
class Client:
    namespace: int
    address: Address
    pid: int  # from the kernel, in the daemon's pid namespace
    polled_at: float  # monotonic
    poll_seconds: float  # between its last two polls; the default before that
    is_ready: bool  # accepts a configuration; False while a profiler runs

    def polls_in_seconds(self, now: float) -> float:
        """Seconds until its next poll; a late poll may come a whole period later."""
        left = self.polled_at + self.poll_seconds - now
        return left if left > 0 else self.poll_seconds


class Clients:
    """Bounded: the client of a namespace that has been silent longest is dropped, and a process that opens many
    clients displaces only its own."""

    def __init__(self) -> None:
        self._clients: OrderedDict[_Key, Client] = OrderedDict()
        self._of_process: dict[int, list[_Key]] = {}
        self._of_namespace: dict[int, OrderedDict[_Key, None]] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def polled(self, namespace: int, address: Address, pid: int, is_ready: bool, now: float) -> Client:
        key = (namespace, address)
        before = self._clients.get(key)
        if before is not None and before.pid != pid:
            before = None
        since = now - before.polled_at if before else 0.0
        # Two polls in a row come at start-up, and a late one after a pause: neither shows the period.
        period = since if 0.5 <= since <= STALE_SECONDS else before.poll_seconds if before else DEFAULT_POLL_SECONDS
        client = Client(namespace, address, pid, now, period, is_ready)
        if key in self._clients:
            self._drop(key)
        self._make_room(namespace, pid)
        self._clients[key] = client
        self._of_process.setdefault(pid, []).append(key)
        self._of_namespace.setdefault(namespace, OrderedDict())[key] = None
        return client

    def of(self, pid: int) -> Client | None:
        """The client of a process that polled last."""
        clients = [self._clients[key] for key in self._of_process.get(pid, ())]
        return max(clients, key=lambda client: client.polled_at, default=None)

    def forget_stale(self, now: float) -> None:
        while self._clients:
            key, oldest = next(iter(self._clients.items()))
            if now - oldest.polled_at < STALE_SECONDS:
                return
            self._drop(key)

    def forget_namespace(self, namespace: int) -> None:
        for key in list(self._of_namespace.get(namespace, ())):
            self._drop(key)

    def _make_room(self, namespace: int, pid: int) -> None:
        of_process = self._of_process.get(pid, [])
        of_namespace = self._of_namespace.get(namespace, OrderedDict())
        if len(of_process) >= CLIENTS_PER_PROCESS:
            self._drop(of_process[0])
        elif len(of_namespace) >= CLIENTS_PER_NAMESPACE:
            self._drop(next(iter(of_namespace)))
        elif len(self._clients) >= MAX_CLIENTS:
            self._drop(next(iter(self._clients)))

    def _drop(self, key: _Key) -> None:
        client = self._clients.pop(key)
        of_process, of_namespace = self._of_process[client.pid], self._of_namespace[client.namespace]
        of_process.remove(key)
        if not of_process:
            del self._of_process[client.pid]
        del of_namespace[key]
        if not of_namespace:
            del self._of_namespace[client.namespace]
