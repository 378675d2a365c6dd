"""DistributedDataParallel with gradients accumulated over two micro-batches; only the second one communicates."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from parts import BATCH, Model, endless, loader, loss_of, progress, set_up
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 2

set_up()
model = DistributedDataParallel(Model(MICRO_BATCHES))
optimizer = torch.optim.AdamW(model.parameters())
batches = endless(loader(samples_a_step=BATCH * MICRO_BATCHES))
while True:
    optimizer.zero_grad()
    for number in range(MICRO_BATCHES):
        tokens, targets = next(batches)
        with nullcontext() if number == MICRO_BATCHES - 1 else model.no_sync():
            loss_of(model(tokens), targets).backward()
    optimizer.step()
    progress.next_step()
