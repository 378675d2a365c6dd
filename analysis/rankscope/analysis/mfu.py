"""Model FLOPs against peak: how much of the devices a training run uses (MFU), and with recomputation (HFU)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rankscope.analysis.mfu_peaks import peak_flops_per_second

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
