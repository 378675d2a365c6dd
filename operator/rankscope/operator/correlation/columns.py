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
_CAUSES = ("self", "wait", "input", "forward", "backward", "optimizer", "checkpoint", "other")


def job_window(windows: Sequence[window_pb2.RankWindow], world_size: int, departed: tuple[int, ...] = ()) -> JobWindow:
    """One tick of one job; `windows` has at most one per rank."""
    ordered = sorted(windows, key=lambda window: window.identity.rank)
    nodes = {node: number for number, node in enumerate(sorted({w.identity.node for w in ordered}))}
    floats = np.array([_row(window) for window in ordered], dtype=np.float64).reshape(len(ordered), len(_FLOATS))
    captured = np.array([w.sources.get("steps") == window_pb2.SOURCE_CAPTURE for w in ordered], dtype=np.bool_)
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


def _row(window: window_pb2.RankWindow) -> tuple[float, ...]:
    if not window.HasField("steps"):
        return (NAN,) * len(_FLOATS)
    steps = window.steps
    if steps == 0 or not window.HasField("step"):
        return (float(steps),) + (NAN,) * (len(_FLOATS) - 1)
    causes = window.causes
    # One pass over the fields that are set: HasField and getattr by name cost three times as much.
    per_step = dict.fromkeys(_CAUSES, NAN)
    per_step.update((field.name, seconds / steps) for field, seconds in causes.ListFields())
    own = window.self
    spread = own.p90_seconds / own.p10_seconds if window.HasField("self") and own.p10_seconds > 0 else NAN
    starved = starved_seconds(window.process) / steps
    if window.sources.get("steps") == window_pb2.SOURCE_CAPTURE:
        # The steps are not those of the window: what it queued for a CPU is its share of any step.
        length = (window.end_unix_nanos - window.start_unix_nanos) / 1e9
        starved = starved_seconds(window.process) / length * window.step.mean_seconds if length > 0 else NAN
    return (
        float(steps),
        window.step.mean_seconds,
        per_step["self"],
        per_step["wait"],
        window.wait.p10_seconds if window.HasField("wait") else NAN,
        spread,
        per_step["input"],
        per_step["forward"],
        per_step["backward"],
        per_step["optimizer"],
        per_step["checkpoint"],
        per_step["other"],
        starved,
        window.mfu_ratio if window.HasField("mfu_ratio") else NAN,
    )


def starved_seconds(process: window_pb2.ProcessUsage) -> float:
    """Time the rank could have run and did not. Kernels differ in whether a quota's throttling counts as run delay, so
    the larger of the two stands for both."""
    known = [
        max(
            process.run_delay_seconds if process.HasField("run_delay_seconds") else 0.0,
            process.throttled_seconds if process.HasField("throttled_seconds") else 0.0,
        ),
        process.stopped_seconds if process.HasField("stopped_seconds") else 0.0,
    ]
    measured = process.HasField("run_delay_seconds") or process.HasField("throttled_seconds")
    return sum(known) if measured else NAN


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
