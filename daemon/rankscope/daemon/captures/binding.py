"""Binds sockets where ranks live, and lets go of them where none live any more. In a thread of its own: to enter a
namespace takes tens of milliseconds, and libkineto waits for its answer no longer than that."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from rankscope.daemon.captures.namespaces import SlowError, SocketError, bind_here, bind_in, network_namespace
from rankscope.daemon.captures.socket_files import bind_file, remove_dead_clients

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 30.0
RETRY_SLOW_SECONDS: Final = 2.0
SETTLE_SECONDS: Final = 1.0
SWEEP_SECONDS: Final = 60.0
# Of one node. A container can make namespaces by the thousand, each with a process that looks like a rank.
NAMESPACES_LIMIT: Final = 256

# A network namespace, or the directory of a file socket.
Key: TypeAlias = int | str


class Keeper(Protocol):
    """Takes bound sockets over, in the binder's thread."""

    def bound(self, key: Key, endpoint: socket.socket) -> None: ...

    def unwanted(self, key: Key) -> None: ...


@dataclass(frozen=True)
class _Failure:
    text: str
    pid: int | None
    failed_at: float
    retry_seconds: float


class Binder:
    def __init__(
        self,
        keeper: Keeper,
        socket_directory: str | None = None,
        proc_root: Path = Path("/proc"),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keeper = keeper
        self._socket_directory = socket_directory
        self._proc_root = proc_root
        self._monotonic = monotonic
        self._wanted: Mapping[int, int] = {}
        self._bound: set[Key] = set()
        self._failures: dict[Key, _Failure] = {}
        self._swept_at = float("-inf")
        self._woken = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="rankscope-binder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(2.0)

    def want(self, namespaces: Mapping[int, int]) -> None:
        """Network namespaces to be present in, each with a process that lives there. Returns at once."""
        self._wanted = dict(namespaces)
        self._woken.set()

    def failure(self, namespace: int) -> str | None:
        """Why there is no socket in a namespace, nor a file socket instead."""
        if self._socket_directory in self._bound:
            return None
        found = self._failures.get(namespace) or self._failures.get(self._socket_directory or "")
        return found.text if found else None

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._settle()
            except Exception:  # the next namespace must not suffer for this one
                log.exception("binding libkineto's sockets")
            self._woken.wait(SETTLE_SECONDS)
            self._woken.clear()

    def _settle(self) -> None:
        if self._socket_directory is not None:
            self._ensure(self._socket_directory, None)
            self._sweep(self._socket_directory)
        wanted = self._wanted
        for key in [key for key in self._bound if isinstance(key, int) and key not in wanted]:
            self._bound.remove(key)
            self._keeper.unwanted(key)
        for gone in [key for key in self._failures if isinstance(key, int) and key not in wanted]:
            del self._failures[gone]
        for namespace, pid in wanted.items():
            if self._stopping:
                return
            self._ensure(namespace, pid)

    def _ensure(self, key: Key, pid: int | None) -> None:
        if key in self._bound:
            return
        failed, now = self._failures.get(key), self._monotonic()
        if failed is not None and failed.pid == pid and now - failed.failed_at < failed.retry_seconds:
            return
        try:
            endpoint = self._bind(key, pid)
        except SocketError as error:
            if failed is None:
                log.warning("captures: %s", error)
            retry_seconds = RETRY_SLOW_SECONDS if isinstance(error, SlowError) else RETRY_SECONDS
            self._failures[key] = _Failure(str(error), pid, self._monotonic(), retry_seconds)
            return
        self._failures.pop(key, None)
        self._bound.add(key)
        self._keeper.bound(key, endpoint)

    def _bind(self, key: Key, pid: int | None) -> socket.socket:
        if isinstance(key, str) or pid is None:
            return bind_file(str(key))
        if len(self._bound) >= NAMESPACES_LIMIT:
            raise SocketError(f"ranks in more than {NAMESPACES_LIMIT} network namespaces; the first ones are served")
        if key == network_namespace(proc_root=self._proc_root):
            return bind_here()
        return bind_in(pid, key, self._proc_root)

    def _sweep(self, directory: str) -> None:
        now = self._monotonic()
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = now
            remove_dead_clients(directory)
