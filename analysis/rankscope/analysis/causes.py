"""Why a rank is slow: the phase that holds its excess, and the source lines it is seen in more than its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import Bools, median_or_nan
from rankscope.analysis.screening import Screen
from rankscope.analysis.throttles import PHASES_OFF_THE_GPU, name_throttle
from rankscope.analysis.verdict import Cause
from rankscope.analysis.windows import (
    WAITING_PHASES,
    WORK_PHASES,
    FrameSeen,
    GpuEvidence,
    RankColumns,
    StackProfile,
)

FRAMES_SHOWN = 3
_NO_FRAME = FrameSeen("", "", 0, 0.0, 0.0, "other")
_NOTHING = (0.0, 0.0, "other")


@dataclass(frozen=True)
class FrameExcess:
    frame: FrameSeen
    share: float  # inclusive share beyond the peers'
    leaf_share: float


def name_cause(
    columns: RankColumns,
    screened: Screen,
    culprits: Bools,
    stacks: Mapping[int, StackProfile],
    policy: Policy,
    gpus: Mapping[int, GpuEvidence] | None = None,
) -> Cause:
    """Cause of the culprits' excess in one (merged) window of one job. `stacks` and `gpus` are by rank."""
    slowest = int(np.flatnonzero(culprits)[np.argmax(screened.own_seconds[culprits])])
    peers = ~culprits & (columns.stage == columns.stage[slowest])
    excess = float(screened.own_seconds[slowest] - screened.reference_seconds[slowest])
    frames = _frames_in_excess(int(columns.rank[slowest]), columns.rank[peers].tolist(), stacks)
    if screened.starved[slowest]:
        delay = float(columns.starved_seconds[slowest] - np.nan_to_num(median_or_nan(columns.starved_seconds[peers])))
        return Cause("starved", frames, f"{_ms(delay)} a step without a CPU, of {_ms(excess)} in excess")
    by_phase = _excess_by_phase(columns, slowest, peers)
    phase, held = max(by_phase.items(), key=lambda item: item[1], default=("unknown", 0.0))
    if held < policy.cause_share * excess:
        # The probe cannot split every job's step (no DDP, no DataLoader); stacks can.
        phase, held = _phase_from_stacks(columns, slowest, peers, stacks)
    if gpus and not (phase in PHASES_OFF_THE_GPU and held >= policy.cause_share * excess):
        theirs = [gpus[rank] for rank in columns.rank[peers].tolist() if rank in gpus]
        slowdown = float(screened.own_seconds[slowest] / screened.reference_seconds[slowest])
        throttle = name_throttle(gpus.get(int(columns.rank[slowest])), theirs, slowdown, policy)
        if throttle is not None:
            return throttle
    if held < policy.cause_share * excess:
        return Cause("unknown", frames, f"{_ms(excess)} a step in excess, spread over several phases")
    in_phase = tuple(f for f in frames if f.phase == phase) or frames
    return Cause(phase, in_phase, f"{_ms(held)} a step more {phase} than its peers")


def _excess_by_phase(columns: RankColumns, row: int, peers: Bools) -> dict[str, float]:
    found = {}
    for phase in WORK_PHASES:
        seconds = columns.phase_seconds(phase)
        difference = float(seconds[row]) - median_or_nan(seconds[peers])
        if not np.isnan(difference):
            found[phase] = difference
    return found


def _phase_from_stacks(
    columns: RankColumns, row: int, peers: Bools, stacks: Mapping[int, StackProfile]
) -> tuple[str, float]:
    mine = stacks.get(int(columns.rank[row]))
    others = [stacks[rank] for rank in columns.rank[peers].tolist() if rank in stacks]
    if mine is None or not others:
        return "unknown", 0.0
    step = float(columns.step_seconds[row])
    best = ("unknown", 0.0)
    for phase, share in mine.phase_shares.items():
        if phase in WAITING_PHASES:
            continue
        usual = float(np.median([other.phase_shares.get(phase, 0.0) for other in others]))
        best = max(best, (phase, (share - usual) * step), key=lambda item: item[1])
    return best


def _frames_in_excess(culprit: int, peers: Sequence[int], stacks: Mapping[int, StackProfile]) -> tuple[FrameSeen, ...]:
    mine = stacks.get(culprit)
    others = [stacks[rank] for rank in peers if rank in stacks]
    if mine is None or not others:
        return ()
    return tuple(excess.frame for excess in frames_in_excess(mine, others)[:FRAMES_SHOWN])


def frames_in_excess(
    mine: StackProfile, others: Sequence[StackProfile], usual: Callable[[list[float]], float] = median
) -> list[FrameExcess]:
    """Own work seen more than the peers do it, the innermost place of the user's own code first."""
    tables = [{_place(frame): frame for frame in other.frames} for other in others]
    found = []
    for frame in mine.frames:
        if frame.phase in WAITING_PHASES:
            continue
        seen = [table.get(_place(frame), _NO_FRAME) for table in tables]
        share = frame.share - usual([f.share for f in seen])
        leaf = frame.leaf_share - usual([f.leaf_share for f in seen])
        if share >= 0.05:
            found.append(FrameExcess(frame, share, leaf))
    largest = max((excess.share for excess in found), default=0.0)
    # Every caller of the slow line is in excess with it; what is wanted is the line itself: the innermost that still
    # holds most of the excess.
    kept = [excess for excess in found if excess.share >= 0.3 * largest]
    return sorted(kept, key=lambda e: (is_library(e.frame.file), -round(e.leaf_share, 2), -e.share))


def is_library(file: str) -> bool:
    """Not the user's code: the place to look is where he calls it."""
    return "/site-packages/" in file or "/dist-packages/" in file or "/lib/python3" in file or file.startswith("<")


def _place(frame: FrameSeen) -> tuple[str, str, int]:
    return (frame.file, frame.function, frame.line)


def merge_profiles(profiles: Iterable[StackProfile]) -> StackProfile | None:
    """One profile of several windows, weighted by their samples."""
    kept = [profile for profile in profiles if profile.samples > 0]
    total = sum(profile.samples for profile in kept)
    if total == 0:
        return None
    phases: dict[str, float] = {}
    shares: dict[tuple[str, str, int], tuple[float, float, str]] = {}
    for profile in kept:
        weight = profile.samples / total
        for phase, share in profile.phase_shares.items():
            phases[phase] = phases.get(phase, 0.0) + weight * share
        for frame in profile.frames:
            function, file, line, share, leaf_share, phase = frame
            place = (file, function, line)
            known_share, known_leaf_share, _ = shares.get(place, _NOTHING)
            shares[place] = (known_share + weight * share, known_leaf_share + weight * leaf_share, phase)
    frames = (FrameSeen(function, file, line, *share) for (file, function, line), share in shares.items())
    return StackProfile(total, phases, tuple(frames))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
