"""Starts the demo's ranks, switches their fault on and off, and cleans up."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rankscope.cli.demo_job.board import Board
from rankscope.cli.demo_job.cpu_limit import ControlGroup, StopAndGo, confine
from rankscope.cli.demo_job.environment import choose_port, rank_environment
from rankscope.cli.demo_job.faults import NONE, STARVED, Fault

_FOLDER = Path(__file__).resolve().parent
_POLL_SECONDS = 0.05
_TERMINATE_SECONDS = 2.0
_PORT_ATTEMPTS = 3
# Ranks are at most one step apart, so none of them has begun this step when the switch is written.
_STEPS_AHEAD = 2
# A starved rank gets half of the processor time that it used, and never more than this.
_STARVED_RATIO = 0.5
_MAX_CORE_FRACTION = 0.15


class DemoJobError(RuntimeError):
    """The job did not start or did not stay up; the message contains the end of a rank's log."""


class DemoJob:
    """One training job of several processes on this machine. The ranks die with the thread that called `start()`
    (the kernel ties them to it, not to the process), so call it from a thread that outlives the job: the main one."""

    def __init__(
        self,
        ranks: int,
        fault: Fault,
        probe: bool,
        extra_environment: Mapping[str, str] | None = None,
        training_script: Path | None = None,
    ) -> None:
        self.ranks = ranks
        self.fault = fault.for_ranks(ranks)
        self.run_id = f"demo-{uuid.uuid4().hex[:8]}"
        self.port: int | None = None
        self.probe = probe
        self._extra_environment = dict(extra_environment or {})
        self._script = training_script or _FOLDER / ("pipeline.py" if self.fault.is_pipeline else "train.py")
        self._folder: Path | None = None
        self._board: Board | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self.confinement: ControlGroup | StopAndGo | None = None
        self._port_attempts = 0
        self._cpu_at_training: list[tuple[float, float]] = []

    def __enter__(self) -> DemoJob:
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """By rank; empty before `start()`."""
        return [process.pid for process in self._processes]

    @property
    def job_name(self) -> str:
        return self.run_id

    def start(self) -> None:
        if self._processes:
            raise DemoJobError(f"job {self.run_id} is already running; stop it first")
        self._folder = Path(tempfile.mkdtemp(prefix=f"rankscope-{self.run_id}-"))
        try:
            self._spawn()
        except BaseException:
            self.stop()
            raise

    def _spawn(self) -> None:
        assert self._folder is not None
        self._port_attempts += 1
        self.port = choose_port()
        board_path = self._folder / "board"
        self._board = Board.create(board_path, self.ranks)
        for rank in range(self.ranks):
            environment = rank_environment(
                rank, self.ranks, self.port, self.run_id, self.fault, board_path, probe=self.probe
            )
            environment.update(self._extra_environment)
            with self._log_path(rank).open("wb") as log:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", str(_FOLDER / "tether.py"), str(os.getpid())),
                        *(sys.executable, str(self._script)),
                    ],
                    env=environment,
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._processes.append(process)

    def poll(self) -> list[tuple[int, int]]:
        """(rank, return code) of ended ranks; a negative code is the signal that ended it."""
        return [(rank, code) for rank, process in enumerate(self._processes) if (code := process.poll()) is not None]

    def steps_done(self) -> list[int]:
        board = self._running_board()
        return [board.steps_done(rank) for rank in range(self.ranks)]

    def step_seconds(self) -> list[list[float]]:
        """Recent step times of each rank as measured by the rank, oldest first."""
        board = self._running_board()
        return [board.recent_step_seconds(rank) for rank in range(self.ranks)]

    def log_tail(self, rank: int, lines: int = 20) -> str:
        try:
            text = self._log_path(rank).read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def wait_until_training(self, timeout: float, steps: int = 3) -> None:
        """Returns when every rank has done that many steps; raises DemoJobError when one has ended or time is up."""
        deadline = time.monotonic() + timeout
        while True:
            done = self.steps_done()
            if min(done) >= steps:
                self._cpu_at_training = [(time.monotonic(), _cpu_seconds(pid)) for pid in self.pids]
                return
            if gone := self.poll():
                if not self._lost_its_port() or self._port_attempts >= _PORT_ATTEMPTS:
                    rank, code = gone[0]
                    raise DemoJobError(f"rank {rank} ended with {code} before training began:\n{self.log_tail(rank)}")
                self._end_processes()
                self._spawn()
            if time.monotonic() > deadline:
                rank = done.index(min(done))
                raise DemoJobError(
                    f"after {timeout:g} s rank {rank} has done {done[rank]} of {steps} steps:\n{self.log_tail(rank)}"
                )
            time.sleep(_POLL_SECONDS)

    def start_fault(self) -> float:
        """Switch the fault on and return time.monotonic() of that moment; it begins in the same step on every rank."""
        board = self._running_board()
        if self.fault.kind == STARVED and self.fault.rank is not None:
            if self.confinement is None:
                pid = self._processes[self.fault.rank].pid
                self.confinement = confine(pid, self.run_id, self._starving_fraction(self.fault.rank))
        elif self.fault.kind != NONE:
            board.fault_step = max(self.steps_done()) + _STEPS_AHEAD
        return time.monotonic()

    def end_fault(self) -> None:
        """Switch the fault off."""
        if self.confinement is not None:
            self.confinement.lift()
            self.confinement = None
        self._running_board().fault_step = None

    def stop(self) -> None:
        """End every rank and remove what the job created. Safe to call at any time, and twice."""
        self._end_processes()
        if self.confinement is not None:
            self.confinement.lift()
            self.confinement = None
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _starving_fraction(self, rank: int) -> float:
        if not self._cpu_at_training:
            return _MAX_CORE_FRACTION
        since, cpu_then = self._cpu_at_training[rank]
        seconds = time.monotonic() - since
        # A shorter interval would mostly show the 10 ms granularity of the kernel's accounting.
        if seconds < 1.0:
            return _MAX_CORE_FRACTION
        used = (_cpu_seconds(self._processes[rank].pid) - cpu_then) / seconds
        return min(_MAX_CORE_FRACTION, _STARVED_RATIO * used)

    def _end_processes(self) -> None:
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._signal_groups(number)
        deadline = time.monotonic() + _TERMINATE_SECONDS
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        # A group outlives its leader: also end what a rank has started.
        self._signal_groups(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        self._processes = []

    def _signal_groups(self, number: int) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _lost_its_port(self) -> bool:
        return any(
            mark in self.log_tail(rank, lines=200)
            for rank in range(self.ranks)
            for mark in ("EADDRINUSE", "ddress already in use")
        )

    def _log_path(self, rank: int) -> Path:
        if self._folder is None:
            raise DemoJobError(f"job {self.run_id} is not running; call start() first")
        return self._folder / f"rank{rank}.log"

    def _running_board(self) -> Board:
        if self._board is None:
            raise DemoJobError(f"job {self.run_id} is not running; call start() first")
        return self._board


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process; 0 when it is gone."""
    try:
        # The name in parentheses may contain spaces; fields 14 and 15 are counted from its end.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
