"""Ranks of a DDP job over gloo that write when each step ended and how long it took, with the probe or without it.

    python3 timed_ddp.py FOLDER heavy|light

`heavy` ranks compute in every phase of a step and use a core each. `light` ranks sleep for nearly all of a step of
0.1 s, so that many fit on one machine. They train until FOLDER/control asks them to stop."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from alternation import ProbeSwitch
from parts import set_up
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

STOP, PLAIN, PROBED = range(3)
FIRST_STEPS = 20
MAX_STEPS = 500_000
SHAPES = {"heavy": (512, 4, 96, 0.0), "light": (64, 2, 8, 0.09)}  # width, layers, batch, seconds slept a step


def endless(loader: DataLoader) -> Iterator[torch.Tensor]:
    while True:
        for (batch,) in loader:
            yield batch


def main() -> None:
    folder, (width, depth, size, sleep_seconds) = Path(sys.argv[1]), SHAPES[sys.argv[2]]
    set_up(cpu=True)
    rank = dist.get_rank()
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = endless(DataLoader(TensorDataset(torch.randn(64 * size, width)), batch_size=size))

    def step() -> None:
        batch = next(batches)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if sleep_seconds:
            time.sleep(sleep_seconds)
        loss.backward()
        optimizer.step()

    times = np.lib.format.open_memmap(folder / f"times-{rank}", mode="w+", dtype=np.int64, shape=(MAX_STEPS, 2))
    with (folder / "control").open("r+b") as file:
        control = mmap.mmap(file.fileno(), 1)
    parent = os.getppid()
    for _ in range(FIRST_STEPS):
        step()
    probe = ProbeSwitch()
    (folder / f"started-{rank}").touch()
    stop = torch.zeros(1)
    before_ns = time.monotonic_ns()
    for number in range(MAX_STEPS):
        step()
        now_ns = time.monotonic_ns()
        times[number] = now_ns, now_ns - before_ns
        before_ns = now_ns
        state = control[0]
        # The ranks stop after the same step: one that stops alone leaves the others in a collective.
        if number % 16 == 15:
            stop.fill_(state == STOP or os.getppid() != parent)
            dist.all_reduce(stop)
            if stop.item():
                break
            before_ns = time.monotonic_ns()
        probe.set(state != PLAIN)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
