"""Matches the rows of different ranks that are one collective or one message: a meeting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Bools, Ints, grouped_median, number_groups, occurrence
from rankscope.analysis.step_graph.operations import MESSAGES, UNKNOWN, Operations

# A rank counts its steps by its host, so that an operation at the end of a step may count to the next one.
MAX_STEPS_APART = 2


@dataclass(frozen=True)
class Meetings:
    """`number` is the meeting of each row: UNKNOWN where no other rank has the operation."""

    number: Ints
    count: int
    lonely: int  # operations of groups with several known ranks that no other rank recorded
    stretch: Ints  # of each row: steps that were recorded without a pause; the same on all ranks
    step: Ints  # of each row, the same for all ranks that meet


def match(operations: Operations) -> Meetings:
    """Matches collectives by their sequence in the group, and messages by their order between two ranks if they have
    no sequence."""
    kind = np.where(np.isin(operations.kind, MESSAGES), int(CollectiveKind.SEND_RECV), operations.kind)
    is_message = (kind != operations.kind) & (operations.sequence < 0)
    stretch = _stretches(operations.step)
    number = np.full(len(operations), UNKNOWN, dtype=np.int64)
    collectives = np.flatnonzero(~is_message)
    keys = (operations.group, kind, operations.sequence)
    number[collectives], count = number_groups(*(key[collectives] for key in keys))
    messages = np.flatnonzero(is_message & (operations.peer >= 0))
    number[messages] = count + _match_messages(operations, stretch, messages)
    number, kept = _with_others(operations.rank, number)
    several = np.array([len(group.ranks) > 1 for group in operations.groups], dtype=bool)
    lonely = int(((number == UNKNOWN) & several[operations.group]).sum())
    return Meetings(number, kept, lonely, stretch, _common_steps(operations.step, number, kept))


def _stretches(step: Ints) -> Ints:
    seen = np.unique(step)
    begins = np.flatnonzero(np.diff(seen, prepend=seen[:1]) > MAX_STEPS_APART)
    return np.searchsorted(begins, np.searchsorted(seen, step), side="right")


def _match_messages(operations: Operations, stretch: Ints, rows: Ints) -> Ints:
    """Messages between two ranks arrive in the order in which they are sent. Where the two recorded a different number
    of them, whole steps with the same number are matched."""
    sends = operations.kind[rows] == CollectiveKind.SEND
    source = np.where(sends, operations.rank[rows], operations.peer[rows])
    target = np.where(sends, operations.peer[rows], operations.rank[rows])
    pair, _ = number_groups(operations.group[rows], source, target, stretch[rows])
    by_step, _ = number_groups(pair, operations.step[rows])
    whole = _balanced(pair, sends)
    part = np.where(whole, pair, by_step + len(rows))
    order = occurrence(2 * part + sends)
    number, _ = number_groups(part, order)
    return np.where(whole | _balanced(by_step, sends), number, len(rows) + np.arange(len(rows)))


def _balanced(part: Ints, sends: Bools) -> Bools:
    sent, received = np.bincount(part[sends], minlength=len(part)), np.bincount(part[~sends], minlength=len(part))
    return np.asarray((sent == received)[part])


def _with_others(rank: Ints, number: Ints) -> tuple[Ints, int]:
    """Keeps and renumbers the meetings of several ranks. A rank that claims to be in one twice is not believed."""
    known = np.flatnonzero(number >= 0)
    renumbered = np.full(len(number), UNKNOWN, dtype=np.int64)
    of, count = number_groups(number[known])
    good = np.bincount(of, minlength=count) > 1
    seat, seats = number_groups(of, rank[known])
    if seats < len(known):
        good &= np.bincount(of, weights=occurrence(seat), minlength=count) == 0
    kept = good[of]
    renumbered[known[kept]] = (np.cumsum(good) - 1)[of[kept]]
    return renumbered, int(good.sum())


def _common_steps(step: Ints, number: Ints, count: int) -> Ints:
    """Gives all rows of a meeting the step that most of its ranks count."""
    met = number >= 0
    usual = grouped_median(step[met].astype(np.float64), number[met], count)
    common: Ints = step.copy()
    common[met] = np.ceil(usual).astype(np.int64)[number[met]]
    return common
