"""Tensor parallel with DTensor: the blocks' matrices are split over all ranks, which read the same samples."""

from __future__ import annotations

import torch
from parts import Model, loader, set_up, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

set_up()
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
model = Model()
for block in model.blocks:
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
train(model, torch.optim.AdamW(model.parameters(), foreach=False), loader(same_on_all_ranks=True))
