"""DistributedDataParallel."""

from __future__ import annotations

import torch
from parts import Model, loader, set_up, train
from torch.nn.parallel import DistributedDataParallel

set_up()
model = DistributedDataParallel(Model())
train(model, torch.optim.AdamW(model.parameters()), loader())
