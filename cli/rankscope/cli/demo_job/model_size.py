"""How large the demo's model is, without torch: the launcher declares FLOPs from it, the ranks build it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSize:
    vocabulary: int = 256
    width: int = 128
    hidden: int = 256
    blocks: int = 4
    batch: int = 8
    sequence: int = 4
    # Most of a real step is spent on a device while the host waits. These waits, for each block, stand for it on every
    # rank alike, so that several ranks share a few cores without their contention drowning everything else.
    device_forward_seconds: float = 0.003
    device_backward_seconds: float = 0.005

    @property
    def block_parameters(self) -> int:
        return 2 * self.width * self.hidden + self.hidden + self.width

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.width

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.width + self.vocabulary

    @property
    def parameters(self) -> int:
        return self.embedding_parameters + self.blocks * self.block_parameters + self.head_parameters

    @property
    def matmul_flops_per_batch(self) -> float:
        """Forward and backward of one batch: 6 for each weight that is multiplied, for each token."""
        weights = self.blocks * 2 * self.width * self.hidden + self.vocabulary * self.width
        return 6.0 * weights * self.batch * self.sequence


DATA_PARALLEL_SIZE = ModelSize()
PIPELINE_STAGES = 2
MICRO_BATCHES = 4
PIPELINE_SIZE = ModelSize(device_forward_seconds=0.0015, device_backward_seconds=0.0025)


def flops_per_step(ranks: int, *, pipeline: bool) -> float:
    """Of the whole job. A pipeline's stages share the model, so only its data-parallel replicas multiply the work."""
    if pipeline:
        return PIPELINE_SIZE.matmul_flops_per_batch * MICRO_BATCHES * (ranks // PIPELINE_STAGES)
    return DATA_PARALLEL_SIZE.matmul_flops_per_batch * ranks
