"""Which calls of different ranks are one collective: the same group and the same number in it, or, where the profiler
numbered none, the same place in the order. Never an external id: each rank counts its own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.robust import Bools, Ints, number_groups
from rankscope.analysis.traces.communication.kinds import CollectiveKind
from rankscope.analysis.traces.joins.channels import Calls, Channel
from rankscope.analysis.traces.joins.ordering import Basis, Fit, Run, fit_runs

# All ranks leave these together: nobody is done before everybody has come.
_TOGETHER = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.BARRIER,
)


@dataclass(frozen=True)
class Matched:
    """A row per rank and collective, sorted by collective; the columns of `Calls` beside it, and by collective what
    its members share."""

    collective: Ints  # from 0
    calls: Calls
    channel: Ints  # by collective
    kind: Ints
    together: Bools  # by collective: all ranks leave it at the same time
    channels: tuple[Channel, ...]
    notes: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.channel)

    def keep(self, collectives: Bools) -> Matched:
        """Only some of the collectives, numbered anew."""
        members = collectives[self.collective]
        numbers = np.cumsum(collectives) - 1
        return replace(
            self,
            collective=numbers[self.collective[members]],
            calls=self.calls.take(members),
            channel=self.channel[collectives],
            kind=self.kind[collectives],
            together=self.together[collectives],
        )


def match_calls(calls: Calls, step: Ints) -> Matched:
    """`step` is the number of the profiler's step of each call, -1 where it is not known."""
    notes: list[str] = []
    noted = calls.sequence >= 0
    number = np.full(len(calls), -1, dtype=np.int64)
    number[noted] = _match_noted(calls.take(noted))
    next_number = int(number.max(initial=-1)) + 1
    for channel in np.unique(calls.channel[~noted]).tolist():
        rows = np.flatnonzero(~noted & (calls.channel == channel))
        found = _match_ordered(calls.take(rows), step[rows], calls.channels[channel], notes)
        number[rows[found >= 0]] = next_number + found[found >= 0]
        next_number += int(found.max(initial=-1)) + 1
    return _refuse_impossible(calls, number, notes)


def _match_noted(calls: Calls) -> Ints:
    """One number for each (group, sequence); calls that were coalesced share a sequence and are told by their kind and
    order."""
    kind = np.where(calls.kind == CollectiveKind.ALL_TO_ALL, int(CollectiveKind.SEND_RECV), calls.kind)
    again = _occurrence(number_groups(calls.channel, calls.sequence, kind, calls.rank)[0])
    return number_groups(calls.channel, calls.sequence, kind, again)[0]


def _occurrence(groups: Ints) -> Ints:
    """0 for the first row of each group, 1 for its second, …"""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    first = np.searchsorted(ordered, ordered)
    occurrence = np.empty(len(groups), dtype=np.int64)
    occurrence[order] = np.arange(len(groups)) - first
    return occurrence


def _match_ordered(calls: Calls, step: Ints, channel: Channel, notes: list[str]) -> Ints:
    """Ranks one after the other, longest first, each against the collectives found so far. Names of groups repeat, so
    that ranks which do not fit may be a group of their own."""
    number = np.full(len(calls), -1, dtype=np.int64)
    ranks, counts = np.unique(calls.rank, return_counts=True)
    runs: list[_Found] = []
    next_number = 0
    bases: Counter[Basis] = Counter()
    for rank in ranks[np.argsort(-counts, kind="stable")].tolist():
        rows = np.flatnonzero(calls.rank == rank)
        mine = Run(calls.token[rows], calls.end_ns[rows], step[rows])
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
            f"{len(ranks)} ranks their order fits in several ways; left out"
        )
    if bases[Basis.CLOCKS]:
        notes.append(
            f"{channel.label}: collectives are not numbered in the traces; matched by their clocks on "
            f"{bases[Basis.CLOCKS]} ranks"
        )
    return number


@dataclass(frozen=True)
class _Found:
    """Collectives found so far in one group, on the clock of the rank that began it."""

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


def _refuse_impossible(calls: Calls, number: Ints, notes: list[str]) -> Matched:
    """Keep what two ranks or more have in common and what can be one collective."""
    known = np.flatnonzero(number >= 0)
    rows = known[np.lexsort((calls.rank[known], number[known]))]
    collective, count = number_groups(number[rows])
    members = calls.take(rows)
    first = np.searchsorted(collective, np.arange(count))
    size = np.bincount(collective, minlength=count)
    channel = members.channel[first]
    alike = np.ones(count, dtype=bool)
    np.logical_and.at(alike, collective, members.token == members.token[first][collective])
    limit = np.array([c.size for c in calls.channels], dtype=np.int64)[channel]
    crowded = (limit >= 0) & (size > limit)
    # One collective with too many members shows that the name stands for several groups: none of it can be trusted.
    shared = np.isin(channel, channel[crowded])
    for number_of in np.unique(channel[crowded]).tolist():
        which = calls.channels[number_of]
        notes.append(
            f"{which.label}: {int(size[channel == number_of].max())} ranks use it but it has {which.size}; the name "
            "stands for several groups and the traces do not list their ranks; left out"
        )
    common = size >= 2
    unlike = int((common & ~shared & ~alike).sum())
    if unlike:
        notes.append(f"{unlike} numbered collectives differ in kind or size between ranks; left out")
    kind = members.kind[first]
    matched = Matched(collective, members, channel, kind, np.isin(kind, _TOGETHER), calls.channels, tuple(notes))
    return matched.keep(common & alike & ~shared)
