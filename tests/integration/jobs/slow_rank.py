"""A DDP job of torchrun's: rank 1 sleeps in a function of its own. Ends when the file that it is given exists."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def slow_augmentation(batch: torch.Tensor) -> torch.Tensor:
    time.sleep(0.06)  # here
    return batch


def main(end: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    is_over = torch.zeros(1)
    while not is_over.item():
        batch = torch.randn(32, 64)
        time.sleep(0.01)
        if dist.get_rank() == 1:
            batch = slow_augmentation(batch)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        is_over[0] = float(end.exists())
        dist.all_reduce(is_over)
    if dist.get_rank() == 0:
        print("trained", flush=True)
    # gloo's thread keeps it for a moment. If the interpreter ends meanwhile, torch aborts the process.
    while is_over._use_count() > 1:
        time.sleep(0.001)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
