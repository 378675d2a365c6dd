"""Starts the four ranks of one job with the probe injected, switches its fault on, and ends all of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from rankscope.cli.demo_job import board as board_module
from rankscope.cli.demo_job.board import Board
from rankscope.cli.demo_job.environment import choose_port, probe_environment

RANKS = 4
SLOW_RANK = 2
# What the fault adds to a step of the slow rank. On a slow machine 40 ms were a fifth of a step, and stacks did not
# name the line within 26 s.
DELAY_SECONDS = 0.080
JOBS = Path(__file__).resolve().parent / "jobs"
DEMO_JOB = Path(board_module.__file__).resolve().parent
START_SECONDS = 240.0  # a limit, not an expectation: a busy machine imports four frameworks
TERMINATE_SECONDS = 5.0
# Ranks are at most one step apart (a pipeline's a few), so none has begun this one when the switch is written.
STEPS_AHEAD = 3


class JobError(AssertionError):
    """The job ended or did not begin; the text holds the end of a rank's log."""


class FrameworkJob:
    """Ranks die with the thread that made them: use it from the main thread."""

    def __init__(
        self, python: Path, script: str, arguments: tuple[str, ...], fault: str, slow_rank: int = SLOW_RANK
    ) -> None:
        self._command = (str(python), str(JOBS / script), *arguments)
        self._fault = fault
        self._slow_rank = slow_rank
        self._run_id = f"frameworks-{uuid.uuid4().hex[:8]}"
        self._port = choose_port()
        self._folder = Path(tempfile.mkdtemp(prefix="rankscope-frameworks-"))
        self._board = Board.create(self._folder / "board", RANKS)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> FrameworkJob:
        for rank in range(RANKS):
            with self._log_path(rank).open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(DEMO_JOB / "tether.py"), str(os.getpid()), *self._command],
                    env=self._environment(rank),
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)  # a group outlives its leader
        for process in self._processes:
            process.wait()
        self._board.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def name(self) -> str:
        """What the daemon calls it."""
        return self._run_id

    def steps_done(self) -> int:
        """By the rank that is last."""
        return min(self._board.steps_done(rank) for rank in range(RANKS))

    def step_ends(self, rank: int, first: int) -> list[float]:
        """When a rank ended its steps from `first` on, by its own clock (Unix time); recent ones only."""
        while True:
            steps = self._board.steps_done(rank)
            ends = self._board.recent_step_seconds(rank)
            if self._board.steps_done(rank) == steps:  # no step ended meanwhile: both are about the same steps
                return ends[max(0, first - (steps - len(ends))) :]

    def start_fault(self, is_asynchronous: bool = False) -> int:
        """The step it begins with. Asynchronous ranks are at different steps: only that of the slow rank counts."""
        asked = (self._slow_rank,) if is_asynchronous else range(RANKS)
        step = max(self._board.steps_done(rank) for rank in asked) + STEPS_AHEAD
        self._board.fault_step = step
        return step

    def wait_until_training(self, steps: int = 3) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.steps_done() < steps:
            self.check()
            if time.monotonic() > deadline:
                raise JobError(f"no {steps} steps after {START_SECONDS:g} s; rank 0 says:\n{self.log_tail(0)}")
            time.sleep(0.1)

    def check(self) -> None:
        """Raises JobError if a rank has ended: no job ends by itself."""
        for rank, process in enumerate(self._processes):
            if (code := process.poll()) is not None:
                raise JobError(f"rank {rank} ended with {code}:\n{self.log_tail(rank)}")

    def log_tail(self, rank: int, lines: int = 25) -> str:
        return "\n".join(self._log_path(rank).read_text(errors="replace").splitlines()[-lines:])

    def _environment(self, rank: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANKSCOPE_", "PYTEST_"))}
        return (
            kept
            | probe_environment()
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": str(RANKS),
                "LOCAL_WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port),
                "TORCHELASTIC_RUN_ID": self._run_id,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                # Models are made from configurations and data at random: nothing is loaded.
                "HF_HUB_OFFLINE": "1",
                "RANKSCOPE_FRAMEWORKS_FAULT": f"{self._fault},{self._slow_rank},{DELAY_SECONDS}",
                "RANKSCOPE_FRAMEWORKS_BOARD": str(self._folder / "board"),
                "RANKSCOPE_FRAMEWORKS_BOARD_FOLDER": str(DEMO_JOB),
            }
        )

    def _log_path(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
