# mypy: disable-error-code="import-not-found,misc"
# Runs inside a rank, where the scripts' own folder is on the path and the package is not; torch is not type-checked.
"""Token sequences made up on the spot: a short walk over the vocabulary that a model can learn."""

from __future__ import annotations

import time

import torch
from fault_switch import FaultSwitch
from faults import SLOW_INPUT
from model_size import ModelSize
from torch.utils.data import Dataset

SAMPLES = 65536
SLOW_READ_SECONDS = 0.006


class TokenDataset(Dataset):
    """Each item is (tokens, next tokens)."""

    def __init__(self, size: ModelSize, faults: FaultSwitch) -> None:
        self.size = size
        self.faults = faults

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.faults.active == SLOW_INPUT:
            time.sleep(SLOW_READ_SECONDS)  # a shard on a disk that is failing
        stride = 1 + index % 7
        walk = (index + stride * torch.arange(self.size.sequence + 1)) % self.size.vocabulary
        return walk[:-1], walk[1:]
