"""The transformers that the GPU benchmarks train, and their FLOPs. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    sequence: int
    batch: int  # of one rank

    @property
    def tokens(self) -> int:
        return self.sequence * self.batch

    @property
    def flops_per_step(self) -> float:
        """Of one rank, forward and backward: matrix products, and attention that looks at everything."""
        return (72 * self.layers * self.width**2 + 12 * self.layers * self.width * self.sequence) * self.tokens

    @property
    def executed_flops_per_step(self) -> float:
        """The same with the scores that flash attention computes once more in its backward pass."""
        return self.flops_per_step + 2 * self.layers * self.width * self.sequence * self.tokens


SHAPES = {
    "large": Shape(6, 2048, 2048, 4),  # about 35 ms a step on an H200, bound by its arithmetic
    "small": Shape(4, 256, 128, 8),  # about 6 ms, bound by the host's launches
    "medium": Shape(12, 256, 128, 8),
    "cpu-large": Shape(2, 128, 64, 4),
    "cpu-small": Shape(1, 64, 32, 2),
}
