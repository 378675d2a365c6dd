"""The lines of a program that stalls are in, where there is no rank to compare with: all ranks stall, in turn or
together.

Where stacks from before the stalls are known, it is the line that is seen more since. Otherwise it shows with time: a
recording of stacks lasts longer than a stall, and has no time for each sample, but recordings in which a rank stalled
for longer have more samples in the line, by as much as the stalls are longer."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from math import sqrt
from typing import NamedTuple

import numpy as np

from rankscope.analysis.profiles.frames import Frame, is_user_code
from rankscope.analysis.stats.robust import Floats
from rankscope.analysis.verdicts.stack_profiles import StackHistory
from rankscope.analysis.verdicts.thresholds import FIXED
from rankscope.analysis.verdicts.windows import FrameSeen, JobWindow, StackProfile

# Reading stacks is most of what this costs.
STALLED_RANKS_ASKED = 8
OTHER_RANKS_ASKED = 4
# A recording that ends now may have begun so many windows ago.
MAX_WINDOWS = 16
WINDOWS_ASKED_AFTER = 5
RECORDINGS_NEEDED, RECORDINGS_COMPARED = 12, 4
MAX_RECORDINGS, MAX_FRAMES = 500, 256
LINES_SHOWN = 3


class _Lost(NamedTuple):
    end_unix_seconds: float
    seconds: float
    by_rank: Mapping[int, float]
    by_all: float


class StallLines:
    def __init__(self, usual: StackProfile | None, waiting: Collection[str]) -> None:
        """`usual`: stacks from before the stalls. `waiting`: phases in which ranks may wait for others."""
        self._usual = usual
        self._waiting = waiting
        self._stacks = StackHistory()
        self._windows: deque[_Lost] = deque(maxlen=MAX_WINDOWS)
        self._read: dict[int, float] = {}  # by rank, the end of the last recording
        self._stalled_shares: list[float] = []  # of each recording's time
        self._shares: dict[FrameSeen, dict[int, float]] = {}  # by line, of recordings that show it

    def add(self, window: JobWindow, by_rank: Mapping[int, float], by_all: float = 0.0) -> None:
        """Seconds that ranks lost in a window, each in its own stalls, or all in the same ones."""
        self._windows.append(_Lost(window.end_unix_seconds, window.window_seconds, by_rank, by_all))
        evidence = window.evidence()
        for rank in self._asked(window.columns.rank.tolist()):
            seen = evidence.get(rank)
            stacks = seen.stacks if seen is not None else None
            if stacks is None or not (stacks.seconds > 0 and stacks.samples > 0):
                continue
            if self._read.get(rank) == stacks.end_unix_seconds:
                continue
            self._read[rank] = stacks.end_unix_seconds
            self._stacks.add({0: stacks})
            self._add_recording(stacks, self._stalled_share(rank, stacks))

    def _asked(self, ranks: Iterable[int]) -> list[int]:
        """Those that stalled lately, and a few others."""
        recent = list(self._windows)[-WINDOWS_ASKED_AFTER:]
        stalled = list(dict.fromkeys(rank for lost in reversed(recent) for rank in lost.by_rank))[:STALLED_RANKS_ASKED]
        others = [rank for rank in ranks if rank not in stalled]
        return [*stalled, *others[:OTHER_RANKS_ASKED]]

    def _stalled_share(self, rank: int, stacks: StackProfile) -> float:
        end = stacks.end_unix_seconds
        start, lost = end - stacks.seconds, 0.0
        for window in self._windows:
            inside = min(end, window.end_unix_seconds) - max(start, window.end_unix_seconds - window.seconds)
            if inside > 0:
                lost += (window.by_rank.get(rank, 0.0) + window.by_all) * min(1.0, inside / window.seconds)
        return min(1.0, lost / stacks.seconds)

    def _add_recording(self, stacks: StackProfile, stalled_share: float) -> None:
        number = len(self._stalled_shares)
        if number == MAX_RECORDINGS:
            return
        self._stalled_shares.append(stalled_share)
        for frame in (frame for frame in stacks.frames if frame.phase not in self._waiting):
            line = frame._replace(share=0.0, own_share=0.0)
            if line in self._shares or len(self._shares) < MAX_FRAMES:
                self._shares.setdefault(line, {})[number] = frame.own_share

    def found(self) -> tuple[FrameSeen, ...]:
        """The lines that stalls are in, those of the user's own code first."""
        stalled = np.array(self._stalled_shares)
        if self._usual is not None and len(stalled) >= RECORDINGS_COMPARED:
            return self._new_lines(self._usual, float(stalled.mean()))
        if len(stalled) < RECORDINGS_NEEDED or not stalled.std() > 0:
            return ()
        explained = {line: ratio for line, shares in self._shares.items() if (ratio := _explained(stalled, shares))}
        order = sorted(explained, key=lambda line: (not is_user_code(Frame(*line[:3])), -explained[line]))
        return tuple(line._replace(share=explained[line]) for line in order[:LINES_SHOWN])

    def _new_lines(self, usual: StackProfile, stalled_share: float) -> tuple[FrameSeen, ...]:
        """Lines of the user's own code that are seen more than before, by enough of the stalls."""
        seen = self._stacks.ranks[0]
        before = {frame[:3]: frame.own_share for frame in usual.frames}
        needed = max(FIXED.stall_line_share * stalled_share, FIXED.stall_line_samples / max(seen.samples, 1))
        working = (frame for frame in seen.frames if frame.phase not in self._waiting)
        new = {frame: frame.own_share - before.get(frame[:3], 0.0) for frame in working}
        lines = [frame for frame, more in new.items() if more >= needed and is_user_code(Frame(*frame[:3]))]
        return tuple(sorted(lines, key=lambda frame: -new[frame])[:LINES_SHOWN])


def _explained(stalled: Floats, seen: Mapping[int, float]) -> float:
    """How much of a stall is spent in a line, if that is no chance; else 0."""
    shares = np.zeros(len(stalled))
    shares[list(seen)] = list(seen.values())
    if not shares.std() > 0:
        return 0.0
    slope = float(np.cov(stalled, shares)[0, 1] / stalled.var(ddof=1))
    correlation = float(np.corrcoef(stalled, shares)[0, 1])
    score = correlation * sqrt((len(stalled) - 2) / max(1e-9, 1 - correlation * correlation))
    return min(slope, 1.0) if slope >= FIXED.stall_line_share and score >= FIXED.stall_line_score else 0.0
