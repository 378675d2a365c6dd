"""Hugging Face's Accelerate, which wraps the model in DistributedDataParallel."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from parts import BATCH, Model, TokenDataset, endless, loss_of, progress, set_up_torch
from torch.utils.data import DataLoader

set_up_torch()
accelerator = Accelerator(cpu=True)
model = Model()
model, optimizer, data = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters()), DataLoader(TokenDataset(), batch_size=BATCH, drop_last=True)
)
for tokens, targets in endless(data):
    optimizer.zero_grad()
    accelerator.backward(loss_of(model(tokens), targets))
    optimizer.step()
    progress.next_step()
