"""DDP with a GradScaler, as mixed precision has it. Every tenth step overflows, and the scaler leaves the optimizer's
step out. The model stays in float32: many processors emulate bfloat16, thirty times slower."""

from __future__ import annotations

import torch
from parts import Model, endless, loader, loss_of, progress, set_up
from torch.nn.parallel import DistributedDataParallel

OVERFLOW_EVERY = 10

set_up()
model = DistributedDataParallel(Model())
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for number, (tokens, targets) in enumerate(endless(loader())):
    optimizer.zero_grad()
    loss = loss_of(model(tokens), targets)
    if number % OVERFLOW_EVERY == OVERFLOW_EVERY - 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    progress.next_step()
