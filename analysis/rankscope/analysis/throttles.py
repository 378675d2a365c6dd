"""Whether a slow rank is slow because its GPU runs at a lower clock than its peers' do.

The clock decides, the driver's reasons only say why: all GPUs of a job under the same power cap are nobody's fault, and
a reason that does not lower the clock slows nothing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rankscope.analysis.policy import Policy
from rankscope.analysis.verdict import Cause
from rankscope.analysis.windows import GpuEvidence

PHASE = "throttled"
# Excess in these is spent off the GPU, whatever its clock does meanwhile.
PHASES_OFF_THE_GPU = frozenset({"input", "checkpoint"})
# Held down against its will, the most telling first.
FORCED = ("hw_thermal", "hw_power_brake", "hw_slowdown", "sw_thermal", "power_cap")
THERMAL = ("hw_thermal", "hw_power_brake", "hw_slowdown", "sw_thermal")
IDLE = "idle"


def name_throttle(
    mine: GpuEvidence | None, peers: Sequence[GpuEvidence], slowdown_ratio: float, policy: Policy
) -> Cause | None:
    """`slowdown_ratio`: the rank's own work against its peers'. None where the GPU does not explain it."""
    if mine is None or not peers or mine.share(IDLE) >= policy.throttle_share or not _is_busy(mine, peers, policy):
        return None
    clocks = [peer.sm_clock_hertz for peer in peers if peer.sm_clock_hertz]
    if mine.sm_clock_hertz and clocks:
        usual = median(clocks)
        # Work on the GPU takes as much longer as its clock is lower.
        missing = usual / mine.sm_clock_hertz - 1
        if missing < policy.throttle_clock_ratio - 1 or missing < policy.cause_share * (slowdown_ratio - 1):
            return None
        return Cause(PHASE, (), f"{_clock(mine)}{_reasons(mine)}; peers at {_megahertz(usual)}")
    if not any(mine.share(r) - median(p.share(r) for p in peers) >= policy.throttle_share for r in THERMAL):
        return None
    return Cause(PHASE, (), f"GPU{_reasons(mine)}; its peers are not")


def merge_gpus(seen: Sequence[GpuEvidence]) -> GpuEvidence | None:
    """The mean of several windows."""
    if not seen:
        return None
    reasons = dict.fromkeys(reason for gpu in seen for reason in gpu.throttled_shares)
    return GpuEvidence(
        _mean([gpu.sm_clock_hertz for gpu in seen]),
        seen[-1].sm_clock_max_hertz,
        _mean([gpu.utilization_ratio for gpu in seen]),
        {reason: sum(gpu.share(reason) for gpu in seen) / len(seen) for reason in reasons},
    )


def _is_busy(mine: GpuEvidence, peers: Sequence[GpuEvidence], policy: Policy) -> bool:
    """The GPU that holds the others up is never idler than theirs; one that waits for its CPU may clock down."""
    usual = [peer.utilization_ratio for peer in peers if peer.utilization_ratio is not None]
    if mine.utilization_ratio is None or not usual:
        return True
    return mine.utilization_ratio >= policy.throttle_busy_ratio * median(usual)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _clock(gpu: GpuEvidence) -> str:
    now = _megahertz(gpu.sm_clock_hertz or 0.0)
    highest = gpu.sm_clock_max_hertz
    return f"GPU at {now}" if not highest else f"GPU at {now.removesuffix(' MHz')} of {_megahertz(highest)}"


def _megahertz(hertz: float) -> str:
    return f"{hertz / 1e6:,.0f} MHz"


def _reasons(gpu: GpuEvidence) -> str:
    told = [f"{reason} {gpu.share(reason):.0%} of the time" for reason in FORCED if gpu.share(reason) >= 0.05]
    return ", " + ", ".join(told[:2]) if told else ""
