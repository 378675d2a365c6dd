"""Windows of one tick as the rules read them: columns of figures, and evidence that is read on demand.

The figures are those that the daemons sent; added here is what needs more than one rank: waiting on a device, whether
captures or probes count, and the difference between the nodes' clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from google.protobuf.message import Message

from rankscope.analysis.stats.robust import Bools, Floats, Ints, grouped_max, grouped_median, grouped_min, number_groups
from rankscope.analysis.step_graph.window_operations import RankOperations
from rankscope.analysis.verdicts.exposed_communication import POINT_TO_POINT, GroupSpans, group_waits
from rankscope.analysis.verdicts.figures import MAX_STEP_SECONDS, OF_RULES, WindowFigures
from rankscope.analysis.verdicts.host_pace import own_pace
from rankscope.analysis.verdicts.thresholds import FIXED
from rankscope.analysis.verdicts.window_columns import by_name, columns, of_groups
from rankscope.analysis.verdicts.windows import (
    MAX_COMMUNICATORS,
    Communicator,
    FrameSeen,
    GpuEvidence,
    JobWindow,
    NcclOperation,
    RankColumns,
    RankEvidence,
    StackProfile,
    Stall,
)
from rankscope.common.text import printable
from rankscope.operator.correlation.daemon_windows import HeldWindow, RankSeen
from rankscope.operator.correlation.node_networks import node_networks
from rankscope.v1 import window_pb2


@dataclass(frozen=True)
class Layout:
    """The ranks of a tick: unchanged between ticks as long as no process is replaced."""

    members: tuple[RankSeen, ...]
    job: Ints
    rank: Ints
    stage: Ints
    place: Ints
    place_names: Mapping[int, str]

    @staticmethod
    def of(members: tuple[RankSeen, ...]) -> Layout:
        nodes = {node: number for number, node in enumerate(sorted({who.node for who in members}))}
        keys = [(0, who.rank, who.stage, nodes[who.node]) for who in members]
        job, rank, stage, place = np.array(keys, dtype=np.int64).reshape(len(members), 4).T.copy()
        return Layout(members, job, rank, stage, place, {number: node for node, number in nodes.items()})


@dataclass
class Tick:
    """One tick of one job: its windows in any order, at most one per rank."""

    windows: Mapping[int, HeldWindow]  # by rank
    world_size: int
    departed: tuple[int, ...] = ()
    layout: Layout | None = None  # of the previous tick, if there was one
    shifts: Mapping[str, float] = field(default_factory=dict)  # seconds by which clocks of nodes are known to be ahead


def job_windows(ticks: Mapping[str, Tick]) -> dict[str, JobWindow]:
    """All ready jobs together: most have few ranks, and numpy is fast with many. Sets each `layout`."""
    if not ticks:
        return {}
    ordered = [[tick.windows[rank] for rank in sorted(tick.windows)] for tick in ticks.values()]
    layouts = [_lay_out(tick, windows) for tick, windows in zip(ticks.values(), ordered, strict=True)]
    ends = np.cumsum([len(windows) for windows in ordered]).tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    table = columns([window.figures for window in chain.from_iterable(ordered)])
    figures, groups = by_name(table), of_groups(table)
    job = np.repeat(np.arange(len(parts)), [len(windows) for windows in ordered])
    captured = figures.is_captured > 0
    is_host_paced = _add_device_waits(figures, groups, captured, job, len(parts))
    is_captured = [False] * len(parts)
    if captured.any():
        is_measured = ~np.isnan(figures.self_seconds) & ~captured
        is_captured = [_settle_captured(table[: len(OF_RULES), p], captured[p], is_measured[p]) for p in parts]
    collectives = _have_collectives(figures, groups, job, len(parts))
    skews = _clock_skews(figures, job, layouts, next(iter(ticks.values())).shifts)
    made = {}
    for (name, tick), windows, layout, part, captured_only, skew, meets, host_paced in zip(
        ticks.items(), ordered, layouts, parts, is_captured, skews, collectives, is_host_paced, strict=True
    ):
        # A copy, because detectors keep windows: a view would keep the whole fleet's tick in memory.
        kept = table[: len(OF_RULES), part].copy()
        keys = {"job": layout.job, "rank": layout.rank, "stage": layout.stage, "place": layout.place}
        rank_columns = RankColumns(**keys, **dict(zip(OF_RULES, kept, strict=True)))
        made[name] = _job_window(
            tick, windows, rank_columns, layout.place_names, skew, captured_only, meets, host_paced
        )
    return made


def _lay_out(tick: Tick, windows: Sequence[HeldWindow]) -> Layout:
    members = tuple([window.who for window in windows])
    if tick.layout is None or tick.layout.members != members:
        tick.layout = Layout.of(members)
    return tick.layout


def _add_device_waits(figures: WindowFigures, groups: Floats, captured: Bools, job: Ints, jobs: int) -> list[bool]:
    """For ranks that are timed on a device. Collectives may overlap with other work there, so a single rank does not
    know how long it waited: the times of all members of a group show it. Returns the jobs whose hosts set the pace."""
    on_device = ~np.isnan(figures.host_seconds) & ~captured
    figures.transfer_seconds[on_device] = np.nan  # the quantile of one rank is not the transfer time
    timed = np.flatnonzero(on_device & ~np.isnan(groups[0, 0]))
    if not len(timed):
        return [False] * jobs
    usual_steps = np.maximum(figures.step_seconds[timed] - np.nan_to_num(figures.long_seconds[timed]), 0.0)
    waits = group_waits(GroupSpans(*groups[:, :, timed].swapaxes(0, 1)), job[timed], usual_steps)
    figures.self_seconds[timed] = waits.self_seconds
    figures.wait_seconds[timed] = waits.wait_seconds
    figures.transfer_seconds[timed] = waits.transfer_seconds
    _leave_out_other_steps(figures, timed, job[timed])
    hidden = _add_hidden_hosts(figures, timed, job[timed])
    most = np.bincount(job[hidden], minlength=jobs) > np.bincount(job, minlength=jobs) / 2
    return [bool(is_most) for is_most in most]


def _leave_out_other_steps(figures: WindowFigures, timed: Ints, job: Ints) -> None:
    """In a loop that marks no steps, each rank finds them by itself. No times are compared where one rank sees one step
    and others several."""
    is_unmarked = np.isnan(figures.checkpoint_seconds[timed])  # the probe times those of each step that is marked
    if not is_unmarked.any():
        return
    rows, (group, count) = timed[is_unmarked], number_groups(job[is_unmarked])
    seconds = figures.step_seconds[rows]
    is_apart = grouped_max(seconds, group, count) >= FIXED.unmarked_steps_ratio * grouped_min(seconds, group, count)
    for column in (figures.self_seconds, figures.wait_seconds, figures.transfer_seconds):
        column[rows[is_apart[group]]] = np.nan


def _add_hidden_hosts(figures: WindowFigures, timed: Ints, job: Ints) -> Ints:
    """What a host needs for a step is the rank's own, also while its device waits for another rank. Where ranks meet in
    few steps, they wait in these for what the others lasted, so such waiting is not that of long steps.
    Returns the changed rows."""
    hosts = figures.take(timed)
    own = own_pace(hosts, job) - hosts.transfer_seconds
    hidden = np.flatnonzero(own > hosts.self_seconds)
    late = np.nan_to_num(hosts.late_seconds[hidden])
    rows = timed[hidden]
    figures.self_seconds[rows] = own[hidden]
    figures.wait_seconds[rows] = np.maximum(hosts.step_seconds[hidden] - late - own[hidden], 0.0)
    figures.long_seconds[rows] = np.where(late > 0, late, np.nan)
    return rows


def _settle_captured(rule_figures: Floats, captured: Bools, is_measured: Bools) -> bool:
    """Steps slowed by recording are not compared with steps that a probe timed. True if the captured ones are used:
    no probe measures waiting."""
    if not captured.any():
        return False
    rule_figures[:, captured if is_measured.any() else ~captured] = np.nan
    return not is_measured.any()


def _job_window(
    tick: Tick,
    windows: list[HeldWindow],
    columns: RankColumns,
    place_names: Mapping[int, str],
    skew_seconds: float | None,
    is_captured: bool,
    has_collectives: bool,
    is_host_paced: bool,
) -> JobWindow:
    last = windows[-1]
    return JobWindow(
        end_unix_seconds=last.end_unix_nanos / 1e9,
        window_seconds=last.window_seconds,
        world_size=tick.world_size,
        columns=columns,
        departed=tick.departed,
        clock_skew_seconds=skew_seconds,
        evidence=lambda: Evidence(windows, columns.rank),
        stalls=lambda: {window.who.rank: stall_of(window.message()) for window in windows},
        place_names=place_names,
        network=lambda: node_networks(windows, columns.place),
        is_captured=is_captured,
        has_collectives=has_collectives,
        is_host_paced=is_host_paced,
        operations=lambda is_sample: _operations(windows[:1] if is_sample else windows),
    )


def _operations(windows: Sequence[HeldWindow]) -> list[RankOperations]:
    sent = (window.operations() for window in windows)
    return [one for one in sent if one is not None]


def _have_collectives(figures: WindowFigures, groups: Floats, job: Ints, jobs: int) -> list[bool]:
    """Of each job, whether a rank has a process group that does more than send and receive, or DDP's timers."""
    kinds = GroupSpans(*groups.swapaxes(0, 1)).kind
    meets = (~np.isnan(kinds) & (kinds != POINT_TO_POINT)).any(axis=0)
    meets |= ~np.isnan(figures.forward_seconds)
    return [bool(count) for count in np.bincount(job[meets], minlength=jobs)]


def _clock_skews(
    figures: WindowFigures, job: Ints, layouts: Sequence[Layout], shifts: Mapping[str, float]
) -> list[float | None]:
    """The largest difference between the clocks of a job's nodes, beyond what is known; None for one node. Synchronous
    ranks end the same step together, so the clocks are read at a common step."""
    step_seconds = grouped_median(figures.step_seconds, job, len(layouts))[job]
    moved = figures.last_step_unix_seconds - figures.steps_total * step_seconds
    if shifts:
        moved -= np.array([shifts.get(who.node, 0.0) for layout in layouts for who in layout.members])
    node, node_count = number_groups(job, np.concatenate([layout.place for layout in layouts]))
    job_of_node = np.zeros(node_count, dtype=np.int64)
    job_of_node[node] = job
    medians = grouped_median(moved, node, node_count)
    with np.errstate(invalid="ignore"):  # jobs without any
        apart = grouped_max(medians, job_of_node, len(layouts)) - grouped_min(medians, job_of_node, len(layouts))
    known = np.bincount(job_of_node[~np.isnan(medians)], minlength=len(layouts)) > 1
    return [skew if is_known else None for skew, is_known in zip(apart.tolist(), known.tolist(), strict=True)]


_GPU_FIGURES = (
    *("utilization_ratio", "temperature_celsius", "row_remap_pending"),
    *("ecc_uncorrected_errors", "ecc_corrected_errors", "xids"),
)
FUNCTION_CHARACTERS = 32
RANGE_CHARACTERS = 48
MAX_RANGES = 32
_STALL_FIGURES = ("phase", "collectives_enqueued", "collectives_completed", "same_stack_looks", "is_working")


class Evidence(Mapping[int, RankEvidence]):
    """Read from a window when a rank needs it: few do, and a large job has a hundred thousand."""

    def __init__(self, windows: Sequence[HeldWindow], ranks: Ints) -> None:
        self._windows = windows
        self._ranks = ranks  # of the windows, ascending

    def __getitem__(self, rank: int) -> RankEvidence:
        row = int(np.searchsorted(self._ranks, rank))
        if row == len(self._ranks) or self._ranks[row] != rank:
            raise KeyError(rank)
        return evidence_of(self._windows[row].message())

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks.tolist())

    def __len__(self) -> int:
        return len(self._ranks)


def evidence_of(window: window_pb2.RankWindow) -> RankEvidence:
    length = (window.end_unix_nanos - window.start_unix_nanos) / 1e9
    process = window.process
    is_known = process.HasField("starved_seconds") and length > 0
    return RankEvidence(
        stacks=_stacks(window.stacks) if window.HasField("stacks") else None,
        starved_share=min(process.starved_seconds / length, 1.0) if is_known else None,
        window_seconds=length,
        gpu=_gpu(window.gpu, length) if window.HasField("gpu") and window.gpu.gpus == 1 else None,
        ranges=range_seconds(window),
    )


def range_seconds(window: window_pb2.RankWindow) -> dict[str, float]:
    """Host time of a step by NVTX range, whatever a daemon sent."""
    ranges = [one for one in window.ranges[:MAX_RANGES] if 0 <= one.seconds <= MAX_STEP_SECONDS]
    return {printable(one.name, RANGE_CHARACTERS): one.seconds for one in ranges}


def _gpu(usage: window_pb2.GpuUsage, window_seconds: float) -> GpuEvidence:
    clock, ratio = _known(usage, "sm_clock_hertz"), _known(usage, "sm_clock_ratio")
    return GpuEvidence(
        sm_clock_hertz=clock,
        sm_clock_max_hertz=clock / ratio if clock and ratio else None,
        throttled_shares={
            reason: min(seconds / window_seconds, 1.0)
            for reason, seconds in usage.throttled_seconds.items()
            if window_seconds > 0
        },
        shared=usage.shared,
        seconds=window_seconds,
        **{name: _known(usage, name) for name in _GPU_FIGURES},
    )


def _known(message: Message, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _stacks(summary: window_pb2.StackSummary) -> StackProfile:
    frames = tuple(FrameSeen(f.function, f.file, f.line, f.share, f.own_share, f.phase) for f in summary.frames)
    seconds = max(0.0, (summary.end_unix_nanos - summary.start_unix_nanos) / 1e9)
    return StackProfile(summary.samples, dict(summary.phase_shares), frames, seconds, summary.end_unix_nanos / 1e9)


def stall_of(window: window_pb2.RankWindow) -> Stall | None:
    if not window.HasField("stall"):
        return None
    stall = window.stall
    return Stall(
        stall.seconds_since_step,
        stack=tuple(stall.stack),
        is_stopped=stall.is_stopped,
        communicators=tuple(map(_communicator, stall.communicators[:MAX_COMMUNICATORS])),
        **{name: _known(stall, name) for name in _STALL_FIGURES},
    )


def _communicator(told: window_pb2.NcclCommunicator) -> Communicator:
    counts = (told.number, told.size, told.position, told.issued, told.started, told.finished)
    issued, started, finished = (_operation(_known(told, f"last_{what}")) for what in ("issued", "started", "finished"))
    return Communicator(*counts, issued, started, finished, told.unchanged_seconds)


def _operation(told: window_pb2.NcclOperation | None) -> NcclOperation | None:
    return None if told is None else NcclOperation(printable(told.function, FUNCTION_CHARACTERS), told.sequence)
