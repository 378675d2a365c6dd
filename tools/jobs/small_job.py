"""A small training job over gloo, as users write them. It imports nothing of Rankscope. Ranks that have trained create
trained-RANK. Torch may deadlock after that: whoever drops a DDP model joins gloo's thread while holding the GIL, which
that thread needs to drop its last tensor.

python3 small_job.py ddp|fsdp2 [--width N] [--layers N] [--batch N] [--workers N] [--seconds S]"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

AGREE_STEPS = 20


def batches(samples: torch.Tensor, batch: int, workers: int) -> Iterator[torch.Tensor]:
    loader = DataLoader(TensorDataset(samples), batch_size=batch, shuffle=True, num_workers=workers)
    while True:
        for (rows,) in loader:
            yield rows


def sharded_or_replicated(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("ddp", "fsdp2"))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(asked.width, asked.width), nn.ReLU()) for _ in range(asked.layers))
    model = sharded_or_replicated(asked.kind, nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    started, is_over = time.perf_counter(), torch.zeros(1)
    for step, batch in enumerate(batches(torch.randn(64 * asked.batch, asked.width), asked.batch, asked.workers), 1):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if step % AGREE_STEPS == 0:  # all ranks end after the same step
            is_over[0] = time.perf_counter() - started >= asked.seconds
            dist.broadcast(is_over, 0)
            if is_over.item():
                break
    Path(f"trained-{dist.get_rank()}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
