"""Jobs of `job.py` as processes of their own, and what they recorded about themselves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.running import BenchmarkError, RunningDaemon, wait_until

HERE = Path(__file__).resolve().parent
START_SECONDS, CPU_START_SECONDS = 90.0, 240.0


@dataclass(frozen=True)
class Steps:
    """One rank's steps by its own record."""

    host_end: np.ndarray  # unix seconds
    device_end: np.ndarray
    millis: np.ndarray

    def between(self, start: float, end: float) -> np.ndarray:
        """Milliseconds of those that ended on the device in that time."""
        kept: np.ndarray = self.millis[(self.device_end > start) & (self.device_end <= end)]
        return kept

    def first(self, position: int, count: int) -> np.ndarray:
        """Milliseconds of so many steps from that one on."""
        kept: np.ndarray = self.millis[position : position + max(0, count)]
        return kept


def read_steps(path: Path) -> Steps:
    """As `job.Stopwatch` wrote them; a last line that is not complete is left out."""
    lines = path.read_text().rpartition("\n")[0].splitlines()
    table = np.array([line.split() for line in lines], dtype=float).reshape(-1, 3)
    return Steps(table[:, 0] / 1e9, table[:, 1] / 1e9, table[:, 2])


@dataclass(frozen=True)
class TrainingJob:
    processes: tuple[subprocess.Popen[bytes], ...]
    folder: Path
    run_id: str
    shape: Shape

    def check(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                raise BenchmarkError(f"rank {rank} ended with {process.returncode}:\n{self.log(rank)[-1500:]}")

    def log(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text(errors="replace")

    def info(self, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"info-{rank}.json").read_text())
        return found

    def steps(self, rank: int = 0) -> Steps:
        return read_steps(self.folder / f"steps-{rank}")

    def name(self, watching: RunningDaemon) -> str:
        """As the daemon calls the job, once it has found all of its ranks."""
        wait_until(lambda: watching.ranks(self.run_id) == len(self.processes), "the daemon had found all ranks", 60)
        return watching.run_name(self.run_id)


@contextlib.contextmanager
def training(
    shape: str, backend: str, ranks: int, environment: Mapping[str, str], *, cpu: bool = False
) -> Iterator[TrainingJob]:
    """Ranks that are past their first steps; nothing of Rankscope's is in their environment but what is given."""
    with tempfile.TemporaryDirectory(prefix="rankscope-gpu-") as name, socket.socket() as free:
        folder = Path(name)
        free.bind(("127.0.0.1", 0))
        dropped = ("RANK", "MASTER_", "KINETO_", "TEARDOWN_", "PYTHONPATH", "OMP_", "LOCAL_RANK", "WORLD_SIZE")
        base = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
        base |= {
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "TORCHELASTIC_RUN_ID": folder.name,
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
            **({"JOB_DEVICE": "cpu", "OMP_NUM_THREADS": "1"} if cpu else {}),
            **environment,
        }
        free.close()
        processes = []
        for rank in range(ranks):
            with (folder / f"log-{rank}").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(HERE / "job.py"), shape, backend, str(folder)],
                        env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        job = TrainingJob(tuple(processes), folder, folder.name, SHAPES[shape])
        try:

            def steps_are_told() -> bool:
                job.check()
                return all((folder / f"steps-{rank}").exists() for rank in range(ranks)) and all(
                    (folder / f"info-{rank}.json").exists() for rank in range(ranks)
                )

            wait_until(
                steps_are_told, f"all ranks of the job {shape} had started", CPU_START_SECONDS if cpu else START_SECONDS
            )
            yield job
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            give_up_at = time.monotonic() + 3
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, give_up_at - time.monotonic()))
                process.kill()
                process.wait()
