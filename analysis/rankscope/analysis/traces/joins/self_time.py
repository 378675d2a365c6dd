"""What each rank did itself in each step: the step less everything it waited for others, over all communicators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, Ints, median_or_nan
from rankscope.analysis.step_graph.clock_alignment import Clocks
from rankscope.analysis.traces.breakdown import Breakdown, StepParts
from rankscope.analysis.traces.communication.collectives import Collectives, compute_intervals
from rankscope.analysis.traces.intervals import covered_until, difference, union
from rankscope.analysis.traces.joins.collective_matching import Matched
from rankscope.analysis.traces.steps import NO_STEP
from rankscope.analysis.traces.trace import Trace

# Who came last to each collective, how long the others waited for it, and how long the transfer itself took.


@dataclass(frozen=True)
class Arrivals:
    """By member of a collective (in the order of `Matched`) and, where said, by collective. Times are common."""

    start_ns: Ints
    wait_ns: Ints  # for others; the rest of the duration is transfer
    transfer_ns: Ints  # by collective: what it takes when all ranks are there
    last: Ints  # by collective: the member (row) that came last
    lead_ns: Ints  # by collective: how long before the last the one before it came
    possible: Bools  # by collective: no rank left before another came, within the error of the clocks


def find_arrivals(matched: Matched, clocks: Clocks) -> Arrivals:
    """transfer = the least, over the group, of (own end − latest start); wait = own duration − transfer."""
    calls, collective, count = matched.calls, matched.collective, matched.count
    start = clocks.common(calls.rank, calls.start_ns)
    end = clocks.common(calls.rank, calls.stop_ns)
    nothing = np.zeros(0, dtype=np.int64)
    if count == 0:
        return Arrivals(start, nothing, nothing, nothing, nothing, np.zeros(0, dtype=bool))
    heads = np.searchsorted(collective, np.arange(count))
    latest = np.maximum.reduceat(start, heads)
    first_end = np.minimum.reduceat(end, heads)
    transfer = np.maximum(first_end - latest, 0)
    duration = calls.stop_ns - calls.start_ns
    wait = np.maximum(duration - transfer[collective], 0)
    order = np.lexsort((start, collective))
    tails = np.append(heads[1:], len(collective)) - 1
    tolerance = 10_000 + int(10_000 * (clocks.residual_us or 0.0))
    return Arrivals(
        start,
        wait,
        transfer,
        last=order[tails],
        lead_ns=start[order[tails]] - start[order[tails - 1]],
        possible=~matched.together | (latest <= first_end + tolerance),
    )


def waits_of_rank(rank: int, matched: Matched, arrivals: Arrivals) -> tuple[Ints, Ints]:
    """Return the rank's rows of Collectives, each once, and how long it waited in them. A kernel with several messages
    waits for the last of them."""
    mine = matched.calls.rank == rank
    rows, place = np.unique(matched.calls.row[mine], return_inverse=True)
    wait = np.zeros(len(rows), dtype=np.int64)
    np.maximum.at(wait, place, arrivals.wait_ns[mine])
    return rows, wait


# A first step that the capture cut to less than this share of the others is no step to compare.
CUT_STEP_RATIO = 0.5
_ALL = slice(None)


@dataclass(frozen=True)
class StepTimes:
    """A row per rank, a column per step that ranks have in common; NaN where a rank's trace lacks the step."""

    rank: Ints
    step: Ints  # number, as the profiler counts where it does
    step_ns: Floats
    wait_ns: Floats  # for others, with nothing computed meanwhile
    transfer_ns: Floats  # the same of transfers
    unmatched_ns: Floats  # the same of communication of which it is not known how much was waiting
    on_host: bool  # measured by the host's operators: what a rank queued for a CPU looks like its work

    @property
    def self_ns(self) -> Floats:
        return self.step_ns - self.wait_ns

    def take(self, ranks: Bools | slice = _ALL, steps: Bools | slice = _ALL) -> StepTimes:
        return StepTimes(
            self.rank[ranks],
            self.step[steps],
            self.step_ns[ranks][:, steps],
            self.wait_ns[ranks][:, steps],
            self.transfer_ns[ranks][:, steps],
            self.unmatched_ns[ranks][:, steps],
            self.on_host,
        )


@dataclass(frozen=True)
class _Windows:
    number: Ints
    start_ns: Ints  # by the rank's own clock, from the trace's base
    end_ns: Ints
    host_start_ns: Ints
    host_end_ns: Ints
    numbered: bool


@dataclass(frozen=True)
class CommonSteps:
    """The steps that at least two ranks have."""

    number: Ints
    windows: Mapping[int, _Windows]  # by rank
    position: Mapping[int, Ints]  # in `number`, of each of the rank's windows; -1 for none

    def at(self, rank: int, start_ns: Ints, is_call: Bools) -> Ints:
        """Return the number of the step at each time, of the host's calls or of work on the device."""
        own = self.windows[rank]
        begin = np.where(is_call, *(np.searchsorted(b, start_ns, "right") for b in (own.host_start_ns, own.start_ns)))
        end = np.where(is_call, *(np.searchsorted(e, start_ns, "right") for e in (own.host_end_ns, own.end_ns)))
        position = np.where(begin > end, self.position[rank][begin - 1], -1)
        return np.where(position >= 0, np.append(self.number, NO_STEP)[position], NO_STEP)


def find_common_steps(
    traces: Mapping[int, Trace], breakdowns: Mapping[int, Breakdown | None], ranks: Ints, clocks: Clocks
) -> CommonSteps:
    windows = {}
    for rank in ranks.tolist():
        found = breakdowns[rank]
        ended = [step for step in found.steps if step.ends_in_trace] if found is not None else []
        if ended:
            windows[rank] = _windows(ended, numbered=_is_numbered(traces[rank]))
    return CommonSteps(*_common_steps(windows, traces, clocks))


def measure_steps(
    traces: Mapping[int, Trace],
    collectives: Mapping[int, Collectives],
    breakdowns: Mapping[int, Breakdown | None],
    matched: Matched,
    arrivals: Arrivals,
    clocks: Clocks,
    common: CommonSteps,
) -> StepTimes:
    windows, steps = common.windows, common.number
    ranks = np.array(list(windows), dtype=np.int64)
    table = np.full((4, len(ranks), len(steps)), np.nan)
    starts = _trimmed_starts(windows, traces, clocks)
    for row, (rank, own) in enumerate(windows.items()):
        in_step = common.position[rank] >= 0
        start, end = starts[rank][in_step], own.end_ns[in_step]
        times = _rank_times(rank, traces[rank], collectives[rank], matched, arrivals, start, end)
        table[:, row, common.position[rank][in_step]] = times
    on_host = any((found := breakdowns[rank]) is not None and found.on_host for rank in windows)
    measured = _without_cut_step(StepTimes(ranks, steps, table[0], table[1], table[2], table[3], on_host))
    return measured.take(ranks=np.asarray(~np.isnan(measured.step_ns).all(axis=1)))


def _windows(steps: Sequence[StepParts], numbered: bool) -> _Windows:
    rows = [(step.number, step.start_ns, step.end_ns, step.host_start_ns, step.host_end_ns) for step in steps]
    number, start, end, host_start, host_end = np.array(rows, dtype=np.int64).T
    return _Windows(number, start, end, host_start, host_end, numbered)


def _is_numbered(trace: Trace) -> bool:
    return any(name.startswith("ProfilerStep") for name in trace.names)


def _common_steps(
    windows: Mapping[int, _Windows], traces: Mapping[int, Trace], clocks: Clocks
) -> tuple[Ints, Mapping[int, _Windows], dict[int, Ints]]:
    """By the profiler's numbers where all ranks have them; else by the common clock, against the rank that has most."""
    if not windows:
        return np.zeros(0, dtype=np.int64), {}, {}
    if all(own.numbered for own in windows.values()):
        labels = {rank: own.number for rank, own in windows.items()}
    else:
        longest = max(windows, key=lambda rank: len(windows[rank].number))
        edges = clocks.shifts[longest].common(windows[longest].start_ns + traces[longest].base_ns)
        close = int(clocks.shifts[longest].common(windows[longest].end_ns[-1:] + traces[longest].base_ns)[0])
        labels = {}
        for rank, own in windows.items():
            middle = (own.start_ns + own.end_ns) // 2 + traces[rank].base_ns
            middle = clocks.shifts[rank].common(middle)
            labels[rank] = np.where(middle < close, np.searchsorted(edges, middle, "right") - 1, -1)
    every = np.concatenate(list(labels.values()))
    steps, counts = np.unique(every[every >= 0], return_counts=True)
    steps = steps[counts >= 2]
    position = {}
    for rank, label in labels.items():
        at = np.minimum(np.searchsorted(steps, label), max(len(steps) - 1, 0))
        position[rank] = np.where(steps[at] == label, at, -1) if len(steps) else np.full(len(label), -1)
        # Two windows of one rank in one step of another: the ranks do not have the same steps.
        repeated = np.concatenate(([False], position[rank][1:] == position[rank][:-1]))
        position[rank][repeated] = -1
    return steps, windows, position


def _trimmed_starts(windows: Mapping[int, _Windows], traces: Mapping[int, Trace], clocks: Clocks) -> dict[int, Ints]:
    """Without numbers, the first step begins where the capture does, at a different moment on each rank: let it begin
    with the latest of them."""
    starts = {rank: own.start_ns.copy() for rank, own in windows.items()}
    if all(own.numbered for own in windows.values()):
        return starts
    begun = {r: int(clocks.shifts[r].common(own.start_ns[:1] + traces[r].base_ns)[0]) for r, own in windows.items()}
    latest = max(begun.values())
    for rank, own in windows.items():
        starts[rank][0] = min(int(own.start_ns[0]) + latest - begun[rank], int(own.end_ns[0]))
    return starts


def _without_cut_step(times: StepTimes) -> StepTimes:
    lengths = np.array([median_or_nan(column) for column in times.step_ns.T])
    if len(lengths) < 2 or lengths[0] >= CUT_STEP_RATIO * median_or_nan(lengths[1:]):
        return times
    return times.take(steps=slice(1, None))


def _rank_times(
    rank: int,
    trace: Trace,
    collectives: Collectives,
    matched: Matched,
    arrivals: Arrivals,
    start: Ints,
    end: Ints,
) -> Floats:
    """Rows: step, wait, transfer, unmatched; a column per window."""
    rows, wait = waits_of_rank(rank, matched, arrivals)
    begun, ended = collectives.start_ns[rows], collectives.end_ns[rows]
    turned = begun + np.minimum(wait, ended - begun)  # from waiting to transfer
    others = collectives.measured & (collectives.group_size != 1)
    others[rows] = False
    hiding = compute_intervals(trace)
    waiting = difference(union(begun, turned), hiding)
    moving = difference(union(turned, ended), hiding)
    unknown = difference(union(collectives.start_ns[others], collectives.end_ns[others]), hiding)
    found = [end - start]
    found += [covered_until(spans, end) - covered_until(spans, start) for spans in (waiting, moving, unknown)]
    # A step of which nothing ran on the device is not in the trace.
    return np.where(end > start, np.array(found, dtype=np.float64), np.nan)
