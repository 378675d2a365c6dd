"""Several real NCCL ranks on one GPU: ranks that believe to be on hosts of their own, side by side by CUDA's
multi-process service (MPS). Without a GPU, the same ranks over gloo."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import Steps, read_steps
from benchmarks.running import BenchmarkError, wait_until
from rankscope.probe import injection

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"
RANKS = 4
START_SECONDS, CPU_START_SECONDS = 75.0, 240.0
LOG_TAIL_CHARACTERS = 1500
_DROPPED = (
    *("RANK", "MASTER_", "KINETO_", "TEARDOWN_", "PYTHONPATH", "OMP_", "LOCAL_RANK", "WORLD_SIZE", "NCCL_"),
    *("TORCHELASTIC_", "TORCH_", "CUDA_MPS_"),
)


@contextlib.contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """What ranks need in their environment to run side by side; nothing where the service cannot be started."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        print("no nvidia-cuda-mps-control: the ranks take turns on the GPU", flush=True)
        yield {}
        return
    folder = Path(tempfile.mkdtemp(prefix="rankscope-mps-"))
    names = {"CUDA_MPS_PIPE_DIRECTORY": folder / "pipe", "CUDA_MPS_LOG_DIRECTORY": folder / "log"}
    for path in names.values():
        path.mkdir()
    added = {name: str(path) for name, path in names.items()}
    environment = os.environ | added
    started = subprocess.run([control, "-d"], env=environment, capture_output=True, text=True, timeout=30, check=False)
    if started.returncode:
        print(f"nvidia-cuda-mps-control -d failed, the ranks take turns: {started.stderr.strip()}", flush=True)
        added = {}
    try:
        yield added
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([control], input="quit\n", env=environment, capture_output=True, text=True, timeout=15)
        shutil.rmtree(folder, ignore_errors=True)


def probe_folder(target: Path) -> Path:
    """The probe laid out for programs that have no Rankscope, as the README says."""
    injection.copy_to(str(target))
    return target


@dataclass(frozen=True)
class LabJob:
    processes: tuple[subprocess.Popen[bytes], ...]
    folder: Path
    port: int

    def is_named(self, job: str) -> bool:
        """Whether this is the job, by the name that the daemon gives it."""
        return re.match(rf"{re.escape(HOST)}:{self.port}\b", job) is not None

    @property
    def started(self) -> bool:
        self.check()
        return all((self.folder / f"info-{rank}.json").exists() for rank in range(len(self.processes)))

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def check(self) -> None:
        """Raises if a rank has failed; a rank that ended as it should is none."""
        for rank, process in enumerate(self.processes):
            if process.poll():
                raise BenchmarkError(f"rank {rank} ended with {process.returncode}: {self.log_tail(rank)}")

    def wait(self, until_monotonic: float) -> None:
        """Returns when all ranks have ended as they should; raises if one failed, or if the time is up."""
        while self.running:
            self.check()
            if time.monotonic() > until_monotonic:
                raise BenchmarkError(f"{self.folder.name} did not end in time: {self.log_tail(0)}")
            time.sleep(0.1)
        self.check()

    def log_tail(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]

    def fact(self, name: str) -> dict[str, Any] | None:
        path = self.folder / name
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def device_progress(self, rank: int) -> int:
        """The step that a rank's device is in, counted from 1; its host may be many steps ahead."""
        start = 8 * (len(self.processes) + 1 + rank)
        written = (self.folder / "course").read_bytes()[start : start + 8]
        return int.from_bytes(written, sys.byteorder, signed=True)

    def steps(self) -> list[Steps]:
        """Of every rank, by its own record."""
        return [read_steps(self.folder / f"steps-{rank}") for rank in range(len(self.processes))]

    def stop(self) -> None:
        """Rank 0 ends the job in order, if it can; what is left after a while is killed."""
        for process, seconds in ((self.processes[0], 4.0), *((one, 0.2) for one in self.processes)):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            give_up_at = time.monotonic() + seconds
            while self.running and time.monotonic() < give_up_at:
                time.sleep(0.05)
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextlib.contextmanager
def lab_job(
    script: str,
    arguments: Sequence[str],
    *,
    cpu: bool,
    ranks: int = RANKS,
    environment: Mapping[str, str] | None = None,
    probe: Path | None = None,
    cores: Sequence[int] = (),
    label: str = "job",
) -> Iterator[LabJob]:
    """Starts ranks of a script beside this file; they are gone at the end, whatever happens.

    `JOB_PYTHONPATH` names where the job finds packages that the interpreter does not have."""
    folder = Path(tempfile.mkdtemp(prefix=f"rankscope-lab-{label}-"))
    port = _free_port()
    path = os.pathsep.join(filter(None, (str(probe) if probe else "", os.environ.get("JOB_PYTHONPATH", ""))))
    base = {key: value for key, value in os.environ.items() if not key.startswith(_DROPPED)}
    base |= {
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        # Programs that think of themselves as one process on each of so many nodes.
        "LOCAL_WORLD_SIZE": "1",
        **({"PYTHONPATH": path} if path else {}),
        **({} if cpu else {f"NCCL_{name}_DISABLE": "1" for name in ("P2P", "SHM", "IB")}),
        **({} if cpu else {"NCCL_SOCKET_IFNAME": "lo"}),
        **(environment or {}),
    }
    command = [sys.executable, str(HERE / script), "--folder", str(folder), *arguments, *(["--cpu"] if cpu else [])]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            own = {"RANK": str(rank), "NODE_RANK": str(rank), "GROUP_RANK": str(rank)}
            own |= {} if cpu else {"NCCL_HOSTID": f"{folder.name}-{rank}"}
            with (folder / f"log-{rank}").open("wb") as log:
                process = subprocess.Popen(
                    command, env=base | own, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
            processes.append(process)
            if cores:
                # Right after its start, so that all of its threads inherit this.
                os.sched_setaffinity(process.pid, cores)
        yield LabJob(tuple(processes), folder, port)
    finally:
        if processes:
            LabJob(tuple(processes), folder, port).stop()
        shutil.rmtree(folder, ignore_errors=True)


def await_start(jobs: Sequence[LabJob], cpu: bool) -> None:
    seconds = CPU_START_SECONDS if cpu else START_SECONDS
    try:
        wait_until(lambda: all(job.started for job in jobs), "all ranks had done a step", seconds)
    except BenchmarkError as error:
        tails = [f"{job.folder.name} rank {rank}: {job.log_tail(rank)}" for job in jobs for rank in (0, 1)]
        raise BenchmarkError("\n".join((str(error), *tails))) from None


def core_shares(parts: int) -> list[list[int]]:
    """The cores of this machine, as many for each part."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // parts
    return [cores[part * size : (part + 1) * size] if size and parts > 1 else [] for part in range(parts)]


def _free_port() -> int:
    with socket.socket() as probing:
        probing.bind((HOST, 0))
        return int(probing.getsockname()[1])
