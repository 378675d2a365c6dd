"""RankWindow messages as the columns and evidence that the rules read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from rankscope.analysis.clocks import clock_skew_seconds
from rankscope.analysis.robust import Ints, median_or_nan
from rankscope.analysis.windows import (
    FrameSeen,
    GpuEvidence,
    JobWindow,
    RankColumns,
    RankEvidence,
    StackProfile,
    Stall,
)
from rankscope.v1 import window_pb2

NAN = float("nan")


def job_window(windows: Sequence[window_pb2.RankWindow], world_size: int, departed: tuple[int, ...] = ()) -> JobWindow:
    """One tick of one job; `windows` has at most one per rank."""
    ordered = sorted(windows, key=lambda window: window.identity.rank)
    nodes = {node: number for number, node in enumerate(sorted({w.identity.node for w in ordered}))}
    captured = np.array([w.sources.get("steps") == window_pb2.SOURCE_CAPTURE for w in ordered], dtype=np.bool_)
    rows = [_row(window, is_captured) for window, is_captured in zip(ordered, captured.tolist(), strict=True)]
    floats = np.array(rows, dtype=np.float64).reshape(len(ordered), len(_FLOATS))
    if captured.any() and not np.isnan(floats[~captured, 0]).all():
        # Steps slowed down by recording are not to be compared with steps that a probe timed.
        floats[captured] = NAN
        captured[:] = False
    ints = np.array([_keys(window, nodes) for window in ordered], dtype=np.int64).reshape(len(ordered), 4)
    keys, measures = (ints[:, c] for c in range(4)), (floats[:, c] for c in range(len(_FLOATS)))
    columns = RankColumns(*chain[Any](keys, measures))
    last = ordered[-1]
    return JobWindow(
        end_unix_seconds=last.end_unix_nanos / 1e9,
        window_seconds=(last.end_unix_nanos - last.start_unix_nanos) / 1e9,
        world_size=world_size,
        columns=columns,
        departed=departed,
        clock_skew_seconds=_skew(ordered, columns) if len(nodes) > 1 else None,
        evidence=lambda: _Evidence(ordered, columns.rank),
        stalls=lambda: {w.identity.rank: stall_of(w) for w in ordered},
        place_names={number: node for node, number in nodes.items()},
        is_captured=bool(captured.any()),
    )


class _Evidence(Mapping[int, RankEvidence]):
    """Read out of a message when it is asked for: few are, and a large job has a hundred thousand."""

    def __init__(self, windows: Sequence[window_pb2.RankWindow], ranks: Ints) -> None:
        self._windows = windows
        self._ranks = ranks  # of the windows, ascending

    def __getitem__(self, rank: int) -> RankEvidence:
        row = int(np.searchsorted(self._ranks, rank))
        if row == len(self._ranks) or self._ranks[row] != rank:
            raise KeyError(rank)
        return evidence_of(self._windows[row])

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks.tolist())

    def __len__(self) -> int:
        return len(self._ranks)


def _keys(window: window_pb2.RankWindow, nodes: Mapping[str, int]) -> tuple[int, int, int, int]:
    identity = window.identity
    coordinates = identity.coordinates
    stage = coordinates.pipeline if coordinates.HasField("pipeline") else -1
    return (0, identity.rank, stage, nodes[identity.node])


# Names of RankColumns' fields after the four keys, in order; `_row` fills them.
_FLOATS = tuple(RankColumns.__dataclass_fields__)[4:]


def _row(window: window_pb2.RankWindow, is_captured: bool) -> tuple[float, ...]:
    steps = window.steps
    if steps == 0 or not window.HasField("step"):
        return (float(steps) if window.HasField("steps") else NAN,) + (NAN,) * (len(_FLOATS) - 1)
    causes, own, mean_seconds = window.causes, window.self, window.step.mean_seconds
    starved = starved_seconds(window.process) / steps
    if is_captured:
        # The steps are not those of the window: what it queued for a CPU is its share of any step.
        length = (window.end_unix_nanos - window.start_unix_nanos) / 1e9
        starved = starved_seconds(window.process) / length * mean_seconds if length > 0 else NAN
    # Spelled out, and HasField asked only of what reads as zero: by name and for all of them it cost four times
    # as much, and a fleet has thousands of windows a second.
    is_set = causes.HasField
    return (
        float(steps),
        mean_seconds,
        causes.self / steps if causes.self or is_set("self") else NAN,
        causes.wait / steps if causes.wait or is_set("wait") else NAN,
        window.wait.p10_seconds if window.HasField("wait") else NAN,
        own.p90_seconds / own.p10_seconds if own.p10_seconds > 0 else NAN,
        causes.input / steps if causes.input or is_set("input") else NAN,
        causes.forward / steps if causes.forward or is_set("forward") else NAN,
        causes.backward / steps if causes.backward or is_set("backward") else NAN,
        causes.optimizer / steps if causes.optimizer or is_set("optimizer") else NAN,
        causes.checkpoint / steps if causes.checkpoint or is_set("checkpoint") else NAN,
        causes.other / steps if causes.other or is_set("other") else NAN,
        starved,
        window.mfu_ratio if window.HasField("mfu_ratio") else NAN,
    )


def starved_seconds(process: window_pb2.ProcessUsage) -> float:
    """Time the rank could have run and did not. Kernels differ in whether a quota's throttling counts as run delay, so
    the larger of the two stands for both."""
    waited = max(process.run_delay_seconds, process.throttled_seconds)
    if not waited and not process.HasField("run_delay_seconds") and not process.HasField("throttled_seconds"):
        return NAN
    return waited + process.stopped_seconds


def evidence_of(window: window_pb2.RankWindow) -> RankEvidence:
    length = (window.end_unix_nanos - window.start_unix_nanos) / 1e9
    starved = starved_seconds(window.process)
    return RankEvidence(
        stacks=_stacks(window.stacks) if window.HasField("stacks") else None,
        starved_share=None if np.isnan(starved) or length <= 0 else min(starved / length, 1.0),
        window_seconds=length,
        gpu=_gpu(window.gpu, length) if window.HasField("gpu") and window.gpu.gpus == 1 else None,
    )


def _gpu(usage: window_pb2.GpuUsage, window_seconds: float) -> GpuEvidence:
    clock = usage.sm_clock_hertz if usage.HasField("sm_clock_hertz") else None
    ratio = usage.sm_clock_ratio if usage.HasField("sm_clock_ratio") else None
    return GpuEvidence(
        sm_clock_hertz=clock,
        sm_clock_max_hertz=clock / ratio if clock and ratio else None,
        utilization_ratio=usage.utilization_ratio if usage.HasField("utilization_ratio") else None,
        throttled_shares={
            reason: min(seconds / window_seconds, 1.0)
            for reason, seconds in usage.throttled_seconds.items()
            if window_seconds > 0
        },
    )


def _stacks(summary: window_pb2.StackSummary) -> StackProfile:
    frames = tuple(FrameSeen(f.function, f.file, f.line, f.share, f.leaf_share, f.phase) for f in summary.frames)
    return StackProfile(summary.samples, dict(summary.phase_shares), frames)


def stall_of(window: window_pb2.RankWindow) -> Stall | None:
    if not window.HasField("stall"):
        return None
    stall = window.stall
    return Stall(
        stall.seconds_since_step,
        stall.phase if stall.HasField("phase") else None,
        tuple(stall.stack),
        stall.collectives_enqueued if stall.HasField("collectives_enqueued") else None,
        stall.collectives_completed if stall.HasField("collectives_completed") else None,
        stall.same_stack_looks if stall.HasField("same_stack_looks") else None,
    )


def _skew(windows: Sequence[window_pb2.RankWindow], columns: RankColumns) -> float | None:
    step = median_or_nan(columns.step_seconds)
    if np.isnan(step):
        return None
    totals = np.array([w.steps_total if w.HasField("steps_total") else NAN for w in windows], dtype=np.float64)
    ends = [w.last_step_unix_nanos / 1e9 if w.HasField("last_step_unix_nanos") else NAN for w in windows]
    return clock_skew_seconds(totals, np.array(ends, dtype=np.float64), step, columns.place)
