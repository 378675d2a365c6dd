# mypy: disable-error-code="import-not-found"
# A script as a user writes it: started once per rank, with its own folder on the path.
"""Trains the demo's language model with DistributedDataParallel over gloo, until it is stopped."""

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from dataset import TokenDataset
from fault_switch import FaultSwitch
from faults import SLOW_NETWORK
from model import LanguageModel
from model_size import DATA_PARALLEL_SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

LEARNING_RATE = 0.05
# Gradients are 1.3 MB: two buckets, so that the first all-reduce overlaps with the backward pass as large models' do.
BUCKET_MEGABYTES = 1.0
SLOW_LINK_SECONDS = 0.06


def all_reduce_gradients(faults: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does by itself, as a hook: the sum over all ranks, with a slow link's delay once that fault is on."""
    gradients = bucket.buffer().div_(dist.get_world_size())
    slow = faults.active == SLOW_NETWORK

    def finish(future: torch.futures.Future[Any]) -> torch.Tensor:
        if slow:
            time.sleep(SLOW_LINK_SECONDS)
        return future.value()[0]

    return dist.all_reduce(gradients, async_op=True).get_future().then(finish)


def endless_batches(loader: DataLoader, sampler: DistributedSampler) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(hours=1))

    size = DATA_PARALLEL_SIZE
    faults = FaultSwitch.from_environment(rank)
    model = DistributedDataParallel(LanguageModel(size, faults), bucket_cap_mb=BUCKET_MEGABYTES)
    model.register_comm_hook(faults, all_reduce_gradients)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    dataset = TokenDataset(size, faults)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=size.batch, sampler=sampler, num_workers=0, drop_last=True)

    for tokens, targets in endless_batches(loader, sampler):
        optimizer.zero_grad()
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        faults.next_step()


if __name__ == "__main__":
    main()
