"""A small file that the launcher and the ranks map: the ranks write their progress, the launcher the start of a
fault. Every field is eight aligned bytes with one writer, so readers need no lock."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

RECENT_STEPS = 254
_HEADER_BYTES = 64
_RANK_BYTES = 16 + 8 * RECENT_STEPS
_NEVER = 2**63


class Board:
    """Maps an existing board; `create` makes one."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.ranks = (len(self._map) - _HEADER_BYTES) // _RANK_BYTES

    @classmethod
    def create(cls, path: Path, ranks: int) -> Board:
        path.write_bytes(bytes(_HEADER_BYTES + ranks * _RANK_BYTES))
        board = cls(path)
        board.fault_step = None
        return board

    def close(self) -> None:
        self._map.close()

    @property
    def fault_step(self) -> int | None:
        """The number of the first step with the fault; None before it is known, and after the fault."""
        (step,) = struct.unpack_from("=Q", self._map, 0)
        return None if step == _NEVER else step

    @fault_step.setter
    def fault_step(self, step: int | None) -> None:
        self._write("=Q", 0, _NEVER if step is None else step)

    def record_step(self, rank: int, seconds: float) -> None:
        base = _HEADER_BYTES + rank * _RANK_BYTES
        (steps,) = struct.unpack_from("=Q", self._map, base)
        self._write("=d", base + 16 + 8 * (steps % RECENT_STEPS), seconds)
        self._write("=Q", base, steps + 1)

    def steps_done(self, rank: int) -> int:
        (steps,) = struct.unpack_from("=Q", self._map, _HEADER_BYTES + rank * _RANK_BYTES)
        return int(steps)

    def recent_step_seconds(self, rank: int) -> list[float]:
        """Oldest first; at most RECENT_STEPS."""
        steps = self.steps_done(rank)
        base = _HEADER_BYTES + rank * _RANK_BYTES + 16
        ring = struct.unpack_from(f"={RECENT_STEPS}d", self._map, base)
        return [ring[step % RECENT_STEPS] for step in range(max(0, steps - RECENT_STEPS), steps)]

    def _write(self, form: str, offset: int, value: float) -> None:
        """At once: `pack_into` writes zeros first, which a reader would take for a value."""
        packed = struct.pack(form, value)
        self._map[offset : offset + len(packed)] = packed
