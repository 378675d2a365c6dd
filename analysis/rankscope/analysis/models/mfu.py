"""Model FLOPs against peak: how much of the devices a training run uses (MFU), and with recomputation (HFU)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from rankscope.analysis.models.device_peaks import peak_flops_per_second

__all__ = [
    "Recompute",
    "TokenFlops",
    "Utilisation",
    "declared_token_flops",
    "palm_flops_per_token",
    "palm_token_flops",
    "peak_flops_per_second",
    "utilisation",
]

# A backward pass multiplies twice where the forward pass multiplied once.
FORWARDS_PER_STEP = 3


class Recompute(Enum):
    NONE = "none"
    SELECTIVE = "selective"  # the attention core: scores, softmax, weighted sum
    FULL = "full"  # every layer once more


@dataclass(frozen=True)
class TokenFlops:
    """Of one token, forward and backward. `head` is the output projection where it is told apart, which checkpointing
    of layers does not repeat; `attention` is None where the FLOPs were declared as one number."""

    weights: float
    attention: float | None
    head: float = 0.0

    @property
    def model(self) -> float:
        return self.weights + (self.attention or 0.0) + self.head

    def hardware(self, recompute: Recompute) -> float | None:
        """With what is computed twice; None where that part is not known."""
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


def palm_flops_per_token(parameters: float, layers: float, width: float, sequence: float) -> float:
    """Forward and backward of one token: 6N + 12·L·H·Q·T, where heads × head size is the width."""
    return 6 * parameters + 12 * layers * width * sequence


def palm_token_flops(
    parameters: float, layers: float, width: float, sequence: float, *, causal: bool = False
) -> TokenFlops:
    """The same in its parts. `causal` counts only the half of the attention that a causal mask leaves."""
    return TokenFlops(6 * parameters, 12 * layers * width * sequence * (0.5 if causal else 1.0))


def declared_token_flops(flops_per_token: float) -> TokenFlops:
    return TokenFlops(flops_per_token, None)


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


# Achieved FLOP/s of a GPU that nobody instrumented, from how busy its tensor pipes were. An estimate, never MFU: it
# counts whatever the pipes did, recomputation included, and takes each pipe's work for the number format of its peak.

ANY, HALF, INTEGER, DOUBLE = "any", "hmma", "imma", "dfma"
# Number format whose dense peak a pipe at work all the time would reach; None: bf16, or fp16 where there is no bf16.
# The integer pipe is not here: it does no floating-point operations.
_FORMATS: Mapping[str, str | None] = {HALF: None, DOUBLE: "fp64"}


def pipe_peaks(device_name: str) -> dict[str, float | None]:
    """FLOP/s of each pipe that computes in floating point, by what the driver calls the device."""
    return {pipe: peak_flops_per_second(device_name, kind) for pipe, kind in _FORMATS.items()}


def estimated_flops_per_second(
    tensor_active_ratio: Mapping[str, float],
    pipe_peaks: Mapping[str, float | None],
    sm_clock_hertz: float | None,
    sm_clock_max_hertz: float | None,
) -> float | None:
    """Over the pipes: utilisation × peak at the maximum clock × clock ÷ maximum clock. None unless the clocks, some
    utilisation and the peak of every pipe at work are known and sensible.

    Without the clock the figure is up to half again too high: under a power cap the pipes are as busy, only slower."""
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
    """Hardware FLOPs utilisation: the same, each pipe as a share of its own peak."""
    clock = _clock_ratio(sm_clock_hertz, sm_clock_max_hertz)
    busy = _floating_point(tensor_active_ratio)
    return None if clock is None or busy is None else min(1.0, sum(busy.values())) * clock


def _floating_point(tensor_active_ratio: Mapping[str, float]) -> dict[str, float] | None:
    """By pipe. What is not told apart counts as half precision: that is what training does."""
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
    # Boost may pass what the driver calls the maximum; a share of the peak does not.
    return min(sm_clock_hertz / sm_clock_max_hertz, 1.0)
