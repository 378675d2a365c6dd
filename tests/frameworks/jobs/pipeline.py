"""A pipeline of torch.distributed.pipelining: four stages, or two stages of two data-parallel ranks each. The number
of stages is the first argument; ranks are laid out stage by stage."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from parts import BATCH, SEQUENCE, WIDTH, Model, TokenDataset, endless, loss_of, progress, set_up
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler

STAGES = int(sys.argv[1])
MICRO_BATCHES = 4

set_up()
mesh = init_device_mesh("cpu", (STAGES, 4 // STAGES), mesh_dim_names=("pp", "dp"))
pipeline, replicas = mesh["pp"].get_group(), mesh["dp"].get_group()
number = pipeline.rank()
is_first, is_last = number == 0, number == STAGES - 1
# Heavy, so that embedding and head, which only some stages have, matter little.
module = Model(MICRO_BATCHES, blocks=2, heavy=2.5, is_first=is_first, is_last=is_last)
tokens_shape = torch.zeros(BATCH // MICRO_BATCHES, SEQUENCE, dtype=torch.long)
features_shape = torch.zeros(BATCH // MICRO_BATCHES, SEQUENCE, WIDTH)
stage = PipelineStage(
    module,
    number,
    STAGES,
    torch.device("cpu"),
    input_args=(tokens_shape if is_first else features_shape,),
    group=pipeline,
)
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
optimizer = torch.optim.AdamW(module.parameters())
# The mates of a pipeline read the same samples: the first needs the tokens, the last the targets.
dataset = TokenDataset()
sampler = DistributedSampler(dataset, num_replicas=replicas.size(), rank=replicas.rank())
for tokens, targets in endless(DataLoader(dataset, batch_size=BATCH, sampler=sampler, drop_last=True)):
    optimizer.zero_grad()
    if is_first:
        schedule.step(tokens)
    elif is_last:
        schedule.step(target=targets)
    else:
        schedule.step()
    if replicas.size() > 1:
        gradients = [parameter.grad for parameter in module.parameters()]
        flat = parameters_to_vector(gradients)
        dist.all_reduce(flat, group=replicas)
        vector_to_parameters(flat.div_(replicas.size()), gradients)
    optimizer.step()
    progress.next_step()
