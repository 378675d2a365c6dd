"""A DDP job in which every rank profiles itself twice, healthy and with a slow rank. Arguments: FOLDER, the slow rank,
its sleep in seconds. The traces are in FOLDER/healthy and FOLDER/slow."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from parts import set_up
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP, PROFILED = 2, 6


def main() -> None:
    folder, slow, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    set_up(cpu=True)
    rank = dist.get_rank()
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for name, sleep_seconds in (("healthy", 0.0), ("slow", seconds if rank == slow else 0.0)):
        profiler = profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=WARM_UP, active=PROFILED),
            on_trace_ready=lambda done, name=name: done.export_chrome_trace(f"{folder}/{name}/rank{rank}.json"),
        )
        with profiler:
            for _ in range(WARM_UP + PROFILED):
                time.sleep(sleep_seconds)
                optimizer.zero_grad()
                model(torch.randn(32, 64)).sum().backward()
                optimizer.step()
                profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
