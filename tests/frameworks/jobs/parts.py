"""What the jobs of all frameworks share: a small model, a dataset, and the fault of the rank that is slow.

The launcher says by environment which fault this job can have, and by a board (a shared file) in which step it begins.
Every rank runs the same code; only the slow rank sleeps, and only from that step on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

# Not first: names of this folder's modules win.
sys.path.append(os.environ["RANKSCOPE_FRAMEWORKS_BOARD_FOLDER"])
from board import Board

VOCABULARY, WIDTH, HIDDEN, BLOCKS, SEQUENCE, BATCH = 128, 64, 128, 3, 8, 4
SAMPLES = 65536
# Most of a real step is spent on a device while the host waits. These waits stand for it, on all ranks alike, so that
# four ranks share two cores without their contention drowning everything else.
DEVICE_FORWARD_SECONDS = 0.004
DEVICE_BACKWARD_SECONDS = 0.006


class Progress:
    """Tells the launcher of every step, and learns from it whether this rank's fault is on."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        place, slow_rank, seconds = os.environ["RANKSCOPE_FRAMEWORKS_FAULT"].split(",")
        self._fault = place if self.rank == int(slow_rank) else ""
        self._delay_seconds = float(seconds)
        self._board = Board(Path(os.environ["RANKSCOPE_FRAMEWORKS_BOARD"]))
        self._step = 0
        self._active = ""

    def delay(self, place: str, times_a_step: int = 1) -> float:
        """Seconds to sleep at a place that is passed so many times in a step."""
        return self._delay_seconds / times_a_step if self._active == place else 0.0

    def next_step(self) -> None:
        """Call it between two steps."""
        self._board.record_step(self.rank, time.time())  # the launcher wants to know when, not how long
        self._step += 1
        begins = self._board.fault_step
        self._active = self._fault if begins is not None and self._step >= begins else ""


progress = Progress()


class DeviceTime(torch.autograd.Function):
    """The identity, after as long as a device takes for one block."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        time.sleep(DEVICE_FORWARD_SECONDS * share)
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(DEVICE_BACKWARD_SECONDS * ctx.share)
        return gradient, None


class ScaleGradient(torch.autograd.Function):
    """The identity, with a gradient that takes longer where the fault is in backward."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, times_a_step: int) -> torch.Tensor:
        ctx.times_a_step = times_a_step
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(progress.delay("backward", ctx.times_a_step))  # FAULT backward
        return gradient, None


def normalize_features(features: torch.Tensor, times_a_step: int) -> torch.Tensor:
    time.sleep(progress.delay("host", times_a_step))  # FAULT host
    return nn.functional.layer_norm(features, features.shape[-1:])


class Block(nn.Module):
    """`share` is how much of a block's device time one call takes."""

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.share = share
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = DeviceTime.apply(features, self.share)
        return features + self.down(torch.relu(self.up(features)))


class Model(nn.Module):
    """Tokens in, logits of the next token out. A part of it (a pipeline's stage) may lack the embedding or the head.
    `times_a_step` is how often a step calls it: micro-batches share the time of one step. Blocks may be `heavy`."""

    def __init__(
        self,
        times_a_step: int = 1,
        *,
        blocks: int = BLOCKS,
        heavy: float = 1.0,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__()
        self.times_a_step = times_a_step
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if is_first else None
        self.blocks = nn.ModuleList(Block(heavy / times_a_step) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY) if is_last else None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            features = self.embedding(features)
        features = normalize_features(features, self.times_a_step)
        for block in self.blocks:
            features = block(features)
        features = ScaleGradient.apply(features, self.times_a_step)
        return features if self.head is None else self.head(features)


class TokenDataset(Dataset):
    """Made up on the spot: short walks over the vocabulary. Each item is (tokens, next tokens)."""

    def __init__(self, samples_a_step: int = BATCH) -> None:
        self.samples_a_step = samples_a_step

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(progress.delay("input", self.samples_a_step))  # FAULT input
        walk = (index + (1 + index % 7) * torch.arange(SEQUENCE + 1)) % VOCABULARY
        return walk[:-1], walk[1:]


def loader(samples_a_step: int = BATCH, batch: int = BATCH, *, same_on_all_ranks: bool = False) -> DataLoader:
    """Without same_on_all_ranks every rank gets its own samples; `batch` is what one iteration gives."""
    dataset = TokenDataset(samples_a_step)
    replicas, replica = (1, 0) if same_on_all_ranks else (dist.get_world_size(), dist.get_rank())
    sampler = DistributedSampler(dataset, num_replicas=replicas, rank=replica)
    return DataLoader(dataset, batch_size=batch, sampler=sampler, drop_last=True)


def endless(data: DataLoader) -> Iterator[Any]:
    while True:
        yield from data


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def set_up() -> None:
    """One thread a rank, the same weights everywhere. Frameworks that make the process group themselves call
    `set_up_torch` instead."""
    set_up_torch()
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))


def set_up_torch() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: DataLoader) -> None:
    """The plainest loop there is; does not end by itself."""
    for tokens, targets in endless(data):
        optimizer.zero_grad()
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        progress.next_step()
