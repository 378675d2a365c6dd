"""Gives numbers to calls that the profiler did not number, by their order: the best shift between the orders of two
ranks is searched. A capture may begin a few collectives earlier on one rank, and a sampled one may lack some."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, Ints, rows_of_groups, take_rows
from rankscope.analysis.traces.joins.channels import Calls, Channel

# Shifts are tried this far around those suggested by starts, ends and clocks, on this many calls each.
SHIFTS_TRIED = 64
CALLS_TRIED = 128
TOKENS_ALIKE_RATIO = 0.9
# Another shift must fit this much worse, and ends of matched calls must be this much closer than neighbouring calls.
CLEARLY_WORSE = 3.0
SPREAD_TO_GAP_RATIO = 0.25
CLOSE_NS = 2_000.0
SAME_STEP_RATIO = 0.8
CONTRADICTION, CONTRADICTING_CALLS = 20.0, 8
# Ends that lie within such a window of each other vote for one clock difference.
VOTING_WINDOWS_NS = (50_000, 500_000, 5_000_000)
VOTES_NEEDED = 3
VOTES_NEEDED_RATIO = 0.3
PAIRS_TRIED = 4_000_000
KEPT_RATIO = 0.8  # of the differences, when computing the spread


def number_by_order(calls: Calls, channel: Channel, notes: list[str]) -> Ints:
    """Ranks one after the other, longest first, each against the collectives found so far. Group names repeat, so
    ranks that do not fit may be a group of their own."""
    number = np.full(len(calls), -1, dtype=np.int64)
    ranks, counts = np.unique(calls.rank, return_counts=True)
    runs: list[_Found] = []
    next_number = 0
    bases: Counter[Basis] = Counter()
    for rank in ranks[np.argsort(-counts, kind="stable")].tolist():
        rows = np.flatnonzero(calls.rank == rank)
        mine = Run(calls.token[rows], calls.stop_ns[rows], calls.step[rows])
        fits = [found.fit(mine) if channel.size < 0 or found.members < channel.size else None for found in runs]
        fitting = [i for i, fit in enumerate(fits) if fit is not None and fit.found]
        if not fitting and any(fit is not None and fit.basis is Basis.AMBIGUOUS for fit in fits):
            bases[Basis.AMBIGUOUS] += 1
            continue
        assigned = np.full(len(rows), -1, dtype=np.int64)
        if fitting:
            chosen = max(fitting, key=lambda i: len(_fit(fits[i]).right))
            fit = _fit(fits[chosen])
            bases[fit.basis] += 1
            assigned[fit.right] = runs[chosen].number[fit.left]
        new = assigned < 0
        assigned[new] = next_number + np.arange(int(new.sum()))
        next_number += int(new.sum())
        number[rows] = assigned
        if fitting:
            runs[chosen] = runs[chosen].joined(mine, assigned, new, fit.offset_ns)
        else:
            runs.append(_Found(assigned, mine, 1))
    if bases[Basis.AMBIGUOUS]:
        notes.append(
            f"{channel.label}: collectives are not numbered in the traces, and on {bases[Basis.AMBIGUOUS]} of "
            f"{len(ranks)} ranks their order is ambiguous; excluded"
        )
    if bases[Basis.CLOCKS]:
        notes.append(
            f"{channel.label}: collectives are not numbered in the traces; matched by their clocks on "
            f"{bases[Basis.CLOCKS]} ranks"
        )
    return number


@dataclass(frozen=True)
class _Found:
    """The collectives found so far in one group, on the clock of the first rank."""

    number: Ints
    run: Run
    members: int

    def fit(self, other: Run) -> Fit:
        return fit_runs(self.run, other)

    def joined(self, other: Run, assigned: Ints, new: Bools, offset_ns: int) -> _Found:
        if not new.any():
            return replace(self, members=self.members + 1)
        number = np.concatenate([self.number, assigned[new]])
        token = np.concatenate([self.run.token, other.token[new]])
        end = np.concatenate([self.run.end_ns, other.end_ns[new] + offset_ns])
        step = np.concatenate([self.run.step, other.step[new]])
        order = np.argsort(end, kind="stable")
        return _Found(number[order], Run(token[order], end[order], step[order]), self.members + 1)


def _fit(fit: Fit | None) -> Fit:
    assert fit is not None
    return fit


class Basis(Enum):
    ORDER = "order"  # exactly one shift fits
    ENDS = "ends"  # calls are missing, but their ends agree on one clock difference
    CLOCKS = "clocks"  # no shift fits well, or several do; the ranks' clocks decide
    AMBIGUOUS = "ambiguous"
    NONE = "none"


@dataclass(frozen=True)
class Run:
    """The calls of one rank in one group, in order."""

    token: Ints
    end_ns: Ints
    step: Ints  # number of the profiler's step; -1 if unknown

    def __len__(self) -> int:
        return len(self.token)


@dataclass(frozen=True)
class Fit:
    basis: Basis
    left: Ints  # positions that are the same collective as …
    right: Ints  # … these
    offset_ns: int = 0  # left clock = right clock + offset

    @property
    def found(self) -> bool:
        return self.basis in (Basis.ORDER, Basis.ENDS, Basis.CLOCKS)


@dataclass(frozen=True)
class _Shifts:
    shift: Ints
    overlap: Ints
    offset_ns: Ints
    spread_ns: Floats
    same_step_ratio: Floats


def fit_runs(left: Run, right: Run) -> Fit:
    nothing = np.zeros(0, dtype=np.int64)
    if not len(left) or not len(right):
        return Fit(Basis.NONE, nothing, nothing)
    tried = _try_shifts(left, right)
    best = _contenders(_with_same_steps(tried))
    gap = float(np.median(np.diff(np.sort(left.end_ns)))) if len(left) > 1 else np.inf
    sharp = len(best.shift) == 1 and best.spread_ns[0] <= SPREAD_TO_GAP_RATIO * gap
    if sharp and best.overlap[0] >= VOTES_NEEDED:
        return _by_shift(left, right, best, Basis.ORDER)
    voted = _vote(left, right)
    if voted is not None:
        return voted
    decided = _decide_by_clocks(best)
    if len(decided.shift) == 1:
        return _by_shift(left, right, decided, Basis.CLOCKS)
    return Fit(Basis.AMBIGUOUS if len(decided.shift) else Basis.NONE, nothing, nothing)


def _by_shift(left: Run, right: Run, chosen: _Shifts, basis: Basis) -> Fit:
    shift = int(chosen.shift[0])
    mine = np.arange(max(0, -shift), min(len(right), len(left) - shift))
    mine = mine[right.token[mine] == left.token[mine + shift]]
    return Fit(basis, mine + shift, mine, int(chosen.offset_ns[0]))


def _try_shifts(left: Run, right: Run) -> _Shifts:
    """All shifts near the likely ones for which kinds and sizes agree."""
    by_clock = int(np.searchsorted(left.end_ns, right.end_ns[0]))
    around = np.arange(-SHIFTS_TRIED, SHIFTS_TRIED + 1)
    shift = np.unique(np.concatenate([around, around + len(left) - len(right), around + by_clock]))
    first = np.maximum(0, -shift)
    overlap = np.minimum(len(right), len(left) - shift) - first
    shorter = min(len(left), len(right))
    enough = overlap >= max((shorter + 1) // 2, min(VOTES_NEEDED, shorter))
    shift, first, overlap = shift[enough], first[enough], overlap[enough]
    steps = np.linspace(0, 1, CALLS_TRIED)
    mine = first[:, None] + np.rint(steps * (overlap - 1)[:, None]).astype(np.int64)
    theirs = mine + shift[:, None]
    difference = left.end_ns[theirs] - right.end_ns[mine]
    # Clock differences may be years in nanoseconds: exact only as integers.
    relative = (difference - difference[:, :1]).astype(np.float64)
    middle = np.median(relative, axis=1)
    deviation = np.sort(np.abs(relative - middle[:, None]), axis=1)[:, : int(KEPT_RATIO * CALLS_TRIED)]
    same_step = (left.step[theirs] == right.step[mine]) & (right.step[mine] >= 0)
    alike = (left.token[theirs] == right.token[mine]).mean(axis=1) >= TOKENS_ALIKE_RATIO
    tried = _Shifts(
        shift,
        overlap,
        difference[:, 0] + np.rint(middle).astype(np.int64),
        deviation.mean(axis=1),
        same_step.mean(axis=1),
    )
    return take_rows(tried, alike)


def _with_same_steps(tried: _Shifts) -> _Shifts:
    """Step numbers are the same on all ranks, so other shifts are excluded, unless the ends clearly contradict: a
    profiler may have been started later on one rank."""
    same = take_rows(tried, tried.same_step_ratio >= SAME_STEP_RATIO)
    if not len(same.shift):
        return tried
    smallest = tried.spread_ns[tried.overlap >= CONTRADICTING_CALLS].min(initial=np.inf)
    contradicted = same.spread_ns.min() > CONTRADICTION * max(smallest, CLOSE_NS)
    return tried if contradicted else same


def _contenders(tried: _Shifts) -> _Shifts:
    # A few calls can fit by chance.
    weighed = tried.spread_ns * (tried.overlap.max(initial=1) / tried.overlap) ** 2
    least = weighed.min(initial=np.inf)
    return take_rows(tried, weighed <= max(CLEARLY_WORSE * least, least + CLOSE_NS))


def _decide_by_clocks(contenders: _Shifts) -> _Shifts:
    """Take the shift that needs a far smaller offset than the others, if there is one."""
    if len(contenders.shift) < 2:
        return contenders
    nearest = np.argsort(np.abs(contenders.offset_ns))
    first, second = np.abs(contenders.offset_ns[nearest[:2]]).tolist()
    return take_rows(contenders, nearest[:1]) if second >= CLEARLY_WORSE * first else contenders


def _vote(left: Run, right: Run) -> Fit | None:
    """The clock difference for which most ends coincide, if no other is close."""
    chosen = np.arange(len(right))
    if len(left) * len(right) > PAIRS_TRIED:
        chosen = np.linspace(0, len(right) - 1, max(PAIRS_TRIED // len(left), 1)).astype(np.int64)
    theirs, mine = np.nonzero(left.token[:, None] == right.token[chosen][None, :])
    mine = chosen[mine]
    difference = left.end_ns[theirs] - right.end_ns[mine]
    order = np.argsort(difference, kind="stable")
    difference, theirs, mine = difference[order], theirs[order], mine[order]
    needed = max(VOTES_NEEDED, VOTES_NEEDED_RATIO * min(len(left), len(chosen)))
    for window in VOTING_WINDOWS_NS:
        past = np.searchsorted(difference, difference + window, side="right")
        votes = past - np.arange(len(difference))
        if not len(votes) or votes.max() < needed:
            continue
        best = int(np.argmax(votes))
        inside = slice(best, int(past[best]))
        distinct = min(len(np.unique(theirs[inside])), len(np.unique(mine[inside])))
        apart = (difference < difference[best] - window) | (difference > difference[best] + window)
        if distinct < needed or 2 * votes[apart].max(initial=0) >= distinct:
            continue
        middle = difference[inside][(inside.stop - inside.start) // 2]
        matched = _nearest(left, right, int(middle), window)
        return Fit(Basis.ENDS, *matched, int(middle))
    return None


def _nearest(left: Run, right: Run, offset_ns: int, window_ns: int) -> tuple[Ints, Ints]:
    """Pairs of equal tokens that are each other's nearest, within the window."""
    lefts, rights = [], []
    tokens, numbers = np.unique(np.concatenate((left.token, right.token)), return_inverse=True)
    sides = (numbers[: len(left)], numbers[len(left) :])
    for theirs, mine in zip(*(rows_of_groups(side, len(tokens)) for side in sides), strict=True):
        if not len(theirs) or not len(mine):
            continue
        theirs = theirs[np.argsort(left.end_ns[theirs], kind="stable")]
        mine = mine[np.argsort(right.end_ns[mine], kind="stable")]
        there, here = left.end_ns[theirs], right.end_ns[mine] + offset_ns
        to_left, to_right = _nearest_of(there, here), _nearest_of(here, there)
        mutual = to_right[to_left] == np.arange(len(here))
        close = mutual & (np.abs(there[to_left] - here) <= window_ns)
        lefts.append(theirs[to_left[close]])
        rights.append(mine[close])
    found_left, found_right = np.concatenate(lefts), np.concatenate(rights)
    order = np.argsort(found_right)
    return found_left[order], found_right[order]


def _nearest_of(times: Ints, wanted: Ints) -> Ints:
    after = np.clip(np.searchsorted(times, wanted), 1, max(len(times) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(times) - 1)
    return np.where(np.abs(times[after] - wanted) < np.abs(wanted - times[before]), after, before)
