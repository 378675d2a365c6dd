"""What a profile has more of than a reference: a rank against its cohort, this hour against yesterday.

A frame is in excess if its share of the time is larger by EXCESS_SHARE and significantly so: by Fisher's exact test,
one-sided, at SIGNIFICANCE divided by the number of frames that are seen often enough to be found. Samples of a rank
that follow each other are alike: those of OBSERVATION_SECONDS count as one observation, rounded to the frame's
disadvantage, and fewer than OBSERVATIONS_NEEDED on either side prove nothing. Ranks differ from each other: one rank is
in excess only if it is above each of several others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, lgamma
from typing import Any, Final, NamedTuple

import numpy as np

from rankscope.analysis.profiles.frames import Frame, is_user_code
from rankscope.analysis.profiles.profile import Profile
from rankscope.analysis.stats.robust import Floats, Ints
from rankscope.common.text import printable

EXCESS_SHARE: Final = 0.05
SIGNIFICANCE: Final = 0.01
# A program may stay in one function for seconds. Where the time of samples is not known, they are taken to be of 10 Hz.
OBSERVATION_SECONDS: Final = 5.0
OBSERVATION_SAMPLES: Final = 50
OBSERVATIONS_NEEDED: Final = 12
# Of the largest excess: below, a frame explains little of it.
MAIN_RATIO: Final = 0.3
ROUNDING: Final = 1e-9
FRAME_CHARACTERS: Final = 200
MAX_EXCESSES: Final = 100


class FrameExcess(NamedTuple):
    frame: Frame
    share: float  # of the time, anywhere on the stack
    reference_share: float
    own_excess: float  # as the innermost frame, or for the user's code as its innermost
    phase: str  # in which it is seen most

    @property
    def excess(self) -> float:
        return self.share - self.reference_share

    def fields(self) -> dict[str, Any]:
        """Of the message FrameExcess in ProfileService."""
        return {
            "function": self.frame.function,
            "file": self.frame.file,
            "line": self.frame.line,
            "share_ratio": self.share,
            "reference_share_ratio": self.reference_share,
            "phase": self.phase,
        }


@dataclass(frozen=True)
class Comparison:
    excesses: tuple[FrameExcess, ...]  # the line to look at first
    reason: str = ""  # why nothing can be said


class Shares(NamedTuple):
    """One side of a comparison: shares of its time, by frame."""

    frames: tuple[Frame, ...]
    share: Floats
    own: Floats  # as the innermost frame, or for the user's code as its innermost
    samples: int
    observations: int


def compare(profile: Profile, reference: Profile) -> Comparison:
    here, there = _shares(profile), _shares(reference)
    return compare_shares(here, there, _highest(profile, reference), lambda found: _phases(profile, found))


def compare_shares(
    here: Shares, there: Shares, highest: Floats, phases: Callable[[list[int]], Sequence[str]]
) -> Comparison:
    """`highest`: by frame of the reference, the share that one rank has to be above. `phases` gives those of some
    frames."""
    for name, one in (("the profile", here), ("the reference", there)):
        if one.observations < OBSERVATIONS_NEEDED:
            return Comparison((), f"{one.samples} samples of {name} are too few to compare")
    numbers = {frame: number for number, frame in enumerate(there.frames)}
    # A frame that the reference never saw has the last place there, which is 0.
    places = np.array([numbers.get(frame, len(numbers)) for frame in here.frames], dtype=np.int64)
    usual, own_usual, highest_there = (np.append(column, 0.0)[places] for column in (there.share, there.own, highest))
    # Which frames can be found at all is decided by both profiles together, so it does not favour either.
    missing = np.delete(there.share, places[places < len(numbers)])
    seen = np.append(here.observations * here.share + there.observations * usual, there.observations * missing)
    tried = np.count_nonzero(seen >= here.observations * EXCESS_SHARE)
    candidates = np.flatnonzero((here.share - usual >= EXCESS_SHARE) & (here.share > highest_there)).tolist()
    significant = [
        n
        for n in candidates
        if _chance(
            floor(here.observations * here.share[n] + ROUNDING),
            here.observations,
            ceil(there.observations * usual[n] - ROUNDING),
            there.observations,
        )
        < SIGNIFICANCE / tried
    ]
    found = [
        FrameExcess(here.frames[n], float(here.share[n]), float(usual[n]), float(here.own[n] - own_usual[n]), phase)
        for n, phase in zip(significant, phases(significant), strict=True)
    ]
    return Comparison(tuple(ranked(found)[:MAX_EXCESSES]))


def observations(samples: int, seconds: float) -> int:
    """`seconds`: that the samples stand for; 0 where it is not known."""
    return min(samples, int(seconds / OBSERVATION_SECONDS)) if seconds else samples // OBSERVATION_SAMPLES


def sentence(subject: str, found: FrameExcess, reference: str = "its peers") -> str:
    """As in: rank 3 spends 41 % of its time in `load_image (dataset.py:88)`, its peers 2 %."""
    frame = printable(str(found.frame), FRAME_CHARACTERS).replace("`", "'")
    here, there = (f"{100 * share:.0f} %" for share in (found.share, found.reference_share))
    return f"{subject} spends {here} of its time in `{frame}`, {reference} {there}"


def ranked(found: Iterable[FrameExcess], *, only_main: bool = False) -> list[FrameExcess]:
    """The frames with an excess of EXCESS_SHARE or more. Every caller of a slow line is in excess with it. The line
    itself comes first: the innermost of the user's own code that holds much of the excess; then other lines of the
    user, then libraries; last, unless `only_main`, what explains little."""
    large = [one for one in found if one.excess >= EXCESS_SHARE]
    needed = MAIN_RATIO * max((one.excess for one in large), default=0.0)

    def order(one: FrameExcess) -> tuple[bool, bool, float, float]:
        return (one.excess < needed, not is_user_code(one.frame), -round(one.own_excess, 2), -one.excess)

    return sorted((one for one in large if one.excess >= needed or not only_main), key=order)


def _shares(profile: Profile) -> Shares:
    weights = _weights(profile)
    total = max(float(weights.sum()), 1.0)
    is_own = np.array([is_user_code(frame) for frame in profile.frames], dtype=bool)[profile.stack_frames]
    lengths = np.diff(profile.stack_ends, prepend=0)
    stacks = np.repeat(np.arange(len(lengths)), lengths)
    per_stack = np.bincount(profile.stack, weights, len(lengths))
    own = np.zeros(len(profile.frames))
    first_of_stack = np.concatenate(([True], stacks[1:] != stacks[:-1]))[: len(stacks)]
    user_stacks, first_user = np.unique(stacks[is_own], return_index=True)
    np.add.at(own, profile.stack_frames[is_own][first_user], per_stack[user_stacks])
    leaf = first_of_stack & ~is_own
    np.add.at(own, profile.stack_frames[leaf], per_stack[stacks[leaf]])
    share = profile.frame_samples(weights) / total
    return Shares(profile.frames, share, own / total, profile.samples_total, _observations(profile))


def _weights(profile: Profile) -> Ints:
    return profile.nanos if profile.nanos_total else profile.samples


def _observations(profile: Profile) -> int:
    return observations(profile.samples_total, profile.nanos_total / 1e9)


def _highest(profile: Profile, reference: Profile) -> Floats:
    """By frame of the reference, the largest share in one of its ranks, if one rank is compared with several."""
    ranks = np.unique(reference.rank).tolist()
    if len(ranks) < 2 or len(np.unique(profile.rank)) > 1:
        return np.zeros(len(reference.frames))
    highest = np.zeros(len(reference.frames))
    for rank in ranks:
        if _observations(reference.filter(ranks=[rank])) >= OBSERVATIONS_NEEDED:
            weights = _weights(reference) * (reference.rank == rank)
            highest = np.maximum(highest, reference.frame_samples(weights) / max(1, int(weights.sum())))
    return highest


def _chance(seen: int, observed: int, usually_seen: int, usually_observed: int) -> float:
    """Fisher's exact test: how likely at least `seen` of the observations are, if both sides are alike."""
    both, everything = seen + usually_seen, observed + usually_observed
    chances = (
        exp(
            _log_choices(both, count)
            + _log_choices(everything - both, observed - count)
            - _log_choices(everything, observed)
        )
        for count in range(max(seen, both - usually_observed), min(both, observed) + 1)
    )
    return sum(chances)


def _log_choices(size: int, chosen: int) -> float:
    return lgamma(size + 1) - lgamma(chosen + 1) - lgamma(size - chosen + 1)


def _phases(profile: Profile, frames: list[int]) -> list[str]:
    """The phase in which each of these frames is seen most."""
    if not frames:
        return []
    weights = _weights(profile)
    by_phase = [profile.frame_samples(weights * (profile.phase == n)) for n in range(len(profile.phases))]
    return [profile.phases[int(n)] for n in np.argmax(np.array(by_phase)[:, frames], axis=0)]
