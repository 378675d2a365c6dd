"""Model FLOPs utilisation (MFU), with recomputation (HFU), and an estimate of achieved FLOP/s from tensor-pipe
activity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rankscope.analysis.models.device_peaks import peak_flops_per_second

# A backward pass does two multiplications for each one of the forward pass.
FORWARDS_PER_STEP = 3
ANY, HALF, INTEGER, DOUBLE = "any", "hmma", "imma", "dfma"
# The number format of the dense peak that a pipe reaches at full activity; None: bf16, or fp16 if there is no bf16. The
# integer pipe is missing: it does no floating-point operations.
_FORMATS: Mapping[str, str | None] = {HALF: None, DOUBLE: "fp64"}


class Recompute(Enum):
    NONE = "none"
    SELECTIVE = "selective"  # the attention core: scores, softmax, weighted sum
    FULL = "full"  # all layers


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token, forward and backward. `head` is the output projection if it is counted separately;
    checkpointing of layers does not repeat it. `attention` is None if the FLOPs were declared as one number."""

    weights: float
    attention: float | None
    head: float = 0.0

    @property
    def model(self) -> float:
        return self.weights + (self.attention or 0.0) + self.head

    def hardware(self, recompute: Recompute) -> float | None:
        """Including recomputation; None if that part is unknown."""
        if recompute is Recompute.NONE:
            return self.model
        if recompute is Recompute.FULL:
            return self.model + (self.model - self.head) / FORWARDS_PER_STEP
        return None if self.attention is None else self.model + self.attention / FORWARDS_PER_STEP


@dataclass(frozen=True)
class Utilisation:
    mfu_ratio: float
    hfu_ratio: float | None
    model_flops_per_second: float
    flops_per_second_per_gpu: float

    @property
    def possible(self) -> bool:
        return self.mfu_ratio <= 1 and (self.hfu_ratio or 0) <= 1


def palm_token_flops(
    parameters: float, layers: float, width: float, sequence: float, *, causal: bool = False
) -> TokenFlops:
    """Forward and backward of one token: 6N + 12·L·H·Q·T, with heads × head size = width. `causal` counts only the
    half of the attention that a causal mask leaves."""
    return TokenFlops(6 * parameters, 12 * layers * width * sequence * (0.5 if causal else 1.0))


def declared_token_flops(flops_per_token: float) -> TokenFlops:
    return TokenFlops(flops_per_token, None)


def step_mfu_ratio(
    flops_per_step: float | None, step_seconds: float | None, peak_flops_per_second: float | None
) -> float | None:
    """Of one GPU; None if one of them is unknown, infinite where a declared number is absurd."""
    if flops_per_step is None or not step_seconds or not peak_flops_per_second:
        return None
    available = step_seconds * peak_flops_per_second
    return flops_per_step / available if available > 0 else math.inf


def utilisation(
    flops: TokenFlops, tokens_per_second: float, gpus: int, peak_flops_per_second: float, recompute: Recompute
) -> Utilisation:
    available = gpus * peak_flops_per_second
    hardware = flops.hardware(recompute)
    return Utilisation(
        mfu_ratio=tokens_per_second * flops.model / available,
        hfu_ratio=None if hardware is None else tokens_per_second * hardware / available,
        model_flops_per_second=tokens_per_second * flops.model,
        flops_per_second_per_gpu=tokens_per_second * flops.model / gpus,
    )


def pipe_peaks(device_name: str) -> dict[str, float | None]:
    """FLOP/s of each floating-point pipe, by the driver's device name."""
    return {pipe: peak_flops_per_second(device_name, kind) for pipe, kind in _FORMATS.items()}


def estimated_flops_per_second(
    tensor_active_ratio: Mapping[str, float],
    pipe_peaks: Mapping[str, float | None],
    sm_clock_hertz: float | None,
    sm_clock_max_hertz: float | None,
) -> float | None:
    """Achieved FLOP/s of a GPU without instrumentation: sum over the pipes of activity × peak at the maximum clock ×
    clock ÷ maximum clock. None unless the clocks, an activity and the peaks of all active pipes are known and
    plausible.

    An estimate, not MFU: it counts all work of the pipes, including recomputation, and assumes the number format of
    each pipe's peak. Without the clock it would be up to 50 % too high: under a power cap the pipes are as active,
    but slower."""
    clock = _clock_ratio(sm_clock_hertz, sm_clock_max_hertz)
    busy = _floating_point(tensor_active_ratio)
    if clock is None or busy is None:
        return None
    total = 0.0
    for pipe, ratio in busy.items():
        peak = pipe_peaks.get(pipe)
        if peak is None or not 0 < peak < math.inf:
            if ratio > 0 or pipe == HALF:
                return None
            continue
        total += ratio * peak
    return total * clock


def estimated_hfu_ratio(
    tensor_active_ratio: Mapping[str, float], sm_clock_hertz: float | None, sm_clock_max_hertz: float | None
) -> float | None:
    """Hardware FLOPs utilisation: the same, with each pipe as a share of its own peak."""
    clock = _clock_ratio(sm_clock_hertz, sm_clock_max_hertz)
    busy = _floating_point(tensor_active_ratio)
    return None if clock is None or busy is None else min(1.0, sum(busy.values())) * clock


def _floating_point(tensor_active_ratio: Mapping[str, float]) -> dict[str, float] | None:
    """By pipe. Activity that is not split by pipe counts as half precision, which training uses."""
    if not all(0 <= ratio <= 1 for ratio in tensor_active_ratio.values()):
        return None
    half = tensor_active_ratio.get(HALF)
    if half is None and ANY in tensor_active_ratio:
        others = sum(tensor_active_ratio.get(pipe, 0.0) for pipe in (INTEGER, DOUBLE))
        half = max(0.0, tensor_active_ratio[ANY] - others)
    found = {HALF: half, DOUBLE: tensor_active_ratio.get(DOUBLE)}
    known = {pipe: ratio for pipe, ratio in found.items() if ratio is not None}
    return known or None


def _clock_ratio(sm_clock_hertz: float | None, sm_clock_max_hertz: float | None) -> float | None:
    if sm_clock_hertz is None or sm_clock_max_hertz is None:
        return None
    if not (0 <= sm_clock_hertz < math.inf and 0 < sm_clock_max_hertz < math.inf):
        return None
    # Boost may exceed the driver's maximum; a share of the peak may not exceed 1.
    return min(sm_clock_hertz / sm_clock_max_hertz, 1.0)
