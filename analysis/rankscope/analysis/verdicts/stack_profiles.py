"""Stacks of ranks over several windows, and the lines in which a rank is seen more than its peers.

`frames_in_excess` takes what the last windows show, which may be chance. `StackHistory` gathers the stacks of a rank
that stays slow, and of its peers, until the rule of all profiles (profiles/comparison.py) can tell."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from rankscope.analysis.profiles.comparison import (
    EXCESS_SHARE,
    OBSERVATIONS_NEEDED,
    Comparison,
    FrameExcess,
    Shares,
    compare_shares,
    observations,
    ranked,
)
from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.phases import WAITING_PHASES
from rankscope.analysis.stats.robust import Floats
from rankscope.analysis.verdicts.windows import FrameSeen, StackProfile

# Older stacks fade: a rank may become slow for another reason.
HISTORY_SECONDS = 300.0
HISTORY_FRAMES = 128
HISTORY_RANKS = 256
HERTZ_ASSUMED = 10.0
_NO_FRAME = FrameSeen("", "", 0, 0.0, 0.0, "other")
_NOTHING = (0.0, 0.0, "other")


def frames_in_excess(
    mine: StackProfile,
    others: Sequence[StackProfile],
    usual: Callable[[list[float]], float] = median,
    waiting: Collection[str] = WAITING_PHASES,
) -> list[FrameExcess]:
    """Own work seen more than the peers do it, the innermost place of the user's own code first."""
    tables = [{frame[:3]: frame for frame in other.frames} for other in others]
    found = []
    for frame in mine.frames:
        if frame.phase in waiting:
            continue
        seen = [table.get(frame[:3], _NO_FRAME) for table in tables]
        own_excess = frame.own_share - usual([f.own_share for f in seen])
        share = usual([f.share for f in seen])
        found.append(FrameExcess(Frame(*frame[:3]), frame.share, share, own_excess, frame.phase))
    return ranked(found, only_main=True)


def compare_stacks(mine: StackProfile, others: Sequence[StackProfile]) -> Comparison:
    """What the rank is seen in significantly more than its peers, in any phase."""
    reference = merge_profiles(others)
    if reference is None:
        return Comparison((), "no samples of the peers")
    highest: dict[tuple[str, str, int], float] = {}
    for other in others:
        if observations(other.samples, other.seconds) >= OBSERVATIONS_NEEDED:
            for frame in other.frames:
                highest[frame[:3]] = max(highest.get(frame[:3], 0.0), frame.share)
    is_above = np.array([highest.get(frame[:3], 0.0) for frame in reference.frames])
    return compare_shares(
        _shares(mine), _shares(reference), is_above, lambda found: [mine.frames[n].phase for n in found]
    )


def _shares(profile: StackProfile) -> Shares:
    share, own = (_ratios([getattr(frame, name) for frame in profile.frames]) for name in ("share", "own_share"))
    frames = tuple(Frame(*frame[:3]) for frame in profile.frames)
    return Shares(frames, share, own, profile.samples, observations(profile.samples, profile.seconds))


def _ratios(values: list[float]) -> Floats:
    """Whatever a daemon sent."""
    return np.clip(np.nan_to_num(np.array(values, dtype=np.float64)), 0.0, 1.0)


class StackHistory:
    """Stacks of a slow rank and of its peers since it became slow, by rank."""

    def __init__(self) -> None:
        self.ranks: dict[int, StackProfile] = {}

    def add(self, latest: Mapping[int, StackProfile]) -> None:
        """`latest` are not in it yet."""
        if len(self.ranks) > HISTORY_RANKS:
            self.ranks = {}
        for rank, profile in latest.items():
            known = self.ranks.get(rank)
            added = _faded([profile] if known is None else [known, profile])
            if added is not None:
                self.ranks[rank] = added

    def proven(self, rank: int, peers: Collection[int], lines: Collection[Frame]) -> list[FrameExcess]:
        """Of these lines, those that the rank is in significantly more than its peers. A caller explains less than the
        line that it calls, so it is no proof."""
        mine = self.ranks.get(rank)
        if mine is None or not lines:
            return []
        found = compare_stacks(mine, [self.ranks[peer] for peer in peers if peer in self.ranks]).excesses
        return [one for one in found if one.frame in lines and one.own_excess >= EXCESS_SHARE]


def _faded(profiles: Sequence[StackProfile]) -> StackProfile | None:
    merged = merge_profiles(profiles)
    if merged is None:
        return None
    frames = merged.frames
    if len(frames) > HISTORY_FRAMES:
        frames = tuple(sorted(frames, key=lambda frame: -frame.share)[:HISTORY_FRAMES])
    kept = min(1.0, HISTORY_SECONDS / _weight(merged))
    return replace(merged, samples=int(kept * merged.samples), seconds=kept * merged.seconds, frames=frames)


def merge_profiles(profiles: Iterable[StackProfile]) -> StackProfile | None:
    """One profile of several, weighted by their time."""
    kept = [profile for profile in profiles if profile.samples > 0]
    if not kept:
        return None
    if len(kept) == 1:
        return kept[0]
    total = sum(map(_weight, kept))
    phases: dict[str, float] = {}
    shares: dict[tuple[str, str, int], tuple[float, float, str]] = {}
    for profile in kept:
        weight = _weight(profile) / total
        for phase, share in profile.phase_shares.items():
            phases[phase] = phases.get(phase, 0.0) + weight * share
        for frame in profile.frames:
            place = frame[:3]
            known_share, known_own, _ = shares.get(place, _NOTHING)
            shares[place] = (known_share + weight * frame.share, known_own + weight * frame.own_share, frame.phase)
    frames = tuple(FrameSeen(*place, *share) for place, share in shares.items())
    is_timed = all(profile.seconds for profile in kept)
    samples = sum(profile.samples for profile in kept)
    return StackProfile(samples, phases, frames, total if is_timed else 0.0)


def _weight(profile: StackProfile) -> float:
    return profile.seconds or profile.samples / HERTZ_ASSUMED
