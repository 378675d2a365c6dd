"""Starts `transformer_job.py`, which does not use Rankscope, and reads what it recorded."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.running import RunningDaemon, wait_until
from tools.jobs.launcher import Ranks, start_ranks
from tools.jobs.shapes import SHAPES, Shape

START_SECONDS, CPU_START_SECONDS = 90.0, 240.0
END_SECONDS = 3.0


@dataclass(frozen=True)
class TrainingJob(Ranks):
    shape: Shape = SHAPES["large"]

    @property
    def run_id(self) -> str:
        return self.folder.name

    def info(self, rank: int = 0) -> dict[str, Any]:
        return self.fact(f"info-{rank}.json") or {}

    def name(self, watching: RunningDaemon) -> str:
        """As the daemon calls the job, once it has found all of its ranks."""
        wait_until(lambda: watching.ranks(self.run_id) == len(self.processes), "the daemon had found all ranks", 60)
        return watching.run_name(self.run_id)


@contextlib.contextmanager
def training(
    shape: str, backend: str, ranks: int, environment: Mapping[str, str], *, cpu: bool = False
) -> Iterator[TrainingJob]:
    """Ranks that are past their first steps; nothing of Rankscope's is in their environment but what is given."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-gpu-")))
        words = [shape, backend, str(folder), *(["--cpu"] if cpu else [])]
        base = {"TORCHELASTIC_RUN_ID": folder.name, "NCCL_SOCKET_IFNAME": "lo"}
        base |= {"OMP_NUM_THREADS": "1"} if cpu else {}
        started = stack.enter_context(start_ranks("transformer_job.py", words, folder, ranks, {**base, **environment}))
        stack.callback(started.terminate, END_SECONDS)
        started.wait_for(
            lambda: started.have_written("steps-{}") and started.have_written("info-{}.json"),
            "the first steps of all ranks",
            CPU_START_SECONDS if cpu else START_SECONDS,
        )
        yield TrainingJob(started.processes, folder, started.port, SHAPES[shape])
