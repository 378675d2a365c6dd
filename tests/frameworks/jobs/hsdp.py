"""HSDP: FSDP2 on a mesh of two replicas of two shards."""

from __future__ import annotations

import torch
from parts import Model, loader, set_up, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

set_up()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
train(model, torch.optim.AdamW(model.parameters()), loader())
