"""What of a window's message is looked at only when the columns raise a question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rankscope.analysis.robust import Ints
from rankscope.analysis.windows import FrameSeen, GpuEvidence, RankEvidence, StackProfile, Stall
from rankscope.operator.correlation.held_windows import HeldWindow
from rankscope.v1 import window_pb2

NAN = float("nan")


class Evidence(Mapping[int, RankEvidence]):
    """Read out of a message when it is asked for: few are, and a large job has a hundred thousand."""

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
        temperature_celsius=usage.temperature_celsius if usage.HasField("temperature_celsius") else None,
        shared=usage.shared,
        seconds=window_seconds,
        ecc_uncorrected_errors=usage.ecc_uncorrected_errors if usage.HasField("ecc_uncorrected_errors") else None,
        ecc_corrected_errors=usage.ecc_corrected_errors if usage.HasField("ecc_corrected_errors") else None,
        xids=usage.xids if usage.HasField("xids") else None,
        row_remap_pending=usage.row_remap_pending if usage.HasField("row_remap_pending") else None,
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
