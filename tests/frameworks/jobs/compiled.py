"""torch.compile of DDP, FSDP2, tensor parallel or the hand-written loop (first argument), by the backend of the second.

What sleeps is an operator of its own, which the compiler calls and does not look into: no graph break."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from parts import (
    BLOCKS,
    DEVICE_BACKWARD_SECONDS,
    DEVICE_FORWARD_SECONDS,
    HIDDEN,
    VOCABULARY,
    WIDTH,
    endless,
    loader,
    loss_of,
    progress,
    set_up,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@torch.library.custom_op("frameworks::device_time", mutates_args=())
def device_time(features: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return features.clone()


@torch.library.custom_op("frameworks::normalize_features", mutates_args=())
def normalize_features(features: torch.Tensor) -> torch.Tensor:
    time.sleep(progress.delay("host"))  # FAULT host
    return features.clone()


@torch.library.custom_op("frameworks::scale_gradient", mutates_args=())
def scale_gradient(gradient: torch.Tensor) -> torch.Tensor:
    time.sleep(progress.delay("backward"))  # FAULT backward
    return gradient.clone()


for operator in (device_time, normalize_features, scale_gradient):
    operator.register_fake(lambda features, *_: torch.empty_like(features))


def device_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    return torch.ops.frameworks.device_time(gradient, DEVICE_BACKWARD_SECONDS), None


def normalize_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    return torch.ops.frameworks.scale_gradient(gradient)


device_time.register_autograd(device_backward)
normalize_features.register_autograd(normalize_backward)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = torch.ops.frameworks.device_time(features, DEVICE_FORWARD_SECONDS)
        return features + self.down(torch.relu(self.up(features)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        features = torch.ops.frameworks.normalize_features(self.embedding(tokens))
        for block in self.blocks:
            features = block(features)
        return self.head(features)


framework, backend = sys.argv[1:]
set_up()
model: nn.Module = Model()
if framework == "ddp":
    model = DistributedDataParallel(model)
elif framework == "fsdp2":
    mesh = init_device_mesh("cpu", (4,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif framework == "tensor_parallel":
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
compiled = torch.compile(model, backend=backend)
for tokens, targets in endless(loader(same_on_all_ranks=framework == "tensor_parallel")):
    optimizer.zero_grad()
    loss_of(compiled(tokens), targets).backward()
    if framework == "handwritten":
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat)
        vector_to_parameters(flat.div_(dist.get_world_size()), gradients)
    optimizer.step()
    progress.next_step()
