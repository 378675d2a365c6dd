# mypy: disable-error-code="import-not-found"
# A script as a user writes it: started once per rank, with its own folder on the path.
"""Trains the demo's language model as a pipeline of two stages, each of them data-parallel, until it is stopped.

Ranks are laid out stage by stage: with four, 0 and 1 hold the first stage, 2 and 3 the last.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from dataset import TokenDataset
from fault_switch import FaultSwitch
from model import FirstStage, LastStage
from model_size import MICRO_BATCHES, PIPELINE_SIZE, PIPELINE_STAGES, ModelSize
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from train import LEARNING_RATE, endless_batches


def run_first_stage(stage: nn.Module, micro_batches: list[torch.Tensor], peer: int) -> None:
    """All micro-batches forward, then all of them backward: plain sends cannot block each other in this order."""
    outputs = []
    for tokens in micro_batches:
        features = stage(tokens)
        dist.send(features.detach(), peer)
        outputs.append(features)
    for features in outputs:
        gradient = torch.empty_like(features)
        dist.recv(gradient, peer)
        features.backward(gradient)


def run_last_stage(stage: nn.Module, micro_batches: list[torch.Tensor], size: ModelSize, peer: int) -> None:
    pending = []
    for targets in micro_batches:
        features = torch.empty(*targets.shape, size.width)
        dist.recv(features, peer)
        features.requires_grad_()
        loss = nn.functional.cross_entropy(stage(features).flatten(0, 1), targets.flatten())
        pending.append((features, loss / len(micro_batches)))
    for features, loss in pending:
        loss.backward()
        dist.send(features.grad, peer)


def average_gradients(stage: nn.Module, replicas: dist.ProcessGroup) -> None:
    gradients = [parameter.grad for parameter in stage.parameters()]
    flat = nn.utils.parameters_to_vector(gradients)
    dist.all_reduce(flat, group=replicas)
    nn.utils.vector_to_parameters(flat.div_(replicas.size()), gradients)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(hours=1))
    rank, per_stage = dist.get_rank(), dist.get_world_size() // PIPELINE_STAGES
    stage_number, replica = divmod(rank, per_stage)
    # Every rank has to take part in making every group.
    groups = [dist.new_group(range(number * per_stage, (number + 1) * per_stage)) for number in range(PIPELINE_STAGES)]

    size = PIPELINE_SIZE
    faults = FaultSwitch.from_environment(rank)
    is_first = stage_number == 0
    stage = FirstStage(size) if is_first else LastStage(size, faults)
    optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE, momentum=0.9)
    # The mates of a pipeline read the same samples: one needs the tokens, the other the targets.
    dataset = TokenDataset(size, faults)
    sampler = DistributedSampler(dataset, num_replicas=per_stage, rank=replica)
    batch = size.batch * MICRO_BATCHES
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler, num_workers=0, drop_last=True)

    for tokens, targets in endless_batches(loader, sampler):
        optimizer.zero_grad()
        if is_first:
            run_first_stage(stage, list(tokens.chunk(MICRO_BATCHES)), peer=rank + per_stage)
        else:
            run_last_stage(stage, list(targets.chunk(MICRO_BATCHES)), size, peer=rank - per_stage)
        average_gradients(stage, groups[stage_number])
        optimizer.step()
        faults.next_step()


if __name__ == "__main__":
    main()
