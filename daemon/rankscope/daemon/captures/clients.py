"""Who polls us: one entry for each libkineto client, known by its socket, its process vouched for by the kernel."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# libkineto polls every 5 s (1 s where configured); after some missed polls the process is gone or stopped.
STALE_SECONDS = 30.0
CLIENTS_LIMIT = 8192
# Clients of one process: a process is one client, but one that reloads libkineto may leave an old one behind.
CLIENTS_PER_PROCESS = 4
DEFAULT_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class Client:
    namespace: int
    address: bytes | str
    pid: int  # as the kernel told us, in our own pid namespace
    polled_at: float  # monotonic
    poll_seconds: float  # between its last two polls; the default until there were two
    is_ready: bool  # it would take a configuration; False while a profiler runs


class Clients:
    """Bounded: the longest silent client makes room, and a process that opens many only displaces its own."""

    def __init__(self) -> None:
        self._clients: OrderedDict[tuple[int, bytes | str], Client] = OrderedDict()
        self._of_process: dict[int, list[tuple[int, bytes | str]]] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def polled(self, namespace: int, address: bytes | str, pid: int, is_ready: bool, now: float) -> Client:
        key = (namespace, address)
        before = self._clients.pop(key, None)
        if before is not None and before.pid != pid:
            self._forget_key(key, before.pid)
            before = None
        since = now - before.polled_at if before else 0.0
        # Two polls in a row come at start-up, and a late one after a pause: neither tells the period.
        period = since if 0.5 <= since <= STALE_SECONDS else before.poll_seconds if before else DEFAULT_POLL_SECONDS
        client = Client(namespace, address, pid, now, period, is_ready)
        self._clients[key] = client
        if before is None:
            self._remember_key(key, pid)
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
        for key in [key for key in self._clients if key[0] == namespace]:
            self._drop(key)

    def _remember_key(self, key: tuple[int, bytes | str], pid: int) -> None:
        keys = self._of_process.setdefault(pid, [])
        keys.append(key)
        if len(keys) > CLIENTS_PER_PROCESS:
            self._drop(keys[0])
        elif len(self._clients) > CLIENTS_LIMIT:
            self._drop(next(iter(self._clients)))

    def _drop(self, key: tuple[int, bytes | str]) -> None:
        self._forget_key(key, self._clients.pop(key).pid)

    def _forget_key(self, key: tuple[int, bytes | str], pid: int) -> None:
        keys = self._of_process[pid]
        keys.remove(key)
        if not keys:
            del self._of_process[pid]
