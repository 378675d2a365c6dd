"""A mixture of experts, one expert per rank: tokens go to their experts and back by all-to-all with uneven splits.

Argument: `balanced`, where every expert gets as many tokens, or `skewed`, where that of rank 2 gets half of them."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from parts import WIDTH, DeviceTime, Model, endless, loader, loss_of, progress, set_up
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import rankscope.probe

TOKENS = 96  # of a rank, in a step
HOT_RANK = 2
# An expert with as many tokens as a rank sends takes as long as so many blocks of the model.
EXPERT_BLOCKS = 3.0


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        ctx.received, ctx.sent = received, sent
        return exchange(rows, received, sent)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return exchange(gradient, ctx.sent, ctx.received), None, None


def exchange(rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), received, sent)
    return result


def route(is_skewed: bool) -> list[int]:
    """How many tokens each rank sends to each expert."""
    world_size = dist.get_world_size()
    if not is_skewed:
        return [TOKENS // world_size] * world_size
    others = TOKENS // 2 // (world_size - 1)
    return [TOKENS // 2 if rank == HOT_RANK else others for rank in range(world_size)]


set_up()
model = Model(blocks=1)
expert = nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.AdamW([*model.parameters(), *expert.parameters()])
sent = route("skewed" in sys.argv[1:])
received = [sent[dist.get_rank()]] * dist.get_world_size()
tokens_sent = torch.randn(TOKENS, WIDTH)[: sum(sent)]
for tokens, targets in endless(loader()):
    optimizer.zero_grad()
    loss = loss_of(model(tokens), targets)
    routed = AllToAll.apply(tokens_sent.requires_grad_(), received, sent)
    rankscope.probe.count_tokens(len(routed))
    routed = expert(DeviceTime.apply(routed, EXPERT_BLOCKS * len(routed) / TOKENS))
    loss = loss + AllToAll.apply(routed, sent, received).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat.div_(dist.get_world_size()), gradients)
    optimizer.step()
    progress.next_step()
