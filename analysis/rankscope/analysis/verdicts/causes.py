"""Why a rank is slow: the phase that holds its excess, and the source lines it is seen in more than its peers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

import numpy as np

from rankscope.analysis.profiles.comparison import MAIN_RATIO, FrameExcess, sentence
from rankscope.analysis.profiles.frames import Frame, is_user_code
from rankscope.analysis.profiles.phases import DEVICE_SYNC, WAITING_PHASES
from rankscope.analysis.stats.robust import Bools, Floats, median_or_nan
from rankscope.analysis.verdicts.gpu_throttling import PHASES_OFF_THE_GPU, compare_clocks, compare_errors, name_throttle
from rankscope.analysis.verdicts.slow_rank import Screen, device_bound, is_timed_on_device
from rankscope.analysis.verdicts.stack_profiles import StackHistory, frames_in_excess
from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.analysis.verdicts.verdict import DEVICE, HOST, Cause, milliseconds, ranks
from rankscope.analysis.verdicts.windows import (
    HOST_WAITING_PHASES,
    PAST,
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


@dataclass(frozen=True)
class _Culprit:
    """The slowest of the culprits, against the ranks of its cohort that are no culprits."""

    rank: int
    others: Sequence[int]
    columns: RankColumns
    row: int
    peers: Bools
    compared_seconds: float
    usual_seconds: float
    bound: str
    stacks: StackProfile | None
    peers_stacks: Sequence[StackProfile]
    history: StackHistory
    gpu: GpuEvidence | None
    peers_gpus: Sequence[GpuEvidence]
    ranges: Mapping[str, float]
    peers_ranges: Sequence[Mapping[str, float]]
    policy: Policy

    @property
    def excess_seconds(self) -> float:
        return self.compared_seconds - self.usual_seconds

    def more_than_peers(self, seconds: Floats) -> float:
        """NaN where it was not measured."""
        return float(seconds[self.row]) - median_or_nan(seconds[self.peers])

    @property
    def than(self) -> str:
        """The other side of the comparison, in words."""
        return "earlier" if list(self.others) == [PAST] else "its peers"

    @property
    def step_seconds(self) -> float:
        return float(self.columns.step_seconds[self.row])

    def frames(self, waiting: Collection[str] = WAITING_PHASES) -> list[FrameExcess]:
        if self.stacks is None or not self.peers_stacks:
            return []
        return frames_in_excess(self.stacks, self.peers_stacks, waiting=waiting)

    @property
    def seconds_at_device(self) -> float:
        """How much longer its host waits for its device, in a step, at lines at which its peers wait less."""
        if self.stacks is None or not self.peers_stacks:
            return 0.0
        usual = [{frame[:3]: frame.own_share for frame in peer.frames} for peer in self.peers_stacks]
        waits = (
            frame for frame in self.stacks.frames if frame.phase == DEVICE_SYNC and is_user_code(Frame(*frame[:3]))
        )
        more = (frame.own_share - median(peer.get(frame[:3], 0.0) for peer in usual) for frame in waits)
        return sum(share for share in more if share > 0) * self.step_seconds

    def explaining(self, waiting: Collection[str]) -> list[FrameExcess]:
        """Lines that hold enough of the measured excess. Stacks may be from before the rank became slow: a recording
        takes seconds, and longer on a busy machine. Where the step time is not known, all lines are taken."""
        needed_seconds = MAIN_RATIO * self.excess_seconds
        return [one for one in self.frames(waiting) if not one.excess * self.step_seconds < needed_seconds]

    def explained(self, cause: Cause, waiting: Collection[str] = WAITING_PHASES) -> Cause:
        """The cause with the first lines of its phase. Where there are samples enough to prove one, its evidence has
        the share of the rank's time in that line and its peers' share. A line of a library is named only if it is
        proven: one sample of ten is a large share, and any line of a library is seen once."""
        cause = replace(cause, evidence=_joined(cause.evidence, self.range_in_excess()))
        recent = _of_phase(self.explaining(waiting), cause.phase)
        proven = self.history.proven(self.rank, self.others, {one.frame for one in recent})
        if not proven:
            return replace(cause, frames=self.shown([one for one in recent if is_user_code(one.frame)]))
        evidence = _joined(cause.evidence, sentence(ranks([self.rank]), proven[0], self.than))
        return replace(cause, frames=self.shown(proven), evidence=evidence)

    def range_in_excess(self) -> str:
        """The NVTX range that holds the excess, if one does. Ranges are host time: a host that is ahead of its device
        waits in any of them. So they tell where the host is late, or where it does the work."""
        if not self.ranges or not self.peers_ranges or (is_timed_on_device(self.columns)[self.row] and not self.bound):
            return ""
        more = {
            name: seconds - median(peer.get(name, 0.0) for peer in self.peers_ranges)
            for name, seconds in self.ranges.items()
        }
        name = max(more, key=lambda name: more[name])
        if more[name] < self.policy.cause_share * self.excess_seconds:
            return ""
        return f"{milliseconds(more[name])} a step more in its NVTX range {name!r}"

    def shown(self, found: Sequence[FrameExcess]) -> tuple[FrameSeen, ...]:
        """The first few of those that the latest stacks have."""
        seen = {frame[:3]: frame for frame in self.stacks.frames} if self.stacks is not None else {}
        return tuple(seen[one.frame[:3]]._replace(share=one.share) for one in found[:FRAMES_SHOWN])


def name_cause(
    columns: RankColumns,
    screened: Screen,
    culprits: Bools,
    stacks: Mapping[int, StackProfile],
    policy: Policy,
    gpus: Mapping[int, GpuEvidence] | None = None,
    history: StackHistory | None = None,
    ranges: Mapping[int, Mapping[str, float]] | None = None,
) -> Cause:
    """Cause of the culprits' excess in one (merged) window of one job. `stacks`, `gpus` and `ranges` are by rank."""
    row = screened.slowest(culprits)
    peers = peers_of(columns, culprits, row)
    rank, others = int(columns.rank[row]), columns.rank[peers].tolist()
    culprit = _Culprit(
        rank,
        others,
        columns,
        row,
        peers,
        float(screened.compared_seconds[row]),
        float(screened.reference_seconds[row]),
        _bound(columns, screened, row, policy),
        stacks.get(rank),
        [stacks[other] for other in others if other in stacks],
        history or StackHistory(),
        (gpus or {}).get(rank),
        [gpus[other] for other in others if other in gpus] if gpus else [],
        (ranges or {}).get(rank, {}),
        [ranges[other] for other in others if other in ranges] if ranges else [],
        policy,
    )
    if culprit.bound == HOST and culprit.seconds_at_device >= policy.stack_cause_share * culprit.excess_seconds:
        # The loop waits for the device in every step, so that operations are issued late when the device is late.
        culprit = replace(culprit, bound=DEVICE)
    if screened.starved[row] and culprit.bound != DEVICE:
        return _starved(culprit)
    if culprit.bound:
        return _cause_on_device(culprit, policy)
    return _cause_by_phase(culprit, policy)


def peers_of(columns: RankColumns, culprits: Bools, row: int) -> Bools:
    """The other ranks of its stage; in a pipeline with one rank in each stage, those of the other stages."""
    same_stage: Bools = ~culprits & (columns.stage == columns.stage[row])
    return same_stage if same_stage.any() else ~culprits


def _bound(columns: RankColumns, screened: Screen, row: int, policy: Policy) -> str:
    """Empty where steps are timed by the host's clock, or where it is not known how far the host is ahead."""
    if not is_timed_on_device(columns)[row]:
        return ""
    issued_late = screened.issued_late_share[row]
    if not np.isnan(issued_late):
        return HOST if issued_late >= 1 - policy.device_bound_share else DEVICE
    one = slice(row, row + 1)
    excess = screened.compared_seconds[one] - screened.reference_seconds[one]
    late, late_ahead = columns.late_seconds[row], columns.late_ahead_seconds[row]
    if late >= policy.cause_share * excess[0] and not np.isnan(late_ahead):
        # Between stalls a host gets ahead as far as it can, so only the stalls themselves tell.
        return DEVICE if late_ahead >= policy.device_bound_share * late else HOST
    ahead, further = screened.ahead_seconds[one], screened.further_ahead_seconds[one]
    found = device_bound(ahead, further, columns.step_seconds[one], excess, policy)[0]
    return "" if np.isnan(found) else DEVICE if found else HOST


def _starved(culprit: _Culprit) -> Cause:
    delay = np.nan_to_num(culprit.more_than_peers(culprit.columns.starved_seconds))
    # A rank also lacks a CPU while it waits for others, so this can be more than its excess.
    evidence = (
        f"{milliseconds(float(delay))} a step more without a CPU than {culprit.than}; "
        f"its own work takes {milliseconds(culprit.excess_seconds)} longer"
    )
    return Cause("starved", culprit.shown(culprit.frames()), evidence, culprit.bound)


def _cause_on_device(culprit: _Culprit, policy: Policy) -> Cause:
    """Where the step is timed on a device, and it is known whether the device or its host is late."""
    excess, columns = culprit.excess_seconds, culprit.columns
    exposed = culprit.more_than_peers(columns.input_seconds)
    if exposed >= policy.cause_share * excess:
        evidence = f"its device stands still {milliseconds(exposed)} a step for its input"
        return culprit.explained(Cause("input", (), evidence, HOST))
    if culprit.bound == HOST:
        return _late_host(culprit, policy)
    throttle = name_throttle(culprit.gpu, culprit.peers_gpus, _slowdown(culprit), policy, culprit.than)
    errors = compare_errors(culprit.gpu, culprit.peers_gpus, culprit.than)
    if throttle is not None:
        return replace(throttle, evidence=_joined(throttle.evidence, errors), bound=DEVICE)
    held = {phase: culprit.more_than_peers(columns.phase_seconds(phase)) for phase in ("forward", "backward")}
    where = [f", in {phase}" for phase, seconds in held.items() if seconds >= policy.cause_share * excess]
    more = f"{milliseconds(excess)} a step more on its device{''.join(where)}"
    clocks = compare_clocks(culprit.gpu, culprit.peers_gpus, policy, culprit.than)
    return Cause("device", (), _joined(more, errors, clocks), DEVICE)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _late_host(culprit: _Culprit, policy: Policy) -> Cause:
    """A host that is late never waits for its device: all it is seen in is its own work, backward too."""
    excess = culprit.excess_seconds
    late = f"its host is late by {milliseconds(excess)} a step"
    if culprit.stacks is None or not culprit.peers_stacks:
        of = "its" if culprit.stacks is None else "earlier" if culprit.than == "earlier" else "its peers'"
        return culprit.explained(Cause("unknown", (), f"{late}; {of} stacks were not sampled", HOST))
    needed = policy.stack_cause_share * excess
    phase, held = _seen_in_stacks(culprit, HOST_WAITING_PHASES, needed)
    cause = Cause(phase, (), f"{late}, {milliseconds(held)} of it in {_named(phase).removeprefix('of ')}", HOST)
    if held < needed:
        cause = Cause("unknown", (), f"{late}, spread over several phases", HOST)
    return culprit.explained(cause, HOST_WAITING_PHASES)


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
        throttle = name_throttle(culprit.gpu, culprit.peers_gpus, _slowdown(culprit), policy, culprit.than)
        if throttle is not None:
            return throttle
    if held < needed:
        evidence = f"{milliseconds(excess)} a step in excess, spread over several phases"
        return culprit.explained(Cause("unknown", (), evidence))
    return culprit.explained(Cause(phase, (), f"{milliseconds(held)} a step more {_named(phase)} than {culprit.than}"))


def _slowdown(culprit: _Culprit) -> float:
    return culprit.compared_seconds / culprit.usual_seconds if culprit.usual_seconds > 0 else inf


def _of_phase(found: Sequence[FrameExcess], phase: str) -> Sequence[FrameExcess]:
    """A line of another phase explains nothing."""
    if phase == "unknown":
        return found
    loop = [one for one in found if one.phase == "other"] if phase in PHASES_WITH_OTHER_CODE else []
    return [one for one in found if step_phase(one.phase) == phase] or loop


def _seen_in_stacks(culprit: _Culprit, waiting: Collection[str], needed_seconds: float) -> tuple[str, float]:
    """The phase that holds the excess by the rank's stacks, and the seconds of a step in it. The line comes before the
    phase: a rank that is blocked, because its device's queue is full, is seen in any phase."""
    step_seconds = culprit.step_seconds
    found = culprit.frames(waiting)
    if found and found[0].excess * step_seconds >= needed_seconds:
        phase, share = step_phase(found[0].phase), found[0].excess
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
