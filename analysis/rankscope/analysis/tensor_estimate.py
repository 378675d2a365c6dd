"""Achieved FLOP/s of a GPU that nobody instrumented, from how busy its tensor pipes were. An estimate, never MFU: it
counts whatever the pipes did, recomputation included, and takes all of it for the number format of the peak."""

from __future__ import annotations

import math


def estimated_flops_per_second(
    tensor_active_ratio: float | None,
    peak_flops_per_second: float | None,
    sm_clock_hertz: float | None,
    sm_clock_max_hertz: float | None,
) -> float | None:
    """Utilisation × peak at the maximum clock × clock ÷ maximum clock. None unless all four are known and sensible.

    Without the clock the figure is up to half again too high: under a power cap the pipes are as busy, only slower."""
    hfu = estimated_hfu_ratio(tensor_active_ratio, sm_clock_hertz, sm_clock_max_hertz)
    if hfu is None or peak_flops_per_second is None or not 0 < peak_flops_per_second < math.inf:
        return None
    return hfu * peak_flops_per_second


def estimated_hfu_ratio(
    tensor_active_ratio: float | None, sm_clock_hertz: float | None, sm_clock_max_hertz: float | None
) -> float | None:
    """Hardware FLOPs utilisation: the same, as a share of the peak."""
    if tensor_active_ratio is None or sm_clock_hertz is None or sm_clock_max_hertz is None:
        return None
    if not (0 <= tensor_active_ratio <= 1 and 0 <= sm_clock_hertz < math.inf and 0 < sm_clock_max_hertz < math.inf):
        return None
    # Boost may pass what the driver calls the maximum; a share of the peak does not.
    return tensor_active_ratio * min(sm_clock_hertz / sm_clock_max_hertz, 1.0)
