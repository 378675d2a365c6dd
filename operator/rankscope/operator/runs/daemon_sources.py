"""Where the daemons are, without Kubernetes: flags, a file, DNS or Slurm. Each source is read again every few seconds.

A source that cannot be read is logged once for each reason, and its last list stays in use."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rankscope.common.text import one_line
from rankscope.operator.runs.daemon_streams import DEFAULT_PORT

log = logging.getLogger(__name__)

READ_SECONDS = 5.0
FILE_BYTES = 4 << 20
# More nodes than any fleet has: a file with more is a mistake.
MAX_DAEMONS = 50_000
SLURM_SECONDS = 30.0
SLURM_COMMAND = ("sinfo", "--noheader", "--Node", "--format=%o")
TEXT_CHARACTERS = 300
_ADDRESS = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?)(:(?P<port>\d{1,5}))?"
)


class SourceError(Exception):
    """The list cannot be read: names the source and the reason."""


class DaemonSource(Protocol):
    def addresses(self) -> frozenset[str]:
        """HOST:PORT of every daemon. May block for some seconds. Raises SourceError."""


def parse_daemon_address(text: str, default_port: int = DEFAULT_PORT) -> str:
    """HOST:PORT, of HOST or HOST:PORT. Raises SourceError."""
    match = _ADDRESS.fullmatch(text)
    port = default_port if match is None or match["port"] is None else int(match["port"])
    if match is None or not 0 < port < 65536:
        raise SourceError(f"{one_line(text, 100)!r} is not HOST:PORT")
    return f"{match['host']}:{port}"


class GivenDaemons:
    def __init__(self, addresses: Iterable[str]) -> None:
        """Raises SourceError."""
        self._addresses = frozenset(map(parse_daemon_address, addresses))

    def addresses(self) -> frozenset[str]:
        return self._addresses


class FileDaemons:
    """A file with an address on each line; or, named .json, .yml or .yaml, targets in the format of Prometheus'
    `file_sd_configs`. A file with a mistake is refused as a whole: half of a list would end the other streams."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def addresses(self) -> frozenset[str]:
        try:
            with self._path.open("rb") as file:
                content = file.read(FILE_BYTES + 1)
            if len(content) > FILE_BYTES:
                raise SourceError(f"larger than {FILE_BYTES >> 20} MiB")
            return _bounded(map(parse_daemon_address, self._targets(content.decode("utf-8"))))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise SourceError(f"--daemons-file {self._path}: {reason}") from error
        except SourceError as error:
            raise SourceError(f"--daemons-file {self._path}: {error}") from error

    def _targets(self, text: str) -> Iterable[str]:
        suffix = self._path.suffix.lower()
        if suffix == ".json":
            return _file_sd_targets(_json(text))
        if suffix in (".yml", ".yaml"):
            return _file_sd_targets(_yaml(text))
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return [line for line in lines if line]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"not JSON: {one_line(str(error), TEXT_CHARACTERS)}") from error


def _yaml(text: str) -> Any:
    import yaml

    try:
        # Aliases may stand for more than memory holds; file_sd needs none.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise SourceError("YAML aliases are not read")
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SourceError(f"not YAML: {one_line(str(error), TEXT_CHARACTERS)}") from error


def _file_sd_targets(document: Any) -> Iterable[str]:
    for group in document if isinstance(document, list) else (None,):
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise SourceError('not a list as in file_sd_configs: [{"targets": ["node-1:9465"]}]')
        yield from targets


class DnsDaemons:
    """Every address of a name."""

    def __init__(self, name: str) -> None:
        """NAME:PORT. Raises SourceError."""
        self._host, _, port = parse_daemon_address(name).rpartition(":")
        self._port = int(port)

    def addresses(self) -> frozenset[str]:
        try:
            found = socket.getaddrinfo(self._host.strip("[]"), self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise SourceError(f"--daemons-dns {self._host}: {error}") from error
        hosts = (str(address[0]) for *_, address in found)
        return _bounded(f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts)


class SlurmDaemons:
    """Every node of this machine's Slurm, in any state: one that is down now may return with its daemon."""

    def __init__(self, port: int = DEFAULT_PORT, command: Sequence[str] = SLURM_COMMAND) -> None:
        self._port = port
        self._command = command

    def addresses(self) -> frozenset[str]:
        name = self._command[0]
        try:
            done = subprocess.run(
                self._command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SLURM_SECONDS,
                env={**os.environ, "LC_ALL": "C"},
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SourceError(f"--daemons-slurm: {name} did not answer in {SLURM_SECONDS:g} s") from error
        except OSError as error:
            raise SourceError(f"--daemons-slurm: cannot run {name}: {error.strerror}") from error
        if done.returncode:
            text = one_line(done.stderr.decode(errors="replace"), TEXT_CHARACTERS)
            raise SourceError(f"--daemons-slurm: {name} exited with {done.returncode}: {text}")
        lines = done.stdout[:FILE_BYTES].decode(errors="replace").split()
        try:
            return _bounded(parse_daemon_address(line, self._port) for line in lines)
        except SourceError as error:
            raise SourceError(f"--daemons-slurm: {name} named a node that is no host name: {error}") from error


def _bounded(addresses: Iterable[str]) -> frozenset[str]:
    found = set()
    for address in addresses:
        found.add(address)
        if len(found) > MAX_DAEMONS:
            raise SourceError(f"more than {MAX_DAEMONS} daemons")
    return frozenset(found)


class DaemonList:
    """All sources together, each read in a thread of its own from `start` to `stop`: one that hangs does not keep the
    others from being read."""

    def __init__(self, sources: Sequence[DaemonSource]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._last: dict[int, frozenset[str]] = {}  # by the source's position
        self._problems: dict[int, str] = {}
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_reading, args=(number,), name="rankscope-daemons", daemon=True)
            for number in range(len(sources))
        ]

    @property
    def addresses(self) -> frozenset[str]:
        with self._lock:
            return frozenset[str]().union(*self._last.values())

    @property
    def is_complete(self) -> bool:
        """Once every source was read."""
        with self._lock:
            return len(self._last) == len(self._sources)

    @property
    def problems(self) -> Sequence[str]:
        with self._lock:
            return tuple(self._problems.values())

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()  # a thread may be in a read of some seconds: it is not joined

    def read(self, number: int) -> None:
        try:
            found = self._sources[number].addresses()
        except SourceError as error:
            self._note(number, str(error))
            return
        except Exception as error:  # or a source would never be read again
            log.exception("a list of daemons could not be read")
            self._note(number, str(error))
            return
        with self._lock:
            before, self._last[number] = self._last.get(number), found
            if self._problems.pop(number, None) is not None:
                log.info("the list of daemons can be read again")
        if before != found:
            log.info("%d daemons listed, %d new", len(found), len(found - (before or frozenset())))

    def _keep_reading(self, number: int) -> None:
        while not self._stopping.is_set():
            self.read(number)
            self._stopping.wait(READ_SECONDS)

    def _note(self, number: int, problem: str) -> None:
        with self._lock:
            is_new = self._problems.get(number) != problem
            self._problems[number] = problem
            kept = len(self._last.get(number, ()))
        if is_new:
            log.warning("%s; the last list stays in use (%d daemons)", problem, kept)
