"""Local SGD: every rank trains by itself, and after every so many steps all take the mean of their weights. With
`diloco`, an outer optimizer takes what the weights have moved by for a gradient."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from parts import Model, endless, loader, loss_of, progress, set_up
from torch.nn.utils import parameters_to_vector, vector_to_parameters

LOCAL_STEPS = int(sys.argv[1])
IS_DILOCO = "diloco" in sys.argv[2:]

set_up()
model = Model()
weights = list(model.parameters())
optimizer = torch.optim.AdamW(weights)
shared = torch.nn.Parameter(parameters_to_vector(weights).detach())
outer = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=True)
for number, (tokens, targets) in enumerate(endless(loader()), start=1):
    optimizer.zero_grad()
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    if number % LOCAL_STEPS == 0:
        mean = parameters_to_vector(weights).detach()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if IS_DILOCO:
            shared.grad = shared.detach() - mean
            outer.step()
            mean = shared.detach()
        vector_to_parameters(mean, weights)
    progress.next_step()
