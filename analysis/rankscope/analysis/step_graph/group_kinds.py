"""Infers what each process group is for, from the operations that ranks run in it.

The work of a rank is its time outside of operations. A group is named by where its operations lie in that work, and by
their sizes:

pipeline   two members send messages in both directions, and a step begins with one direction alone
expert     all-to-all, or messages in both directions at once, of sizes that change from call to call
tensor     many all-reduces or reduce-scatters a step, of one size, spread over all work
data       large ones, and a part of the work has none: the forward pass has no gradients
embedding  the first and the last pipeline stage, with one or two large all-reduces a step
global     all ranks of the job, small operations only

A description that names one kind goes first. A group that fits no rule is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Bools, Floats, Ints, grouped_median, number_groups, rows_of_groups
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.operations import MESSAGES, Operations
from rankscope.analysis.step_graph.roles import find_stages

# Smaller operations carry counts, flags and norms, neither activations nor gradients.
MIN_PAYLOAD_BYTES = 1 << 16
MAX_CONTROL_BYTES = 1 << 12
# The gradients of a step are no fewer.
MIN_GRADIENT_BYTES = 1 << 20
# A layer has four all-reduces in forward and backward: two layers.
MIN_LAYER_CALLS = 8
# Layers make more calls a step than this, wherever the calls lie.
MAX_SINGLE_CALLS = 2
# A stretch of work without a call is long if it exceeds three of four stretches by this factor.
MIN_LONG_FACTOR = 3.0
# Long stretches of all work: the forward pass is a third of it, and a quarter if it is computed twice.
MIN_FREE_RATIO = 0.25
MAX_FREE_RATIO = 0.2
# The longest stretch between few calls has the forward pass and the backward pass up to the first gradients.
MIN_LONGEST_RATIO = 0.4
# Messages that a stage receives in a step, to tell its phases apart: gradients are in the last ones.
MIN_RECEIPTS = 3
# Sizes of activations repeat from layer to layer; those of routed tokens do not.
MIN_REPEATED_RATIO = 0.7
MIN_CHANGING_RATIO = 0.5
# Parameters are gathered in one type, and gradients reduced in another, of 1 to 4 bytes: factors of both sizes.
_TYPE_FACTORS = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4))
_REDUCING = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)


class GroupKind(Enum):
    """`value` is the name used in all output. The unknown kind is last."""

    TENSOR = "tensor"
    PIPELINE = "pipeline"
    DATA = "data"
    EXPERT = "expert"
    EMBEDDING = "embedding"
    GLOBAL = "global"
    UNKNOWN = "unknown"


_WORDS = {
    GroupKind.TENSOR: {"tensor", "tp"},
    GroupKind.PIPELINE: {"pipeline", "pipe", "pp"},
    GroupKind.DATA: {"data", "dp", "ddp", "fsdp", "hsdp", "shard", "replicate"},
    GroupKind.EXPERT: {"expert", "ep", "moe"},
    GroupKind.EMBEDDING: {"embedding"},
}


def declared_kind(description: str) -> GroupKind:
    """Return the kind that a description names, such as `TENSOR_MODEL_PARALLEL_GROUP`, `mesh_dp_shard` or
    `EXPERT_DATA_PARALLEL_GROUP`. A group of several dimensions is unknown."""
    words = set(re.findall(r"[a-z]+", description.lower()))
    kinds = [kind for kind, known in _WORDS.items() if words & known]
    if len(kinds) == 2 and GroupKind.EXPERT in kinds:
        kinds.remove(GroupKind.EXPERT)  # the data or tensor dimension of the experts
    return kinds[0] if len(kinds) == 1 and "and" not in words else GroupKind.UNKNOWN


def infer_group_kinds(
    operations: Operations, world_size: int | None = None, stages: Mapping[int, int] | None = None
) -> tuple[GroupKind, ...]:
    """Return the kind of each of `operations.groups`. Without `world_size`, the members of all groups are the job.
    `stages`: of ranks in their pipelines, where they are known."""
    groups = operations.groups
    declared = [declared_kind(group.description) for group in groups]
    world = world_size or len({rank for group in groups for rank in group.ranks})
    seats = _Seats.of(operations)
    messages = _Messages.of(operations, seats)
    is_pipeline = np.array(
        [
            kind is GroupKind.PIPELINE or (kind is GroupKind.UNKNOWN and one_way)
            for kind, one_way in zip(declared, messages.one_way.tolist(), strict=True)
        ],
        dtype=bool,
    )
    calls = _Calls.of(operations, seats, is_pipeline)
    recorded = set(operations.ranks)
    # Several pipelines may send in one group. Who sends to whom tells them apart, where all of it was recorded.
    has_pairs = [
        present and recorded.issuperset(group.ranks) for present, group in zip(messages.present, groups, strict=True)
    ]
    pipelines = [group.ranks for number, group in enumerate(groups) if is_pipeline[number] and not has_pairs[number]]
    chains = _Chains(operations, messages.pairs, pipelines, stages)
    kinds = []
    for number, (group, kind) in enumerate(zip(groups, declared, strict=True)):
        if kind is not GroupKind.UNKNOWN or len(group.ranks) == 1:
            kinds.append(kind)
        elif is_pipeline[number]:
            kinds.append(GroupKind.PIPELINE)
        elif messages.present[number]:
            routed = messages.routed[number] and not calls.per_step[number] > 0
            kinds.append(GroupKind.EXPERT if routed else GroupKind.UNKNOWN)
        elif calls.control[number]:
            kinds.append(GroupKind.GLOBAL if len(group.ranks) == world else GroupKind.UNKNOWN)
        elif chains.meet(group.ranks):
            once = calls.single[number] and chains.are_ends(group.ranks)
            kinds.append(GroupKind.EMBEDDING if once else GroupKind.UNKNOWN)
        elif calls.tensor[number]:
            kinds.append(GroupKind.TENSOR)
        elif calls.data[number] and not chains.may_reach(group.ranks):
            kinds.append(GroupKind.DATA)
        else:
            kinds.append(GroupKind.UNKNOWN)
    return tuple(kinds)


@dataclass(frozen=True)
class _Seats:
    """The places of ranks in groups: a number for each rank and group."""

    of_row: Ints
    group: Ints
    steps: Floats  # that the rank recorded
    rank: Ints
    groups: int

    @classmethod
    def of(cls, operations: Operations) -> _Seats:
        of_row, count = number_groups(operations.rank, operations.group)
        group, rank = np.zeros((2, count), dtype=np.int64)
        group[of_row], rank[of_row] = operations.group, operations.rank
        visit, visits = number_groups(operations.rank, operations.step)
        rank_of_visit = np.zeros(visits, dtype=np.int64)
        rank_of_visit[visit] = operations.rank
        ranks, steps = np.unique(rank_of_visit, return_counts=True)
        return cls(of_row, group, steps[np.searchsorted(ranks, rank)].astype(np.float64), rank, len(operations.groups))

    def sums(self, rows: Ints, weights: Ints | None = None) -> Floats:
        return np.bincount(self.of_row[rows], weights, minlength=len(self.group)).astype(np.float64)

    def by_group(self, values: Floats) -> Floats:
        """The median over the seats of each group; NaN if it has none."""
        return grouped_median(values, self.group, self.groups)


@dataclass(frozen=True)
class _Messages:
    """Columns by group."""

    present: Bools  # messages or all-to-all
    one_way: Bools
    routed: Bools
    pairs: Ints  # of ranks that are neighbours in a pipeline, a row for each

    @classmethod
    def of(cls, operations: Operations, seats: _Seats) -> _Messages:
        kind, groups = operations.kind, seats.groups
        rows = np.flatnonzero(np.isin(kind, MESSAGES) & (operations.peer >= 0))
        rows = rows[np.argsort(operations.start_ns[rows], kind="stable")]
        visit, visits = number_groups(seats.of_row[rows], operations.peer[rows], operations.step[rows])
        start, stop = np.full((2, 2, visits), -1, dtype=np.int64)
        for side, message in enumerate(MESSAGES):
            own = np.flatnonzero(kind[rows] == message)[::-1]  # the first is written last
            start[side, visit[own]] = operations.start_ns[rows[own]]
            stop[side, visit[own]] = operations.stop_ns[rows[own]]
        seen = np.zeros((2, visits), dtype=bool)
        for side, message in enumerate(MESSAGES):
            seen[side, visit[kind[rows] == message]] = True
        both = seen.all(axis=0)
        apart = (start[0] > stop[1]) | (start[1] > stop[0])
        group_of_visit = np.zeros(visits, dtype=np.int64)
        group_of_visit[visit] = operations.group[rows]
        total = np.bincount(group_of_visit, minlength=groups)
        one_way = 2 * np.bincount(group_of_visit[both & apart], minlength=groups) > total
        together = 2 * np.bincount(group_of_visit[both & ~apart], minlength=groups) > total
        exchanged = np.flatnonzero(kind == CollectiveKind.ALL_TO_ALL)
        calls = np.concatenate([rows, exchanged])
        changing = 1 - _repeated(operations, seats, calls)
        several = seats.by_group(seats.sums(calls) / seats.steps) >= 2  # dispatch and combine
        exchanges = np.bincount(operations.group[exchanged], minlength=groups) > 0
        near = one_way[operations.group[rows]]
        ends = operations.rank[rows[near]], operations.peer[rows[near]]
        _, first = np.unique(number_groups(*ends)[0], return_index=True)
        return cls(
            present=(total > 0) | exchanges,
            one_way=one_way,
            routed=(together | exchanges) & several & (changing >= MIN_CHANGING_RATIO),
            pairs=np.stack(ends, axis=1)[first],
        )


@dataclass(frozen=True)
class _Calls:
    """The collectives that reduce activations or gradients. Columns are by group."""

    per_step: Floats
    control: Bools  # has small operations only
    single: Bools  # once or twice a step
    tensor: Bools
    data: Bools

    @classmethod
    def of(cls, operations: Operations, seats: _Seats, is_pipeline: Bools) -> _Calls:
        large = operations.bytes >= MIN_PAYLOAD_BYTES
        rows = np.flatnonzero(large & np.isin(operations.kind, _REDUCING))
        rows = rows[np.lexsort((operations.start_ns[rows], seats.of_row[rows]))]
        per_step = np.nan_to_num(seats.by_group(seats.sums(rows) / seats.steps))
        volume = np.nan_to_num(seats.by_group(seats.sums(rows, operations.bytes[rows]) / seats.steps))
        gathers = operations.kind == CollectiveKind.ALL_GATHER
        # Two ways of counting work, which must agree: gathered parameters may hide the forward pass.
        covers = (np.ones(len(operations), dtype=bool), ~gathers)
        free, longest = zip(
            *(_free_work(operations, seats, rows, _work_until(operations, cover)) for cover in covers), strict=True
        )
        in_pipeline, phases = _free_phases(operations, seats, rows, is_pipeline)
        most, least = (
            seats.by_group(np.where(in_pipeline, phases, bound(*free))) for bound in (np.maximum, np.minimum)
        )
        single = (per_step > 0) & (per_step <= MAX_SINGLE_CALLS)
        many = per_step >= MIN_LAYER_CALLS
        some = ~many & (seats.by_group(np.minimum(*longest)) >= MIN_LONGEST_RATIO)
        repeated = _repeated(operations, seats, rows) >= MIN_REPEATED_RATIO
        smallest, biggest = np.zeros((2, seats.groups), dtype=np.int64)
        np.maximum.at(biggest, operations.group, operations.bytes)
        np.minimum.at(smallest, operations.group, operations.bytes)
        burst = single | some | (many & (least >= MIN_FREE_RATIO))
        return cls(
            per_step=per_step,
            control=(biggest > 0) & (biggest <= MAX_CONTROL_BYTES) & (smallest >= 0),
            single=single,
            tensor=many & (most <= MAX_FREE_RATIO) & repeated,
            data=burst & (volume >= MIN_GRADIENT_BYTES) & _scatters_match(operations, seats, rows, gathers & large),
        )


def _free_work(operations: Operations, seats: _Seats, rows: Ints, work_until: Ints) -> tuple[Floats, Floats]:
    """Two shares of the work of a step, by seat: the long stretches without a call, and the longest. The stretch from
    the step before counts, so that NaN stands where no step follows another."""
    seat, step = seats.of_row[rows], operations.step[rows]
    later = np.flatnonzero((seat[1:] == seat[:-1]) & np.isin(step[1:] - step[:-1], (0, 1))) + 1
    work = (work_until[rows[later]] - work_until[rows[later - 1]]).astype(np.float64)
    visit, visits = number_groups(seat[later], step[later])
    order = np.lexsort((work, visit))
    begin = np.searchsorted(visit[order], np.arange(visits + 1))
    usual = work[order][begin[:-1] + 3 * (np.diff(begin) - 1) // 4]
    whole = np.bincount(visit, work, minlength=visits)
    free = np.bincount(visit, work * (work > MIN_LONG_FACTOR * usual[visit]), minlength=visits)
    longest = work[order][begin[1:] - 1]
    follows = np.bincount(visit, step[later] > step[later - 1], minlength=visits) > 0
    seat_of_visit = np.zeros(visits, dtype=np.int64)
    seat_of_visit[visit] = seat[later]
    shares = (np.where(follows, _ratio(part, whole), np.nan) for part in (free, longest))
    by_seat = [grouped_median(share, seat_of_visit, len(seats.group)) for share in shares]
    return by_seat[0], by_seat[1]


def _free_phases(operations: Operations, seats: _Seats, rows: Ints, is_pipeline: Bools) -> tuple[Bools, Floats]:
    """Return by seat whether the rank is a pipeline stage, and the share of its receipts that no call follows before
    the next message. Work of a stage would mislead: the record of a message that is sent while another is received
    ends with the first of the two, and waiting for the other looks like work."""
    of_pipeline = is_pipeline[operations.group] & np.isin(operations.kind, (*MESSAGES, CollectiveKind.SEND_RECV))
    borders = np.flatnonzero(of_pipeline & (operations.stop_ns > operations.start_ns))
    both = np.concatenate([borders, rows])
    order = np.lexsort((operations.start_ns[both], operations.rank[both]))
    phase = np.cumsum(order < len(borders), dtype=np.int64)
    call = order >= len(borders)
    seat = seats.of_row[both[order[call]]]
    visit, visits = number_groups(seat, phase[call])
    seat_of_visit = np.zeros(visits, dtype=np.int64)
    seat_of_visit[visit] = seat
    received = np.flatnonzero(of_pipeline & (operations.kind == CollectiveKind.RECV))
    ranks, counts = np.unique(operations.rank[received], return_counts=True)
    place = np.minimum(np.searchsorted(ranks, seats.rank), max(len(ranks) - 1, 0))
    receipts = np.where(ranks[place] == seats.rank, counts[place], 0) if len(ranks) else np.zeros(len(seats.rank))
    share = 1 - _ratio(np.bincount(seat_of_visit, minlength=len(seats.group)), receipts)
    # Gradients follow half of all receipts where there are fewer.
    return receipts > 0, np.where(receipts >= MIN_RECEIPTS * seats.steps, share, np.nan)


def _ratio(part: Floats | Ints, whole: Floats | Ints) -> Floats:
    """NaN where there is no whole."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1), np.nan)


def _work_until(operations: Operations, covering: Bools) -> Ints:
    """The time of the rank before each of the rows that cover it, without these rows."""
    work = np.zeros(len(operations), dtype=np.int64)
    rows = np.flatnonzero(covering)
    rows = rows[np.argsort(operations.start_ns[rows], kind="stable")]
    for of_rank in rows_of_groups(*number_groups(operations.rank[rows])):
        ordered = rows[of_rank]
        covered_until = np.maximum.accumulate(operations.stop_ns[ordered])
        work[ordered[1:]] = np.cumsum(np.maximum(operations.start_ns[ordered[1:]] - covered_until[:-1], 0))
    return work


def _repeated(operations: Operations, seats: _Seats, rows: Ints) -> Floats:
    """The share of bytes in calls of the same size as the one before, by group."""
    link, _ = number_groups(seats.of_row[rows], operations.kind[rows], operations.peer[rows])
    rows = rows[np.lexsort((operations.start_ns[rows], link))]
    link.sort()
    later = np.flatnonzero(link[1:] == link[:-1]) + 1
    size, previous = operations.bytes[rows[later]], operations.bytes[rows[later - 1]]
    alike = np.where(size == previous, size, 0)
    return seats.by_group(_ratio(seats.sums(rows[later], alike), seats.sums(rows[later], size)))


def _scatters_match(operations: Operations, seats: _Seats, rows: Ints, gathers: Bools) -> Bools:
    """Gradients are scattered in the sizes in which parameters are gathered; true of groups that scatter none."""
    scatters = rows[operations.kind[rows] == CollectiveKind.REDUCE_SCATTER]
    gathered = np.flatnonzero(gathers)
    seat = np.concatenate([seats.of_row[gathered], seats.of_row[scatters]])
    matched = np.zeros(len(scatters), dtype=bool)
    for of_gather, of_scatter in _TYPE_FACTORS if len(scatters) else ():
        sizes = np.concatenate([of_gather * operations.bytes[gathered], of_scatter * operations.bytes[scatters]])
        number, _ = number_groups(seat, sizes)
        matched |= np.isin(number[len(gathered) :], number[: len(gathered)])
    lacking = np.bincount(operations.group[scatters[~matched]], minlength=seats.groups)
    return np.asarray(lacking == 0)


class _Chains:
    """Pipelines: sets of ranks that exchange messages, each of another stage."""

    def __init__(
        self,
        operations: Operations,
        pairs: Ints,
        members: Iterable[tuple[int, ...]],
        stages: Mapping[int, int] | None,
    ) -> None:
        self._operations = operations
        self._stages = stages
        self._recorded = set(operations.ranks)
        self._first: dict[int, int] = {}  # toward the rank that stands for the pipeline
        for ranks in (*map(tuple, pairs.tolist()), *members):
            for rank in ranks:
                self._first[self._of(rank)] = self._of(ranks[0])

    def _of(self, rank: int) -> int:
        while (first := self._first.setdefault(rank, rank)) != rank:
            self._first[rank] = self._first[first]
            rank = first
        return rank

    def _known(self, ranks: Iterable[int]) -> list[int]:
        return [self._of(rank) for rank in ranks if rank in self._first]

    def meet(self, ranks: tuple[int, ...]) -> bool:
        """Return whether two of the ranks are stages of one pipeline."""
        known = self._known(ranks)
        return len(set(known)) < len(known)

    def may_reach(self, ranks: tuple[int, ...]) -> bool:
        """Return whether two ranks may be ends of one pipeline, as messages of one of them were not recorded."""
        return len(ranks) == 2 and bool(self._known(ranks)) and not self._recorded.issuperset(ranks)

    def are_ends(self, ranks: tuple[int, ...]) -> bool:
        """Return whether two ranks are the first and the last stage of one pipeline."""
        return len(ranks) == 2 and set(ranks) == self._ends.get(self._of(ranks[0]))

    @cached_property
    def _ends(self) -> dict[int, set[int]]:
        """Return the ends of pipelines by the rank that stands for each. The order of three ranks or more needs all."""
        pipelines: dict[int, list[int]] = {}
        for rank in list(self._first):
            pipelines.setdefault(self._of(rank), []).append(rank)
        ends = {first: set(ranks) for first, ranks in pipelines.items() if len(ranks) == 2}
        longer = {first: ranks for first, ranks in pipelines.items() if len(ranks) > 2}
        if any(self._recorded.issuperset(ranks) for ranks in longer.values()):
            stages = self._stages or find_stages(StepGraph.build(self._operations))
            for first, ranks in longer.items():
                if self._recorded.issuperset(ranks):
                    ordered = sorted(ranks, key=lambda rank: stages[rank])
                    if stages[ordered[0]] < stages[ordered[1]] and stages[ordered[-2]] < stages[ordered[-1]]:
                        ends[first] = {ordered[0], ordered[-1]}
        return ends
