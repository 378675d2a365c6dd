"""Binds libkineto's sockets in the namespaces where ranks run, and releases them where none run any more.

In a thread of its own: entering a namespace takes tens of milliseconds, longer than libkineto waits for an answer."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, TypeAlias

from rankscope.common.token_bucket import KeyedTokenBuckets
from rankscope.daemon import procfs
from rankscope.daemon.captures.kineto import enter_namespace
from rankscope.daemon.captures.kineto.enter_namespace import bind_at
from rankscope.daemon.captures.kineto.socket_holder import socket_holder
from rankscope.daemon.captures.orders import fair_choice

CHILD_SECONDS: Final = 10.0
NAME: Final = "dynolog"
CLIENT_PREFIX: Final = "dynoconfigclient"
MAX_ENTRIES: Final = 4096
# A client binds its socket long before this, so a socket of that age that refuses has lost its process.
DEAD_AFTER_SECONDS: Final = 60.0
log = logging.getLogger(__name__)
RETRY_SECONDS: Final = 30.0
RETRY_SLOW_SECONDS: Final = 2.0
SETTLE_SECONDS: Final = 1.0
SWEEP_SECONDS: Final = 60.0
# Per node. A container can create thousands of namespaces, each with a process that looks like a rank.
MAX_NAMESPACES: Final = 256
NO_TENANTS: Final[Mapping[int, str]] = {}
TAKEN: Final = (
    "and trainers there take configurations from it: another profiling daemon (dynolog), or a process that should not; "
    "stop it and Rankscope serves them; until then the probe takes captures (RANKSCOPE_PROBE=1)"
)
# Sockets bound for a tenant, each by a process of its own that enters the namespace.
BINDS_BURST: Final = 32
BINDS_PER_SECOND: Final = 0.2
# A network namespace, or the directory of a file socket.
Key: TypeAlias = int | str


# libkineto's daemon sockets by abstract name, one in each network namespace with training processes: abstract names are
# local to a namespace.


class SocketError(Exception):
    """A socket is not available: where, why and what to do."""


class TakenError(SocketError):
    """Another process has the name."""


class SlowError(SocketError):
    """Not now, for lack of CPU; the next attempt may succeed."""


def network_namespace(pid: int | None = None, proc_root: Path = Path("/proc")) -> int:
    """A number that is equal for processes that share a network namespace; the daemon's own by default. Raises
    OSError for a process that is gone."""
    process = proc_root / ("self" if pid is None else str(pid))
    return procfs.BLOCKING.call(str(process), lambda: (process / "ns" / "net").stat().st_ino)


def bind_here() -> socket.socket:
    try:
        return enter_namespace.bind_at(enter_namespace.ABSTRACT_NAME)
    except OSError as error:
        raise _bind_error("the daemon's own network namespace", error.errno or 0, None) from error


def bind_in(pid: int, namespace: int, proc_root: Path = Path("/proc")) -> socket.socket:
    """The socket in the network namespace of a process, which must be the one named. Needs CAP_SYS_ADMIN; takes a
    while."""
    where = f"the network namespace of pid {pid}"
    try:
        process = proc_root / str(pid)
        descriptor = procfs.BLOCKING.call(
            str(process), lambda: os.open(process / "ns" / "net", os.O_RDONLY | os.O_CLOEXEC)
        )
    except OSError as error:
        raise SocketError(f"{where} cannot be opened: {error.strerror}") from error
    try:
        # Meanwhile the process may have moved, or its pid may have been reused.
        if os.fstat(descriptor).st_ino != namespace:
            raise SocketError(f"{where} is another by now")
        return _bind_by_child(descriptor, where)
    except TakenError as error:
        raise _bind_error(where, errno.EADDRINUSE, pid, proc_root) from error
    finally:
        os.close(descriptor)


def _bind_by_child(namespace: int, where: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-I", "-S", enter_namespace.__file__, str(namespace), str(theirs.fileno())]
        try:
            child = subprocess.Popen(
                command, pass_fds=(namespace, theirs.fileno()), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise SocketError(f"{where} cannot be entered: no process to do it: {error.strerror}") from error
        theirs.close()
        try:
            return _receive(ours, where)
        finally:
            child.kill()
            child.wait()


def _receive(channel: socket.socket, where: str) -> socket.socket:
    channel.settimeout(CHILD_SECONDS)
    try:
        message, descriptors, _, _ = socket.recv_fds(channel, 64, 1)
    except TimeoutError as error:
        raise SlowError(f"{where}: no answer within {CHILD_SECONDS:g} s; is this machine overloaded?") from error
    if descriptors:
        endpoint = socket.socket(fileno=descriptors[0])
        endpoint.set_inheritable(False)
        endpoint.setblocking(False)
        return endpoint
    stage, _, number = message.decode().partition(":")
    reason = os.strerror(int(number)) if number else "the helper process died"
    if stage == "bind" and int(number) == errno.EADDRINUSE:
        raise TakenError(where)
    if stage == "bind":
        raise _bind_error(where, int(number))
    raise SocketError(
        f"{where} cannot be entered: {reason}; give the daemon CAP_SYS_ADMIN, or use file sockets "
        "(KINETO_IPC_SOCKET_DIR, see docs/captures.md)"
    )


def _bind_error(where: str, number: int, pid: int | None = None, proc_root: Path = Path("/proc")) -> SocketError:
    text = f"libkineto's socket cannot be bound in {where}: {os.strerror(number)}"
    if number != errno.EADDRINUSE:
        return SocketError(text)
    holder = socket_holder(pid, proc_root) or "a process that has just left it"
    return SocketError(f"{text}; it belongs to {holder}, {TAKEN}")


# libkineto's daemon socket as a file, for daemons that may not enter namespaces: trainers with KINETO_IPC_SOCKET_DIR
# share a directory with the daemon. The directory is not trusted: every trainer can write there.


def bind_file(directory: str) -> socket.socket:
    """The socket in a directory, which is created if missing."""
    path = Path(directory, NAME)
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o1777)  # trainers run as other users and create their own sockets there
        if _is_socket(path):
            if not _is_dead(path):
                raise SocketError(f"{path} is served by another daemon (dynolog?); stop it, or use another directory")
            path.unlink()
        # The exact string that trainers must use: they compare it.
        endpoint = bind_at(f"{directory}/{NAME}")
    except OSError as error:
        reason = error.strerror or str(error)
        raise SocketError(f"{path} cannot be bound: {reason}; make the directory writable, its path short") from error
    with contextlib.suppress(OSError):
        _open_to_all(path)
    return endpoint


def _open_to_all(path: Path) -> None:
    """Only the socket that was just created: other users of the directory can replace it with a link."""
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1:
            Path(f"/proc/self/fd/{descriptor}").chmod(0o666)
    finally:
        os.close(descriptor)


def unbind_file(directory: str, endpoint: socket.socket) -> None:
    """Close it and remove its file: an unserved file makes every trainer wait 8 s at exit."""
    endpoint.close()
    path = Path(directory, NAME)
    with contextlib.suppress(OSError):
        if _is_socket(path) and _is_dead(path):  # else it belongs to another daemon by now
            path.unlink()


def belongs_to_client(address: str, directory: str, uid: int) -> bool:
    """Whether an answer to this address can reach only its sender. libkineto compares the directory as a string and
    aborts its process where it differs; a sender with another root may mean another file by the same name."""
    folder, _, name = address.rpartition("/")
    if folder != directory or not name.startswith(CLIENT_PREFIX):
        return False
    try:
        status = Path(address).lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == uid


def remove_dead_clients(directory: str) -> None:
    """libkineto leaves its client's socket file behind when its process is killed."""
    oldest = time.time() - DEAD_AFTER_SECONDS
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            path = Path(entry.path)
            with contextlib.suppress(OSError):
                is_old = entry.name.startswith(CLIENT_PREFIX) and path.lstat().st_mtime < oldest
                if is_old and _is_socket(path) and _is_dead(path):
                    path.unlink()


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _is_dead(path: Path) -> bool:
    """No process has it open. Connecting sends nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


@dataclass(frozen=True)
class _Failure:
    text: str
    pid: int | None
    failed_at: float
    retry_seconds: float


class Binder:
    """`changed` receives a bound socket, or None for one that is no longer wanted, in the binder's thread."""

    def __init__(
        self,
        changed: Callable[[Key, socket.socket | None], None],
        socket_directory: str | None = None,
        proc_root: Path = Path("/proc"),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._changed = changed
        self._socket_directory = socket_directory
        self._proc_root = proc_root
        self._monotonic = monotonic
        self._wanted: Mapping[int, int] = {}
        self._tenants: Mapping[int, str] = {}
        self._bound: set[Key] = set()
        self._failures: dict[Key, _Failure] = {}
        self._swept_at = float("-inf")
        self._binds = KeyedTokenBuckets(BINDS_BURST, BINDS_PER_SECOND, monotonic=monotonic)
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

    def want(self, namespaces: Mapping[int, int], tenants: Mapping[int, str] = NO_TENANTS) -> None:
        """The network namespaces to serve, each with a process that lives there and the tenant that it is for. Returns
        at once."""
        self._tenants, self._wanted = dict(tenants), dict(namespaces)
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
            except Exception:  # a failure in one namespace does not affect the next
                log.exception("binding libkineto's sockets")
            self._woken.wait(SETTLE_SECONDS)
            self._woken.clear()

    def _settle(self) -> None:
        if self._socket_directory is not None:
            self._ensure(self._socket_directory, None)
            self._sweep(self._socket_directory)
        wanted = self._choose(self._wanted, self._tenants)
        for key in [key for key in self._bound if isinstance(key, int) and key not in wanted]:
            self._bound.remove(key)
            self._changed(key, None)
        for gone in [key for key in self._failures if isinstance(key, int) and key not in self._wanted]:
            del self._failures[gone]
        for namespace, pid in wanted.items():
            if self._stopping:
                return
            self._ensure(namespace, pid)

    def _choose(self, wanted: Mapping[int, int], tenants: Mapping[int, str]) -> Mapping[int, int]:
        owners = {namespace: tenants.get(namespace, "") for namespace in wanted}
        chosen = fair_choice(owners, MAX_NAMESPACES, self._bound)
        counts = Counter(owners.values())
        for namespace in wanted.keys() - chosen:
            owner = owners[namespace]
            text = (
                f"{owner or 'one tenant'} has ranks in {counts[owner]} network namespaces; {MAX_NAMESPACES} are "
                "served on a node, shared between its tenants; run them in fewer, or with the probe"
            )
            if namespace not in self._failures:
                log.warning("captures: %s", text)
            self._failures[namespace] = _Failure(text, None, self._monotonic(), 0.0)
        return {namespace: pid for namespace, pid in wanted.items() if namespace in chosen}

    def _ensure(self, key: Key, pid: int | None) -> None:
        if key in self._bound:
            return
        failed, now = self._failures.get(key), self._monotonic()
        if failed is not None and failed.pid == pid and now - failed.failed_at < failed.retry_seconds:
            return
        tenant = self._tenants.get(key, "") if isinstance(key, int) else ""
        if pid is not None and not self._binds.take(tenant):
            slow = f"{tenant or 'a tenant'} opens network namespaces too fast; this one is served later"
            self._failures[key] = _Failure(failed.text if failed else slow, pid, now, RETRY_SLOW_SECONDS)
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
        self._changed(key, endpoint)

    def _bind(self, key: Key, pid: int | None) -> socket.socket:
        if isinstance(key, str) or pid is None:
            return bind_file(str(key))
        if key == network_namespace(proc_root=self._proc_root):
            return bind_here()
        return bind_in(pid, key, self._proc_root)

    def _sweep(self, directory: str) -> None:
        now = self._monotonic()
        if now - self._swept_at >= SWEEP_SECONDS:
            self._swept_at = now
            remove_dead_clients(directory)
