# mypy: disable-error-code="import-not-found,misc"
# Runs inside a rank, where the scripts' own folder is on the path and the package is not; torch is not type-checked.
"""A small language model of residual blocks, on a processor that has an accelerator's manners."""

from __future__ import annotations

import time
from typing import Any

import torch
from fault_switch import FaultSwitch
from faults import HANG, SLOW_RANK, STAGE_IMBALANCE
from model_size import ModelSize
from torch import nn

WIDE_VOCABULARY = 8192


class DeviceTime(torch.autograd.Function):
    """The identity, after as long as the device takes for one block (see ModelSize)."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, size: ModelSize) -> torch.Tensor:
        ctx.size = size
        time.sleep(size.device_forward_seconds)
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.size.device_backward_seconds)
        return gradient, None


class Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.up = nn.Linear(size.width, size.hidden)
        self.down = nn.Linear(size.hidden, size.width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features + self.down(torch.relu(self.up(DeviceTime.apply(features, self.size))))


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


class FirstStage(nn.Module):
    """Tokens in, features out."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks // 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        features = self.embedding(tokens)
        for block in self.blocks:
            features = block(features)
        return features


class LastStage(nn.Module):
    """Features in, logits of the next token out."""

    def __init__(self, size: ModelSize, faults: FaultSwitch) -> None:
        super().__init__()
        self.faults = faults
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks - size.blocks // 2))
        self.head = nn.Linear(size.width, size.vocabulary)
        # Frozen, as a tied embedding is: it costs compute and no communication.
        self.register_buffer("wide_vocabulary", torch.randn(size.width, WIDE_VOCABULARY) / size.width)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            features = block(features)
        return self.head(project_on_vocabulary(features, self.wide_vocabulary, self.faults))


def project_on_vocabulary(features: torch.Tensor, vocabulary: torch.Tensor, faults: FaultSwitch) -> torch.Tensor:
    """Why last stages are slow in practice: a loss over many words is as much work as several layers."""
    if faults.active == STAGE_IMBALANCE:
        logits = features @ vocabulary
        features = features + torch.softmax(logits, dim=-1) @ vocabulary.T
    return features


def normalize_features(features: torch.Tensor, faults: FaultSwitch) -> torch.Tensor:
    if faults.active == SLOW_RANK:
        time.sleep(faults.delay_seconds)  # what is slow here and nowhere else
    return nn.functional.layer_norm(features, features.shape[-1:])


def wait_for_shard(faults: FaultSwitch) -> None:
    while faults.active == HANG:
        time.sleep(0.1)  # for a shard that nobody sends
        faults.look()
