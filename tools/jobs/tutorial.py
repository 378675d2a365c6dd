"""Training scripts in the style of PyTorch's tutorials. It imports neither Rankscope nor other files of this folder.

    tutorial.py one|ddp|fsdp2|spawn FAULT SECONDS

`ddp` and `fsdp2` are started by torchrun; `spawn` starts two ranks itself. The fault concerns the last rank, and begins
after a third of the time, so that the verdict before it is known: healthy, slow, loader, raise, worker, kill, term,
segfault, memory, hang."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

KIND, FAULT, SECONDS = sys.argv[1], sys.argv[2], float(sys.argv[3])
WIDTH, CLASSES, BATCH = 256, 10, 16
SLOW_SECONDS = 0.04
WORLD_SIZE = 2
BALLAST_BYTES = 64 << 20


class Images(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, is_faulty: bool) -> None:
        self.is_faulty = is_faulty
        self.begin = time.monotonic()

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.is_faulty and FAULT == "loader":
            time.sleep(SLOW_SECONDS / BATCH)  # SLOW LINE of the loader
        if self.is_faulty and FAULT == "worker" and time.monotonic() - self.begin > SECONDS / 3:
            raise ValueError("cannot decode image")  # FAILING LINE of the worker
        return torch.randn(WIDTH), index % CLASSES


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(images))


def augment(images: torch.Tensor) -> torch.Tensor:
    time.sleep(SLOW_SECONDS)  # SLOW LINE
    return images


def fail() -> None:
    if FAULT == "raise":
        raise ValueError("loss is not finite")  # FAILING LINE
    if FAULT == "hang":
        time.sleep(1800)  # HANGING LINE
    if FAULT == "segfault":
        ctypes.string_at(0)
    if FAULT in ("kill", "term"):
        os.kill(os.getpid(), signal.SIGKILL if FAULT == "kill" else signal.SIGTERM)
    ballast = []
    while FAULT == "memory":
        ballast.append(bytearray(BALLAST_BYTES))


def batches(is_faulty: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    data = Images(is_faulty)
    sampler = DistributedSampler(data) if dist.is_initialized() else None
    workers = 1 if FAULT == "worker" else 0
    while True:
        yield from DataLoader(data, BATCH, sampler=sampler, num_workers=workers)


def train(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    is_faulty = rank == world_size - 1
    model: nn.Module = Network()
    if KIND == "fsdp2":
        for layer in (*model.layers, model):
            fully_shard(layer)
    elif world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of = nn.CrossEntropyLoss()
    is_over = torch.zeros(1)
    begin = time.monotonic()
    for images, labels in batches(is_faulty):
        seconds = time.monotonic() - begin
        is_over[0] = float(seconds > SECONDS)
        if world_size > 1:
            dist.all_reduce(is_over)
        if is_over.item():
            break
        if is_faulty and seconds > SECONDS / 3:
            fail()
            if FAULT == "slow":
                images = augment(images)
        time.sleep(0.005)  # a device at work
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()


def main(rank: int, world_size: int) -> None:
    if world_size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    train(rank, world_size)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if KIND == "spawn":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[4]
        mp.spawn(main, args=(WORLD_SIZE,), nprocs=WORLD_SIZE)
    elif KIND == "one":
        main(0, 1)
    else:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
