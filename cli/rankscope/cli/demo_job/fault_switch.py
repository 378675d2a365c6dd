# mypy: disable-error-code="import-not-found"
# Runs inside a rank, where the scripts' own folder is on the path and the package is not.
"""In a rank: which fault is on in this step, and how long the steps take."""

from __future__ import annotations

import os
import time
from pathlib import Path

from board import Board
from faults import parse_fault


class FaultSwitch:
    """`active` is the kind of the fault that this rank suffers in the present step, else None.

    Looking costs under a microsecond, so a healthy job runs the same code as a faulty one.
    """

    def __init__(self, rank: int, spec: str, board: Board | None) -> None:
        self._fault = parse_fault(spec)
        self._board = board
        self._rank = rank
        # Faults of one rank are real only there; the others are everybody's.
        self._concerns_this_rank = self._fault.rank is None or self._fault.rank == rank
        self._step = 0
        self._step_started = time.monotonic()
        self.delay_seconds = (self._fault.delay_ms or 0.0) / 1000
        self.active: str | None = None

    @classmethod
    def from_environment(cls, rank: int) -> FaultSwitch:
        path = os.environ.get("RANKSCOPE_DEMO_BOARD")
        return cls(rank, os.environ.get("RANKSCOPE_DEMO_FAULT", "none"), Board(Path(path)) if path else None)

    def next_step(self) -> None:
        """Between two steps: notes the one that ended and looks whether the fault begins or ends with the next."""
        now = time.monotonic()
        if self._board is None:
            return
        self._board.record_step(self._rank, now - self._step_started)
        self._step_started = now
        self._step += 1
        self.look()

    def look(self) -> None:
        """Whether the fault is on now: who hangs in a step has to look by itself whether that is over."""
        fault_step = None if self._board is None else self._board.fault_step
        is_on = self._concerns_this_rank and fault_step is not None and self._step >= fault_step
        self.active = self._fault.kind if is_on else None
