"""Transfers of each link: how long the same bytes take now and took earlier in the run, or take in other groups.

A link is a set of ranks that run collectives, whatever the number of their communicators, or two ranks that exchange
messages. A transfer begins when the last rank arrives, so that its time holds no waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import MAD_TO_SIGMA, Bools, Floats, Ints, grouped_median, number_groups
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.step_graph.window_parts import KINDS, bus_sizes

MAX_WINDOWS = 30
MIN_WINDOWS = 5
# The medians of the past are taken again when so much of it is new.
RENEWED_SHARE = 1 / 8
# More links, or more sizes of operations, are not compared.
MAX_LINKS = 1 << 12
MAX_SIGHTS = 1 << 15
# Sizes within a quarter of an octave count as the same.
SIZES_OF_OCTAVE = 4
SIZE_BITS, KIND_BITS = 9, 5
# Less is not replayed.
MIN_RATIO = 1.4
MIN_PATH_SHARE = 0.05
MIN_RATIO_TO_OTHERS = 2.0
# A group is compared with others of its kind where there are at least so many.
MIN_OTHER_GROUPS = 2
# Links of a kind are slow together from this share of the excess of the worst.
ALIKE_RATIO = 0.5
# A transfer varies by this share of its length.
MIN_SPREAD_RATIO = 0.05


class LinkName(NamedTuple):
    is_pair: bool  # exchanges messages
    ranks: tuple[int, ...]


class _Sights(NamedTuple):
    """The operations of a window, summed up: a row for each link, kind of operation and size."""

    key: Ints  # the same in all windows
    link: Ints
    operations: Floats
    transfer_ns: Floats  # of the median operation


class WindowLinks(NamedTuple):
    names: tuple[LinkName, ...]
    kinds: Ints  # of KINDS, by link
    sights: _Sights
    sight_of_row: Ints  # of the graph; -1 where none counts
    path_shares: Floats  # of the critical path, by sight
    rows: Ints  # that count, one of each meeting


class Against(NamedTuple):
    """Sums over the operations of each link of which a usual time is known. Columns are by link."""

    is_known: Bools  # by sight
    path_shares: Floats
    transfer_ns: Floats
    usual_ns: Floats
    spread_ns: Floats

    @property
    def ratio(self) -> Floats:
        return np.where(self.usual_ns > 0, self.transfer_ns / np.maximum(self.usual_ns, 1.0), 0.0)


@dataclass(frozen=True)
class SlowLink:
    """Times are of a step, of operations of which the usual time is known."""

    kind: GroupKind
    of_kind: int  # links that were compared
    names: tuple[LinkName, ...]  # of the slow ones
    is_against_past: bool  # else against the other groups of the kind
    ratio: float
    score: float  # the distance to the usual time, in spreads of windows
    transfer_ns: float
    usual_ns: float
    bus_bytes: float
    job_growth: float
    own_growth: float
    loss_ns: Floats  # by step, that would come back if the transfers took as long as usual


class SuspectedLink(NamedTuple):
    links: Ints  # positions in WindowLinks
    against: Against
    is_against_past: bool

    def usual_transfer_ns(self, seen: WindowLinks, transfer_ns: Ints) -> Ints:
        """The transfers of the slow links with the usual time, and all others as they were; by row of the graph."""
        factor = np.where(self._is_of_slow(seen), 1 / np.maximum(self.against.ratio, 1.0)[seen.sights.link], 1.0)
        factor = np.append(factor, 1.0)  # the last stands for rows without a sight
        return np.asarray((transfer_ns * factor[seen.sight_of_row]).astype(np.int64))

    def _is_of_slow(self, seen: WindowLinks) -> Bools:
        """Return for each sight whether its transfers are those of a slow link."""
        return np.isin(seen.sights.link, self.links) & self.against.is_known

    def slow(self, seen: WindowLinks, operations: Operations, growth: tuple[float, float], loss_ns: Floats) -> SlowLink:
        """`growth`: of the step and of own work."""
        transfer, usual, spread = (float(column[self.links].sum()) for column in self.against[2:])
        kind = int(seen.kinds[self.links[0]])
        sizes, factors = bus_sizes(operations, seen.rows[self._is_of_slow(seen)[seen.sight_of_row[seen.rows]]])
        return SlowLink(
            kind=KINDS[kind],
            of_kind=int(np.count_nonzero((seen.kinds == kind) & (self.against.usual_ns > 0))),
            names=tuple(sorted(seen.names[link] for link in self.links.tolist())),
            is_against_past=self.is_against_past,
            ratio=transfer / max(usual, 1.0),
            score=(transfer - usual) / max(spread, MIN_SPREAD_RATIO * usual, 1.0),
            transfer_ns=transfer / len(loss_ns),
            usual_ns=usual / len(loss_ns),
            bus_bytes=float((sizes * factors).sum()) / len(loss_ns),
            job_growth=growth[0],
            own_growth=growth[1],
            loss_ns=loss_ns,
        )


class PastLinks:
    """The transfers of a job's last windows in which no loss was found."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # by the hash of the link's name, which may have thousands of ranks
        self._windows: deque[_Sights] = deque(maxlen=MAX_WINDOWS)
        self._usual: tuple[Ints, Floats, Floats] | None = None  # keys in order, medians, spreads
        self._unlearned = 0

    def see(self, graph: StepGraph, rows: Ints, kinds: Sequence[GroupKind], path: Ints) -> WindowLinks | None:
        """`rows`: of the window's steps. None where there are too many links."""
        operations = graph.operations
        is_message = operations.peer >= 0
        low = np.where(is_message, np.minimum(operations.rank, operations.peer), operations.group)
        high = np.where(is_message, np.maximum(operations.rank, operations.peer), 0)
        met = graph.meetings.number >= 0
        of_row = np.full(len(graph), -1, dtype=np.int64)
        of_row[met], count = number_groups(is_message[met].astype(np.int64), low[met], high[met])
        first = np.zeros(count, dtype=np.int64)
        first[of_row[met]] = np.flatnonzero(met)
        if not 0 < count <= MAX_LINKS:
            return None
        names = [
            LinkName(True, (int(low[row]), int(high[row])))
            if is_message[row]
            else LinkName(False, operations.groups[int(operations.group[row])].ranks)
            for row in first.tolist()
        ]
        # Communicators of the same members are one link.
        known = {name: number for number, name in enumerate(dict.fromkeys(names))}
        of_row[met] = np.array([known[name] for name in names], dtype=np.int64)[of_row[met]]
        kind_of_group = np.array([KINDS.index(kind) for kind in kinds], dtype=np.int64)
        kind_of_link = np.zeros(len(known), dtype=np.int64)
        # A known kind of one of several communicators counts.
        least = np.argsort(-kind_of_group[operations.group[first]], kind="stable")
        kind_of_link[of_row[first[least]]] = kind_of_group[operations.group[first[least]]]
        key = self._keys(graph, of_row, [*known])
        is_once = np.where(is_message, operations.kind == CollectiveKind.RECV, graph.last == np.arange(len(graph)))
        # A meeting counts once: a message at its receiver, a collective at the rank that arrives last.
        counted = rows[(of_row[rows] >= 0) & graph.waits[rows] & is_once[rows]]
        keys, sight = np.unique(key[counted], return_inverse=True)
        if not 0 < len(keys) <= MAX_SIGHTS:
            return None
        link = np.zeros(len(keys), dtype=np.int64)
        link[sight] = of_row[counted]
        transfer = grouped_median(graph.transfer_ns[counted].astype(np.float64), sight, len(keys))
        sights = _Sights(keys, link, np.bincount(sight, minlength=len(keys)).astype(np.float64), transfer)
        place = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
        sight_of_row = np.where(keys[place] == key, place, -1)
        on_path = path[sight_of_row[path] >= 0]
        transfers = np.bincount(sight_of_row[on_path], graph.transfer_ns[on_path], len(keys))
        whole = max(float(graph.transfer_ns[path].sum() + graph.own_ns[graph.last[path]].sum()), 1.0)
        return WindowLinks(tuple(known), kind_of_link, sights, sight_of_row, transfers / whole, counted)

    def _keys(self, graph: StepGraph, of_row: Ints, names: list[LinkName]) -> Ints:
        """Return for each row a number for the link, kind and size of its operation, the same in all windows; -1 where
        there is no link."""
        if len(self._numbers) + len(names) > 2 * MAX_LINKS:
            self._numbers.clear()
            self._windows.clear()
            self._usual = None
        operations = graph.operations
        numbers = [self._numbers.setdefault(hash(name), len(self._numbers)) for name in names]
        number = np.array(numbers, dtype=np.int64)
        kind = np.where(operations.kind == CollectiveKind.SEND, CollectiveKind.RECV, operations.kind)
        fraction, exponent = np.frexp(np.maximum(operations.bytes, 0).astype(np.float64))
        size = SIZES_OF_OCTAVE * exponent + np.floor(2 * SIZES_OF_OCTAVE * np.maximum(fraction - 0.5, 0))
        size = np.clip(size, 0, (1 << SIZE_BITS) - 1).astype(np.int64)
        return np.where(of_row >= 0, (number[of_row] << KIND_BITS | kind) << SIZE_BITS | size, -1)

    def suspect(self, seen: WindowLinks) -> SuspectedLink | None:
        """The links that cost most against their past, or else against other groups."""
        past = self._against_past(seen)
        if past is not None:
            found = _suspect(seen, past, MIN_RATIO)
            if len(found):
                return SuspectedLink(found, past, True)
        if sum(not name.is_pair for name in seen.names) <= MIN_OTHER_GROUPS:
            return None
        others = _against_others(seen)
        found = _suspect(seen, others, MIN_RATIO_TO_OTHERS)
        return SuspectedLink(found, others, False) if len(found) else None

    def learn(self, seen: WindowLinks) -> None:
        self._windows.append(seen.sights)
        self._unlearned += 1

    def _against_past(self, seen: WindowLinks) -> Against | None:
        if len(self._windows) < MIN_WINDOWS:
            return None
        if self._usual is None or self._unlearned >= RENEWED_SHARE * len(self._windows):
            past = np.concatenate([window.key for window in self._windows])
            times = np.concatenate([window.transfer_ns for window in self._windows])
            keys, number = np.unique(past, return_inverse=True)
            usual = grouped_median(times, number, len(keys))
            spread = MAD_TO_SIGMA * grouped_median(np.abs(times - usual[number]), number, len(keys))
            enough = np.bincount(number, minlength=len(keys)) >= MIN_WINDOWS
            self._usual, self._unlearned = (keys[enough], usual[enough], spread[enough]), 0
        keys, usual, spread = self._usual
        if not len(keys):
            return None
        place = np.minimum(np.searchsorted(keys, seen.sights.key), len(keys) - 1)
        is_known = keys[place] == seen.sights.key
        return _sum(seen, np.where(is_known, usual[place], np.nan), spread[place])


def _sum(seen: WindowLinks, usual_ns: Floats, spread_ns: Floats) -> Against:
    """`usual_ns`: by sight; NaN where it is not known."""
    sights, known = seen.sights, ~np.isnan(usual_ns)

    def by_link(values: Floats) -> Floats:
        return np.bincount(sights.link[known], values[known], len(seen.names)).astype(np.float64)

    times = (sights.operations * each for each in (sights.transfer_ns, usual_ns, spread_ns))
    return Against(known, by_link(seen.path_shares), *map(by_link, times))


def _against_others(seen: WindowLinks) -> Against:
    """Collectives only: of two pairs of neighbours in a pipeline, one may be on one node and the other on two."""
    sights = seen.sights
    is_collective = np.array([not name.is_pair for name in seen.names], dtype=bool)[sights.link]
    members = np.array([len(name.ranks) for name in seen.names], dtype=np.int64)[sights.link]
    what = sights.key & ((1 << (KIND_BITS + SIZE_BITS)) - 1)
    number, count = number_groups(seen.kinds[sights.link], members, what)
    usual = grouped_median(np.where(is_collective, sights.transfer_ns, np.nan), number, count)[number]
    spread = MAD_TO_SIGMA * grouped_median(np.abs(sights.transfer_ns - usual), number, count)[number]
    several = np.bincount(number[is_collective], minlength=count)[number] > MIN_OTHER_GROUPS
    return _sum(seen, np.where(several & is_collective, usual, np.nan), spread)


def _suspect(seen: WindowLinks, against: Against, least_ratio: float) -> Ints:
    """The slow links of the kind that costs most; the first of them costs most."""
    ratio = against.ratio
    slow = ratio >= least_ratio
    loss = np.where(slow, against.path_shares * (1 - 1 / np.maximum(ratio, 1.0)), 0.0)
    by_kind = np.bincount(seen.kinds, loss, len(KINDS))
    if by_kind.max() < MIN_PATH_SHARE:
        return np.empty(0, dtype=np.int64)
    slow &= seen.kinds == by_kind.argmax()
    worst = int(np.where(slow, loss, -1.0).argmax())
    slow &= ratio - 1 >= ALIKE_RATIO * (ratio[worst] - 1)
    return np.array([worst, *(link for link in np.flatnonzero(slow).tolist() if link != worst)], dtype=np.int64)
