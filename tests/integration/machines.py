"""Machines as namespaces: each has a network, processes and a host name of its own, and is linked to the first one."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.daemon_process import PATIENCE_SECONDS
from tests.support.processes import children
from tests.support.waiting import wait_until

NETWORK = "10.77.0"
# The first process of the machine: when it ends, the kernel ends all others.
INIT = ("unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc")


@functools.cache
def missing_for_machines() -> str | None:
    """Why machines cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "namespaces need root: run as root"
    if shutil.which("ip") is None:
        return "links between machines need ip: install iproute2"
    tried = subprocess.run(
        [*INIT, "ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"], capture_output=True
    )
    return f"no links between namespaces here: {tried.stderr.decode().strip()[:200]}" if tried.returncode else None


@dataclass(frozen=True)
class Machine:
    name: str
    address: str
    pid: int  # of its first process

    def command(self, *words: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--uts", "--", *words]

    def run(self, *words: str, seconds: float = PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*words), capture_output=True, text=True, timeout=seconds)

    def start(
        self, words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen(
                self.command(*words), stdout=file, stderr=file, env={**os.environ, **(environment or {})}
            )


@contextmanager
def machines(*names: str) -> Iterator[list[Machine]]:
    """The first has a bridge to all others, and the address .100; the others .1, .2 and so on."""
    if (missing := missing_for_machines()) is not None:
        pytest.fail(missing)
    with ExitStack() as stack:
        head, *nodes = [
            stack.enter_context(_machine(name, f"{NETWORK}.{number or 100}")) for number, name in enumerate(names)
        ]
        _ip(head, "link", "add", "bridge", "type", "bridge")
        _ip(head, "addr", "add", f"{head.address}/24", "dev", "bridge")
        _ip(head, "link", "set", "bridge", "up")
        for node in nodes:
            pair = ("link", "add", f"to-{node.name}"[:15], "type", "veth", "peer", "name", "eth0")
            # In the machine's network, but with this machine's process numbers.
            subprocess.run(
                ["nsenter", f"--target={head.pid}", "--net", "ip", *pair, "netns", str(node.pid)], check=True
            )
            _ip(head, "link", "set", f"to-{node.name}"[:15], "master", "bridge", "up")
            _ip(node, "addr", "add", f"{node.address}/24", "dev", "eth0")
            _ip(node, "link", "set", "eth0", "up")
        yield [head, *nodes]


@contextmanager
def _machine(name: str, address: str) -> Iterator[Machine]:
    script = f"hostname {name} && ip link set lo up && exec sleep infinity"
    outer = subprocess.Popen([*INIT, "sh", "-c", script])
    try:
        yield Machine(name, address, _first_process(outer.pid))
    finally:
        outer.kill()
        outer.wait()


def _first_process(outer: int) -> int:
    """The machine is set up once its first process sleeps."""

    def sleeping() -> list[int]:
        return [pid for pid in children(outer)[:1] if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"]

    return wait_until(sleeping, lambda: "the machine did not start")[0]


def _ip(machine: Machine, *words: str) -> None:
    done = machine.run("ip", *words)
    assert done.returncode == 0, (words, done.stderr)
