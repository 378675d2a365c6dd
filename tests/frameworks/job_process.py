"""Starts the four ranks of one job with the probe injected, switches its fault on, and ends all of it."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rankscope.cli.demo_job import board as board_module
from rankscope.cli.demo_job.board import Board
from rankscope.cli.demo_job.environment import probe_environment
from tools.jobs.launcher import SCRIPTS, Ranks, start_ranks

RANKS = 4
SLOW_RANK = 2
# What the fault adds to a step of the slow rank. On a slow machine 40 ms were a fifth of a step, and stacks did not
# name the line within 26 s.
DELAY_SECONDS = 0.080
START_SECONDS = 240.0  # a limit, not an expectation: a busy machine imports four frameworks
TERMINATE_SECONDS = 5.0
# Ranks are at most one step apart (a pipeline's a few), so none has begun this one when the switch is written.
STEPS_AHEAD = 3


@dataclass(frozen=True)
class FrameworkJob:
    name: str  # what the daemon calls it
    ranks: Ranks
    board: Board
    slow_rank: int

    def steps_done(self) -> int:
        """By the rank that is last."""
        return min(self.board.steps_done(rank) for rank in range(RANKS))

    def step_ends(self, rank: int, first: int) -> list[float]:
        """When a rank ended its steps from `first` on, by its own clock (Unix time); recent ones only."""
        while True:
            steps = self.board.steps_done(rank)
            ends = self.board.recent_step_seconds(rank)
            if self.board.steps_done(rank) == steps:  # no step ended meanwhile: both are about the same steps
                return ends[max(0, first - (steps - len(ends))) :]

    def start_fault(self, is_asynchronous: bool = False) -> int:
        """The step it begins with. Asynchronous ranks are at different steps: only that of the slow rank counts."""
        asked = (self.slow_rank,) if is_asynchronous else range(RANKS)
        step = max(self.board.steps_done(rank) for rank in asked) + STEPS_AHEAD
        self.board.fault_step = step
        return step

    def wait_until_training(self, steps: int = 3) -> None:
        self.ranks.wait_for(lambda: self.steps_done() >= steps, f"{steps} steps", START_SECONDS)


@contextmanager
def framework_job(
    python: Path, script: str, arguments: tuple[str, ...], fault: str, slow_rank: int = SLOW_RANK
) -> Iterator[FrameworkJob]:
    """Ranks die with the thread that made them: use it from the main thread."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-frameworks-")))
        board = Board.create(folder / "board", RANKS)
        stack.callback(board.close)
        run_id = f"frameworks-{uuid.uuid4().hex[:8]}"
        environment = probe_environment() | {
            "GROUP_RANK": "0",
            "LOCAL_WORLD_SIZE": str(RANKS),
            "TORCHELASTIC_RUN_ID": run_id,
            "OMP_NUM_THREADS": "1",
            # Models are made from configurations and data at random: nothing is loaded.
            "HF_HUB_OFFLINE": "1",
            "RANKSCOPE_FRAMEWORKS_FAULT": f"{fault},{slow_rank},{DELAY_SECONDS}",
            "RANKSCOPE_FRAMEWORKS_BOARD": str(folder / "board"),
            "RANKSCOPE_FRAMEWORKS_BOARD_FOLDER": str(Path(board_module.__file__).parent),
        }
        ranks = stack.enter_context(start_ranks(script, arguments, folder, RANKS, environment, python=python))
        stack.callback(ranks.terminate, TERMINATE_SECONDS)
        yield FrameworkJob(run_id, ranks, board, slow_rank)


def faulty_line(script: str, fault: str) -> tuple[str, int]:
    """File and line of the sleep that is the fault: in the job itself, or in what all jobs share."""
    for name in (script, "cpu_frameworks.py"):
        for number, text in enumerate((SCRIPTS / name).read_text().splitlines(), start=1):
            if text.endswith(f"# FAULT {fault}"):
                return name, number
    raise ValueError(f"no line is marked with FAULT {fault}")
