"""A hand-written loop: all gradients in one flat buffer, one all_reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parts import Model, endless, loader, loss_of, progress, set_up
from torch.nn.utils import parameters_to_vector, vector_to_parameters

set_up()
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
for tokens, targets in endless(loader()):
    optimizer.zero_grad()
    loss_of(model(tokens), targets).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat.div_(dist.get_world_size()), gradients)
    optimizer.step()
    progress.next_step()
