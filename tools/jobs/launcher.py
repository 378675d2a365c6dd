"""Starts the ranks of a training job as processes, waits for the files that they write, and ends them. Benchmarks and
tests use it; the scripts are in the same folder."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.cli.demo_job import tether
from rankscope.cli.demo_job.environment import choose_port

SCRIPTS = Path(__file__).resolve().parent
HOST = "127.0.0.1"
LOG_TAIL_CHARACTERS = 2000
POLL_SECONDS = 0.05
# A job must not inherit the rank of another job, a probe, or settings of the libraries that are measured.
_DROPPED = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_RANK", "MASTER_", "KINETO_", "TEARDOWN_", "PYTHONPATH", "OMP_", "NCCL_"),
    *("TORCHELASTIC_", "TORCH_", "CUDA_MPS_", "PYTEST_"),
)


class JobError(RuntimeError):
    """A rank ended or did not start. The text has the end of its log."""


@dataclass(frozen=True)
class Steps:
    """The steps of one rank, as the rank recorded them."""

    host_end: np.ndarray  # unix seconds
    device_end: np.ndarray
    millis: np.ndarray

    def between(self, start: float, end: float) -> np.ndarray:
        """Milliseconds of the steps that ended on the device between two times."""
        kept: np.ndarray = self.millis[(self.device_end > start) & (self.device_end <= end)]
        return kept

    def first(self, position: int, count: int) -> np.ndarray:
        """Milliseconds of `count` steps from `position` on."""
        kept: np.ndarray = self.millis[position : position + max(0, count)]
        return kept


def read_steps(path: Path) -> Steps:
    """Reads what `parts.Stopwatch` wrote, without an incomplete last line."""
    lines = path.read_text().rpartition("\n")[0].splitlines()
    table = np.array([line.split() for line in lines], dtype=float).reshape(-1, 3)
    return Steps(table[:, 0] / 1e9, table[:, 1] / 1e9, table[:, 2])


@dataclass(frozen=True)
class Ranks:
    """The processes of one job, by rank. They write logs and results to `folder`."""

    processes: tuple[subprocess.Popen[bytes], ...]
    folder: Path
    port: int = 0

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def check(self, *, may_end: bool = False) -> None:
        """Raises JobError if a rank has failed, or has ended where that is not allowed."""
        for rank, process in enumerate(self.processes):
            if process.poll() is not None and not (may_end and process.returncode == 0):
                raise JobError(f"rank {rank} ended with {process.returncode}:\n{self.log_tail(rank)}")

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text(errors="replace")

    def log_tail(self, rank: int) -> str:
        return self.log(rank)[-LOG_TAIL_CHARACTERS:]

    def steps(self, rank: int = 0) -> Steps:
        return read_steps(self.folder / f"steps-{rank}")

    def fact(self, name: str) -> dict[str, Any] | None:
        """Reads a JSON file of the job; None if it does not exist."""
        path = self.folder / name
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def have_written(self, name: str) -> bool:
        """Whether each rank has written its file. `{}` in the name is the rank."""
        return all((self.folder / name.format(rank)).exists() for rank in range(len(self.processes)))

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float, *, may_end: bool = False) -> None:
        """Raises JobError if a rank ends meanwhile, or if the time is up."""
        give_up_at = time.monotonic() + seconds
        while not condition():
            self.check(may_end=may_end)
            if time.monotonic() > give_up_at:
                raise JobError(f"{self.folder.name}: {what} not after {seconds:.0f} s; rank 0 says: {self.log_tail(0)}")
            time.sleep(POLL_SECONDS)

    def wait_until_ended(self, seconds: float) -> None:
        """Waits until all ranks have ended with status 0."""
        self.wait_for(lambda: not self.running, "the end of all ranks", seconds, may_end=True)
        self.check(may_end=True)

    def terminate(self, seconds: float, first: int | None = None) -> None:
        """Sends SIGTERM to all ranks, or to the first ones, and waits up to the timeout."""
        for process in self.processes[:first]:
            process.terminate()
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """Waits until all ranks have ended, up to the timeout."""
        give_up_at = time.monotonic() + seconds
        while self.running and time.monotonic() < give_up_at:
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Kills the ranks and their children. A session outlives its leader."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def start_ranks(
    script: str,
    arguments: Sequence[str],
    folder: Path,
    ranks: int,
    environment: Mapping[str, str],
    *,
    of_rank: Callable[[int], Mapping[str, str]] = lambda rank: {"LOCAL_RANK": str(rank)},
    python: str | Path = sys.executable,
    cores: Sequence[int] = (),
) -> Iterator[Ranks]:
    """Runs a script of this folder in `folder`. The ranks are killed on exit, and by the kernel if the calling thread
    dies."""
    port = choose_port()
    base = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    base |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": HOST, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    base |= {"PYTHONUNBUFFERED": "1", **environment}
    command = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid())]
    command += [str(python), str(SCRIPTS / script), *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            with (folder / f"log-{rank}").open("wb") as log:
                process = subprocess.Popen(
                    command,
                    env=base | {"RANK": str(rank)} | dict(of_rank(rank)),
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append(process)
            if cores:
                # Right after its start, so that all of its threads inherit this.
                os.sched_setaffinity(process.pid, cores)
        yield Ranks(tuple(processes), folder, port)
    finally:
        Ranks(tuple(processes), folder, port).kill()
