"""Collectives of known size, timed as nccl-tests do: several in a row, after all ranks have met.

    python3 bandwidth_job.py --folder FOLDER [--megabytes 32] [--seconds 12]

Each function has its own part of the time. FOLDER/bandwidth-RANK.json has the seconds of an operation, by function."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from parts import set_up, write_fact

IN_A_ROW = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=32, help="of the whole array")
    parser.add_argument("--seconds", type=float, default=12.0, help="for each function")
    asked = parser.parse_args()
    set_up(cpu=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    whole = torch.ones(asked.megabytes << 18, device="cuda")
    part = torch.ones(len(whole) // world, device="cuda")
    functions = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
    weight.grad = torch.zeros(1, device="cuda")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    flag = torch.zeros(1, device="cuda")
    seconds: dict[str, float] = {}
    write_fact(asked.folder / f"info-{rank}.json", {})
    for name, call in functions.items():
        ends_at, told = time.monotonic() + asked.seconds, []
        while True:
            # All agree on the last step; and they meet.
            flag.fill_(float(time.monotonic() > ends_at))
            dist.broadcast(flag, 0)
            if flag.item():
                break
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(IN_A_ROW):
                call()
            end.record()
            optimizer.step()
            end.synchronize()
            told.append(begin.elapsed_time(end) / 1e3 / IN_A_ROW)
        seconds[name] = statistics.median(told)
    write_fact(asked.folder / f"bandwidth-{rank}.json", seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
