# mypy: disable-error-code="import-not-found,misc"
# Runs inside a rank, where the scripts' own folder is on the path and the package is not; torch is not type-checked.
"""A small language model of residual blocks, on a processor that has an accelerator's manners."""

from __future__ import annotations

import time
from typing import Any

import torch
from faults import HANG, SLOW_RANK
from sizing import ModelSize
from switching import FaultSwitch
from torch import nn

# Most of a real step is spent on a device while the host waits. These waits stand for it, on every rank alike, so that
# several ranks share a few cores without their contention drowning everything else.
DEVICE_FORWARD_SECONDS = 0.002
DEVICE_BACKWARD_SECONDS = 0.004


class DeviceTime(torch.autograd.Function):
    """The identity, after as long as the device takes for one block."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor) -> torch.Tensor:
        time.sleep(DEVICE_FORWARD_SECONDS)
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(DEVICE_BACKWARD_SECONDS)
        return gradient


class Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, size.hidden)
        self.down = nn.Linear(size.hidden, size.width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.down(torch.relu(self.up(DeviceTime.apply(features))))


class LanguageModel(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, size: ModelSize, faults: FaultSwitch) -> None:
        super().__init__()
        self.faults = faults
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        wait_for_shard(self.faults)
        features = normalize_features(self.embedding(tokens), self.faults)
        for block in self.blocks:
            features = block(features)
        return self.head(features)


def normalize_features(features: torch.Tensor, faults: FaultSwitch) -> torch.Tensor:
    if faults.active == SLOW_RANK:
        time.sleep(faults.delay_seconds)  # what is slow here and nowhere else
    return nn.functional.layer_norm(features, features.shape[-1:])


def wait_for_shard(faults: FaultSwitch) -> None:
    while faults.active == HANG:
        time.sleep(0.1)  # for a shard that nobody will send
