"""A plain DDP job without a word about profiling. Rank SLOW_RANK sleeps in every step; with a file OWN_PROFILER, rank 0
runs a torch.profiler of its own while that file exists. Ends with exit code 0 when the file STOP appears."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SLOW_RANK = int(os.environ.get("SLOW_RANK", "-1"))
FOLDER = Path(os.environ["JOB_FOLDER"])


def slow_part(rank: int) -> None:
    if rank == SLOW_RANK:
        time.sleep(0.06)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ending = torch.zeros(1)
    profiler = None
    steps = 0
    while not ending.item():
        slow_part(rank)
        optimizer.zero_grad()
        model(torch.randn(32, 128)).sum().backward()
        optimizer.step()
        ending.fill_(float((FOLDER / "STOP").exists()))
        dist.all_reduce(ending)
        steps += 1
        if steps == 20 and rank == 0:
            (FOLDER / "READY").touch()
        if rank == 0 and steps % 5 == 0:
            wanted = (FOLDER / "OWN_PROFILER").exists()
            if wanted and profiler is None:
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                profiler.start()
                (FOLDER / "PROFILING").touch()
            elif not wanted and profiler is not None:
                profiler.stop()
                profiler = None
    dist.destroy_process_group()


main()
