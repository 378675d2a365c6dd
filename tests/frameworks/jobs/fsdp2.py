"""FSDP2: fully_shard on every block and on the whole."""

from __future__ import annotations

import torch
from parts import Model, loader, set_up, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

set_up()
mesh = init_device_mesh("cpu", (4,))
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
train(model, torch.optim.AdamW(model.parameters()), loader())
