"""Two ranks that fill two cores: real compute in every phase of a step, nothing that sleeps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.jobs.stepping import train

WIDTH = 512
LAYERS = 4
BATCH = 96


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(torch.randn(64 * BATCH, WIDTH)), batch_size=BATCH)
    batches = iter(loader)

    def step() -> None:
        nonlocal batches
        try:
            (batch,) = next(batches)
        except StopIteration:
            batches = iter(loader)
            (batch,) = next(batches)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    train(model, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
