"""How the GPU of a slow rank differs from its peers': a lower clock, which may be the cause, or errors.

The clock decides, the driver's reasons only explain it: one power cap on all GPUs of a job is no cause, and
a reason that does not lower the clock slows nothing. Errors of the hardware are evidence beside the cause: how much
time they cost is not known."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.verdict import Cause
from rankscope.analysis.verdicts.windows import GpuEvidence

PHASE = "throttled"
# Excess in these is spent off the GPU, whatever its clock does meanwhile.
PHASES_OFF_THE_GPU = frozenset({"input", "checkpoint"})
# Held down against its will, the most telling first.
FORCED = ("hw_thermal", "hw_power_brake", "hw_slowdown", "sw_thermal", "power_cap")
THERMAL = ("hw_thermal", "hw_power_brake", "hw_slowdown", "sw_thermal")
IDLE = "idle"


def name_throttle(
    mine: GpuEvidence | None,
    peers: Sequence[GpuEvidence],
    slowdown_ratio: float,
    policy: Policy,
    than: str = "its peers",
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
        return Cause(PHASE, (), f"{_clock(mine)}{_reasons(mine)}; {than.removeprefix('its ')} at {_megahertz(usual)}")
    if not any(mine.share(r) - median(p.share(r) for p in peers) >= policy.throttle_share for r in THERMAL):
        return None
    return Cause(PHASE, (), f"GPU{_reasons(mine)}; not {than}")


def compare_clocks(
    mine: GpuEvidence | None, peers: Sequence[GpuEvidence], policy: Policy, than: str = "its peers"
) -> str:
    """What the GPU of a slow rank shows where its clock does not explain the slowness."""
    clocks = [peer.sm_clock_hertz for peer in peers if peer.sm_clock_hertz]
    if mine is None or not mine.sm_clock_hertz or not clocks:
        return "longer kernels; the clocks of the GPUs are not known"
    usual = median(clocks)
    if usual >= policy.throttle_clock_ratio * mine.sm_clock_hertz:
        return f"{_clock(mine)}{_reasons(mine)}; {than.removeprefix('its ')} at {_megahertz(usual)}: part of it"
    shared = "; other ranks use the same GPU" if mine.shared else ""
    return f"same clock as {than} ({_megahertz(mine.sm_clock_hertz)}), longer kernels{_heat(mine, peers)}{shared}"


def compare_errors(mine: GpuEvidence | None, peers: Sequence[GpuEvidence], than: str = "its peers") -> str:
    """Errors of the GPU that most of its peers do not have; empty where there are none."""
    if mine is None:
        return ""
    uncorrected = f" ({mine.ecc_uncorrected_errors:,} uncorrected)" if mine.ecc_uncorrected_errors else ""
    kinds = (
        (mine.ecc_errors, [peer.ecc_errors for peer in peers], f"{_counted(mine.ecc_errors, 'ECC')}{uncorrected}"),
        (mine.xids, [peer.xids for peer in peers], _counted(mine.xids, "XID")),
        (mine.row_remap_pending, [peer.row_remap_pending for peer in peers], "a pending row remap"),
    )
    found, theirs = [], []
    for own, others, text in kinds:
        known = [int(other) for other in others if other is not None]
        if own and known and not median(known):
            found.append(text)
            theirs += known
    if not found:
        return ""
    lasted = f" in {mine.seconds:.0f} s" if mine.seconds >= 1 else ""
    return f"{' and '.join(found)} on its GPU{lasted}, {'most of ' if any(theirs) else ''}{than} none"


def merge_gpus(seen: Sequence[GpuEvidence]) -> GpuEvidence | None:
    """The mean of several windows; the sum of their errors."""
    if not seen:
        return None
    reasons = dict.fromkeys(reason for gpu in seen for reason in gpu.throttled_shares)
    return GpuEvidence(
        _mean([gpu.sm_clock_hertz for gpu in seen]),
        seen[-1].sm_clock_max_hertz,
        _mean([gpu.utilization_ratio for gpu in seen]),
        {reason: sum(gpu.share(reason) for gpu in seen) / len(seen) for reason in reasons},
        _mean([gpu.temperature_celsius for gpu in seen]),
        seen[-1].shared,
        sum(gpu.seconds for gpu in seen),
        _sum([gpu.ecc_uncorrected_errors for gpu in seen]),
        _sum([gpu.ecc_corrected_errors for gpu in seen]),
        _sum([gpu.xids for gpu in seen]),
        next((gpu.row_remap_pending for gpu in reversed(seen) if gpu.row_remap_pending is not None), None),
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


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _counted(errors: int | None, kind: str) -> str:
    return f"{errors or 0:,} {kind} error{'' if errors == 1 else 's'}"


def _clock(gpu: GpuEvidence) -> str:
    now = _megahertz(gpu.sm_clock_hertz or 0.0)
    highest = gpu.sm_clock_max_hertz
    return f"GPU at {now}" if not highest else f"GPU at {now.removesuffix(' MHz')} of {_megahertz(highest)}"


def _heat(mine: GpuEvidence, peers: Sequence[GpuEvidence]) -> str:
    usual = [peer.temperature_celsius for peer in peers if peer.temperature_celsius is not None]
    if mine.temperature_celsius is None or not usual or mine.temperature_celsius < median(usual) + FIXED.hotter_celsius:
        return ""
    return f", {mine.temperature_celsius:.0f} °C against {median(usual):.0f} °C"


def _megahertz(hertz: float) -> str:
    return f"{hertz / 1e6:,.0f} MHz"


def _reasons(gpu: GpuEvidence) -> str:
    named = [reason for reason in FORCED if gpu.share(reason) >= FIXED.throttle_named_share]
    return "".join(f", {reason} {gpu.share(reason):.0%} of the time" for reason in named[:2])
