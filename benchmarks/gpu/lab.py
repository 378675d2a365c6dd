"""Several real NCCL ranks on one GPU: ranks that believe to be on hosts of their own, side by side by CUDA's
multi-process service (MPS). Without a GPU, the same ranks over gloo."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rankscope.probe import injection
from tools.jobs.launcher import HOST, Ranks, start_ranks

RANKS = 4
START_SECONDS, CPU_START_SECONDS = 75.0, 240.0
# Rank 0 ends the job in order, if it can; the others after it.
END_SECONDS, OTHERS_END_SECONDS = 4.0, 0.2


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


class LabJob(Ranks):
    def is_named(self, job: str) -> bool:
        """Whether this is the job, by the name that the daemon gives it."""
        return re.match(rf"{re.escape(HOST)}:{self.port}\b", job) is not None

    @property
    def started(self) -> bool:
        self.check(may_end=True)
        return self.have_written("info-{}.json")

    def device_progress(self, rank: int) -> int:
        """The step that a rank's device is in, counted from 1; its host may be many steps ahead."""
        start = 8 * (len(self.processes) + 1 + rank)
        written = (self.folder / "course").read_bytes()[start : start + 8]
        return int.from_bytes(written, sys.byteorder, signed=True)


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
    """Starts the ranks of a script, and ends them on exit.

    `JOB_PYTHONPATH` names where the job finds packages that the interpreter does not have."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix=f"rankscope-lab-{label}-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        packages = filter(None, os.environ.get("JOB_PYTHONPATH", "").split(os.pathsep))
        path = os.pathsep.join([*([str(probe)] if probe else []), *map(os.path.abspath, packages)])
        base = {
            "OMP_NUM_THREADS": "1",
            # Programs that think of themselves as one process on each of so many nodes.
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            **({"PYTHONPATH": path} if path else {}),
            **({} if cpu else {f"NCCL_{name}_DISABLE": "1" for name in ("P2P", "SHM", "IB")}),
            **({} if cpu else {"NCCL_SOCKET_IFNAME": "lo"}),
            **(environment or {}),
        }

        def of_rank(rank: int) -> dict[str, str]:
            own = {"NODE_RANK": str(rank), "GROUP_RANK": str(rank)}
            return own | ({} if cpu else {"NCCL_HOSTID": f"{folder.name}-{rank}"})

        words = ["--folder", str(folder), *arguments, *(["--cpu"] if cpu else [])]
        started = stack.enter_context(start_ranks(script, words, folder, ranks, base, of_rank=of_rank, cores=cores))
        stack.callback(started.terminate, OTHERS_END_SECONDS)
        stack.callback(started.terminate, END_SECONDS, first=1)
        yield LabJob(started.processes, folder, started.port)


def await_start(jobs: Sequence[LabJob], cpu: bool) -> None:
    for job in jobs:
        job.wait_for(
            lambda job=job: job.started,
            "a step of all ranks",
            CPU_START_SECONDS if cpu else START_SECONDS,
            may_end=True,
        )


def core_shares(parts: int) -> list[list[int]]:
    """The cores of this machine, as many for each part."""
    cores = sorted(os.sched_getaffinity(0))
    size = len(cores) // parts
    return [cores[part * size : (part + 1) * size] if size and parts > 1 else [] for part in range(parts)]
