"""A real Slurm on one machine: munged, slurmctld, and nodes that are pid namespaces with a host name of their own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.free_ports import free_port
from tests.namespaces import missing_for_nodes
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".slurm"
CPUS_PER_NODE = 4
SIOCSIFADDR = 0x8916
DOCUMENTATION_ADDRESS = "192.0.2.1"
# The first process of a node; everything on it ends with it.
FIRST_PROCESS = 'hostname "$1" && mount --bind "$2" /etc/hosts && exec sleep infinity'
CONFIGURATION = """\
ClusterName=rankscope-tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
{plugins}
PlugStackConfig={folder}/no-plugstack.conf
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=1
KillWait=2
{more}
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@dataclass
class SlurmNode:
    """A host of its own as far as its processes can tell, except for the network and the files. Its address is one of
    the loopback device, so that servers on several nodes can have the same port."""

    name: str
    address: str
    _keeper: subprocess.Popen[bytes]
    port: int = field(default_factory=free_port)

    @classmethod
    def start(cls, name: str, address: str, hosts: Path) -> SlurmNode:
        enter = ["unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        keeper = subprocess.Popen(
            [*enter, "bash", "-c", FIRST_PROCESS, "bash", name, str(hosts)], start_new_session=True
        )
        return cls(name, address, keeper)

    def inside(self, *command: str) -> list[str]:
        """A command line that runs there; what it starts ends with the node at the latest."""
        wait_until(self._first_process, lambda: f"no namespaces for {self.name}")
        return ["nsenter", "--target", self._first_process(), "--pid", "--uts", "--mount", "--", *command]

    def stop(self) -> None:
        os.killpg(self._keeper.pid, signal.SIGKILL)
        self._keeper.wait()

    def _first_process(self) -> str:
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text().split()
        is_set_up = bool(children) and Path(f"/proc/{children[0]}/comm").read_text().strip() == "sleep"
        return children[0] if is_set_up else ""


@dataclass
class SlurmCluster:
    folder: Path
    nodes: list[SlurmNode]
    environment: dict[str, str]
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, settings: str) -> None:
        port = free_port()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(64))
        nodes = (
            f"NodeName={node.name} NodeAddr={node.address} Port={node.port} CPUs={CPUS_PER_NODE}" for node in self.nodes
        )
        unpacked = UNPACKED / "plugins"
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=self.folder,
                port=port,
                plugins=f"PluginDir={unpacked}" if unpacked.exists() else "",
                more=settings,
                nodes="\n".join(nodes),
            )
        )
        munge = self.folder / "munge.sock"
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "seed")]
        self._run("munged", "munged", "--foreground", f"--socket={munge}", *files)
        wait_until(lambda: self._all_run() and munge.exists(), self.describe)
        self._run("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self._run(f"slurmd-{node.name}", *node.inside("slurmd", "-D", "-N", node.name))
        wait_until(lambda: self._all_run() and self._are_idle(), self.describe)

    def command(self, *command: str, check: bool = True) -> str:
        """What a Slurm command prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=240)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}\n{self.describe()}"
        return done.stdout.strip()

    def state(self, job_id: str) -> str:
        """As squeue names it; empty when Slurm has forgotten the job."""
        return self.command("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T", check=False)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def describe(self) -> str:
        logs = sorted(self.folder.glob("*.out"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def _are_idle(self) -> bool:
        return self.command("sinfo", "-h", "-o", "%T", check=False) == "idle"

    def _all_run(self) -> bool:
        ended = [process.args for process in self._processes if process.poll() is not None]
        assert not ended, f"{ended}\n{self.describe()}"
        return True

    def _run(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as output:
            self._processes.append(subprocess.Popen(command, env=self.environment, stdout=output, stderr=output))


@contextmanager
def slurm_cluster(*names: str, settings: str = "") -> Iterator[SlurmCluster]:
    """A controller, and a node of each name, all idle. `settings`: lines of slurm.conf."""
    if (missing := missing_for_nodes()) is not None:
        pytest.fail(missing)
    set_up = subprocess.run([str(ROOT / "tools" / "setup_slurm.sh")], capture_output=True, text=True)
    if set_up.returncode:
        pytest.fail(set_up.stderr)
    give_address()
    # Outside of pytest's folder, which only root may enter: munged wants a socket that everyone can reach.
    folder = Path(tempfile.mkdtemp(prefix="rankscope-slurm-"))
    folder.chmod(0o755)
    nodes: list[SlurmNode] = []
    search_path = f"{UNPACKED / 'bin'}:{os.environ['PATH']}:/usr/sbin"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "MASTER_"))}
    cluster = SlurmCluster(folder, nodes, {**own, "PATH": search_path, "SLURM_CONF": str(folder / "slurm.conf")})
    try:
        hosts = folder / "hosts"
        addresses = {name: f"127.0.0.{number}" for number, name in enumerate(names, 2)}
        hosts.write_text(
            "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **addresses}.items())
        )
        nodes.extend(SlurmNode.start(name, address, hosts) for name, address in addresses.items())
        cluster.start(settings)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


def give_address() -> None:
    """Slurm asks for addresses of the kinds that the machine has beyond 127.0.0.1. A network namespace has none."""
    with contextlib.suppress(OSError):
        socket.getaddrinfo(None, 80, socket.AF_INET, flags=socket.AI_ADDRCONFIG | socket.AI_PASSIVE)
        return
    family_and_address = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(DOCUMENTATION_ADDRESS))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFADDR, struct.pack("16s16s8x", b"lo:slurm", family_and_address))
