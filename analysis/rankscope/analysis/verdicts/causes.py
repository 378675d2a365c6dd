"""Why a rank is slow: the phase that holds its excess, and the source lines it is seen in more than its peers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, median_or_nan
from rankscope.analysis.verdicts.gpu_throttling import PHASES_OFF_THE_GPU, compare_clocks, compare_errors, name_throttle
from rankscope.analysis.verdicts.slow_rank import Screen, device_bound, is_timed_on_device
from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.analysis.verdicts.verdict import DEVICE, HOST, Cause, milliseconds
from rankscope.analysis.verdicts.windows import (
    HOST_WAITING_PHASES,
    WAITING_PHASES,
    WORK_PHASES,
    FrameSeen,
    GpuEvidence,
    RankColumns,
    StackProfile,
    step_phase,
)

FRAMES_SHOWN = 3
# Measured phases without a sharp border: forward lasts until backward begins, and so holds code of the loop.
PHASES_WITH_OTHER_CODE = frozenset({"forward", "other"})
_LIBRARY_FOLDERS = ("/site-packages/", "/dist-packages/", "/lib/python3", "/torchinductor_", "/rankscope/probe/")
_NO_FRAME = FrameSeen("", "", 0, 0.0, 0.0, "other")
_NOTHING = (0.0, 0.0, "other")


@dataclass(frozen=True)
class FrameExcess:
    frame: FrameSeen
    share: float  # inclusive share beyond the peers'
    leaf_share: float


@dataclass(frozen=True)
class _Culprit:
    """The slowest of the culprits, against the ranks of its cohort that are no culprits."""

    columns: RankColumns
    row: int
    peers: Bools
    compared_seconds: float
    usual_seconds: float
    bound: str
    stacks: StackProfile | None
    peers_stacks: Sequence[StackProfile]
    gpu: GpuEvidence | None
    peers_gpus: Sequence[GpuEvidence]

    @property
    def excess_seconds(self) -> float:
        return self.compared_seconds - self.usual_seconds

    def more_than_peers(self, seconds: Floats) -> float:
        """NaN where it was not measured."""
        return float(seconds[self.row]) - median_or_nan(seconds[self.peers])

    def frames(self, waiting: Collection[str] = WAITING_PHASES) -> list[FrameExcess]:
        if self.stacks is None or not self.peers_stacks:
            return []
        return frames_in_excess(self.stacks, self.peers_stacks, waiting=waiting)


def name_cause(
    columns: RankColumns,
    screened: Screen,
    culprits: Bools,
    stacks: Mapping[int, StackProfile],
    policy: Policy,
    gpus: Mapping[int, GpuEvidence] | None = None,
) -> Cause:
    """Cause of the culprits' excess in one (merged) window of one job. `stacks` and `gpus` are by rank."""
    row = screened.slowest(culprits)
    peers = ~culprits & (columns.stage == columns.stage[row])
    rank, others = int(columns.rank[row]), columns.rank[peers].tolist()
    culprit = _Culprit(
        columns,
        row,
        peers,
        float(screened.compared_seconds[row]),
        float(screened.reference_seconds[row]),
        _bound(columns, screened, row, policy),
        stacks.get(rank),
        [stacks[other] for other in others if other in stacks],
        (gpus or {}).get(rank),
        [gpus[other] for other in others if other in gpus] if gpus else [],
    )
    if screened.starved[row] and culprit.bound != DEVICE:
        return _starved(culprit)
    if culprit.bound:
        return _cause_on_device(culprit, policy)
    return _cause_by_phase(culprit, policy)


def _bound(columns: RankColumns, screened: Screen, row: int, policy: Policy) -> str:
    """Empty where steps are timed by the host's clock, or where it is not known how far the host is ahead."""
    if not is_timed_on_device(columns)[row]:
        return ""
    one = slice(row, row + 1)
    excess = screened.compared_seconds[one] - screened.reference_seconds[one]
    ahead, further = columns.run_ahead_seconds[one], screened.further_ahead_seconds[one]
    found = device_bound(ahead, further, columns.step_seconds[one], excess, policy)[0]
    return "" if np.isnan(found) else DEVICE if found else HOST


def _starved(culprit: _Culprit) -> Cause:
    delay = np.nan_to_num(culprit.more_than_peers(culprit.columns.starved_seconds))
    evidence = f"{milliseconds(float(delay))} a step without a CPU, of {milliseconds(culprit.excess_seconds)} in excess"
    return Cause("starved", _shown(culprit.frames()), evidence, culprit.bound)


def _cause_on_device(culprit: _Culprit, policy: Policy) -> Cause:
    """Where the step is timed on a device, and it is known whether the device or its host is late."""
    excess, columns = culprit.excess_seconds, culprit.columns
    exposed = culprit.more_than_peers(columns.input_seconds)
    if exposed >= policy.cause_share * excess:
        frames = _shown(e for e in culprit.frames() if e.frame.phase == "input")
        return Cause("input", frames, f"its device stands still {milliseconds(exposed)} a step for its input", HOST)
    if culprit.bound == HOST:
        return _late_host(culprit, policy)
    throttle = name_throttle(culprit.gpu, culprit.peers_gpus, _slowdown(culprit), policy)
    errors = compare_errors(culprit.gpu, culprit.peers_gpus)
    if throttle is not None:
        return replace(throttle, evidence=_joined(throttle.evidence, errors), bound=DEVICE)
    held = {phase: culprit.more_than_peers(columns.phase_seconds(phase)) for phase in ("forward", "backward")}
    where = [f", in {phase}" for phase, seconds in held.items() if seconds >= policy.cause_share * excess]
    more = f"{milliseconds(excess)} a step more on its device{''.join(where)}"
    clocks = compare_clocks(culprit.gpu, culprit.peers_gpus, policy)
    return Cause("device", (), _joined(more, errors, clocks), DEVICE)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _late_host(culprit: _Culprit, policy: Policy) -> Cause:
    """A host that is late never waits for its device: all it is seen in is its own work, backward too."""
    excess = culprit.excess_seconds
    late = f"its host is late by {milliseconds(excess)} a step"
    if culprit.stacks is None or not culprit.peers_stacks:
        of = "its" if culprit.stacks is None else "its peers'"
        return Cause("unknown", (), f"{late}; {of} stacks were not sampled", HOST)
    needed = policy.stack_cause_share * excess
    phase, held = _seen_in_stacks(culprit, HOST_WAITING_PHASES, needed)
    frames = culprit.frames(waiting=HOST_WAITING_PHASES)
    if held < needed:
        return Cause("unknown", _shown(frames), f"{late}, spread over several phases", HOST)
    return Cause(
        phase, _shown(frames, phase), f"{late}, {milliseconds(held)} of it in {_named(phase).removeprefix('of ')}", HOST
    )


def _named(phase: str) -> str:
    return "of the loop's other code" if phase == "other" else phase


def _cause_by_phase(culprit: _Culprit, policy: Policy) -> Cause:
    excess = culprit.excess_seconds
    phase, held = "unknown", 0.0
    for named in WORK_PHASES:
        seconds = culprit.more_than_peers(culprit.columns.phase_seconds(named))
        if seconds > held:
            phase, held = named, seconds
    needed = policy.cause_share * excess
    if held < needed:
        # The probe cannot split every job's step (no DDP, no DataLoader); stacks can.
        needed = policy.stack_cause_share * excess
        phase, held = _seen_in_stacks(culprit, WAITING_PHASES, needed)
    if not (phase in PHASES_OFF_THE_GPU and held >= needed):
        throttle = name_throttle(culprit.gpu, culprit.peers_gpus, _slowdown(culprit), policy)
        if throttle is not None:
            return throttle
    if held < needed:
        evidence = f"{milliseconds(excess)} a step in excess, spread over several phases"
        return Cause("unknown", _shown(culprit.frames()), evidence)
    return Cause(
        phase, _shown(culprit.frames(), phase), f"{milliseconds(held)} a step more {_named(phase)} than its peers"
    )


def _slowdown(culprit: _Culprit) -> float:
    return culprit.compared_seconds / culprit.usual_seconds if culprit.usual_seconds > 0 else inf


def _shown(found: Iterable[FrameExcess], phase: str | None = None) -> tuple[FrameSeen, ...]:
    """The first few, of `phase` only: a line of another phase explains nothing."""
    frames = [excess.frame for excess in found]
    if phase is not None:
        in_phase = [frame for frame in frames if step_phase(frame.phase) == phase]
        loop = [frame for frame in frames if frame.phase == "other"] if phase in PHASES_WITH_OTHER_CODE else []
        frames = in_phase or loop
    return tuple(frames[:FRAMES_SHOWN])


def _seen_in_stacks(culprit: _Culprit, waiting: Collection[str], needed_seconds: float) -> tuple[str, float]:
    """The phase that holds the excess by the rank's stacks, and the seconds of a step in it. The line comes before the
    phase: a rank that is blocked, because its device's queue is full, is seen in any phase."""
    step_seconds = float(culprit.columns.step_seconds[culprit.row])
    found = culprit.frames(waiting)
    if found and found[0].share * step_seconds >= needed_seconds:
        phase, share = step_phase(found[0].frame.phase), found[0].share
    else:
        phase, share = _phase_from_stacks(culprit, waiting)
    return phase, min(share * step_seconds, culprit.excess_seconds)


def _phase_from_stacks(culprit: _Culprit, waiting: Collection[str]) -> tuple[str, float]:
    """The phase that the rank is seen in most beyond its peers, and by which share of the samples."""
    best = ("unknown", 0.0)
    if culprit.stacks is None or not culprit.peers_stacks:
        return best
    for phase, share in culprit.stacks.phase_shares.items():
        if phase not in waiting:
            usual = median(other.phase_shares.get(phase, 0.0) for other in culprit.peers_stacks)
            best = max(best, (step_phase(phase), share - usual), key=lambda item: item[1])
    return best


def frames_in_excess(
    mine: StackProfile,
    others: Sequence[StackProfile],
    usual: Callable[[list[float]], float] = median,
    waiting: Collection[str] = WAITING_PHASES,
) -> list[FrameExcess]:
    """Own work seen more than the peers do it, the innermost place of the user's own code first."""
    tables = [{_place(frame): frame for frame in other.frames} for other in others]
    found = []
    for frame in mine.frames:
        if frame.phase in waiting:
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
    return file.startswith("<") or any(folder in file for folder in _LIBRARY_FOLDERS)


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
