"""Ranks that are cheap to have many of: a tenth of a second a step, nearly all of it slept."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.jobs.stepping import train

WIDTH = 64
SLEEP_SECONDS = 0.09


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(8, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        time.sleep(SLEEP_SECONDS)
        loss.backward()
        optimizer.step()

    train(model, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
