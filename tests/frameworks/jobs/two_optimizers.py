"""Two models with an optimizer each, trained against each other in every step, as a GAN is."""

from __future__ import annotations

import torch
from parts import Model, endless, loader, loss_of, progress, set_up
from torch import nn
from torch.nn.parallel import DistributedDataParallel

set_up()
generator = DistributedDataParallel(Model())
critic = DistributedDataParallel(nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 128)))
generator_optimizer = torch.optim.AdamW(generator.parameters())
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
for tokens, targets in endless(loader()):
    critic_optimizer.zero_grad()
    loss_of(critic(tokens), targets).backward()
    critic_optimizer.step()
    generator_optimizer.zero_grad()
    loss_of(generator(tokens), targets).backward()
    generator_optimizer.step()
    progress.next_step()
