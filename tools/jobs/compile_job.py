"""One rank of a compiled job: FOLDER/counts-RANK.json says what torch.compile did about it.

    python3 compile_job.py --model ddp|fsdp2|tp|optimizer --folder FOLDER [--cpu]

Trains for a few steps, with a batch of another size among them so that something has to be compiled again."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from frameworks import Layer, default_compiler, loss_of, optimizer_of
from parts import set_up, write_fact
from torch import nn
from torch._dynamo import utils
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

BATCHES = (32, 32, 32, 32, 16, 16, 32, 24, 32, 32)
METRICS_AT_MOST = 4096


def compiled_ddp(model: nn.Sequential, compiler: str, device: str) -> nn.Module:
    return torch.compile(DistributedDataParallel(model), backend=compiler)


def compiled_fsdp2(model: nn.Sequential, compiler: str, device: str) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return torch.compile(model, backend=compiler)


def compiled_tensor_parallel(model: nn.Sequential, compiler: str, device: str) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tensor",))
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return torch.compile(model, backend=compiler)


def plain_ddp(model: nn.Sequential, compiler: str, device: str) -> nn.Module:
    return DistributedDataParallel(model)


MODELS: dict[str, Callable[[nn.Sequential, str, str], nn.Module]] = {
    "ddp": compiled_ddp,
    "fsdp2": compiled_fsdp2,
    "tp": compiled_tensor_parallel,
    "optimizer": plain_ddp,  # only the optimizer's step is compiled
}


def counts() -> dict[str, Any]:
    compiled = utils.get_compilation_metrics()
    breaks = dict(utils.counters["graph_break"])
    again = [str(one.recompile_reason) for one in compiled if getattr(one, "recompile_reason", None)]
    return {
        "graph_breaks": sum(breaks.values()),
        "recompiles": len(again),
        "compilations": len(compiled),
        # A backward graph has no code object.
        "frames": [f"{one.co_name} {one.co_filename}:{one.co_firstlineno}" for one in compiled if one.co_name],
        "unique_graphs": int(utils.counters["stats"].get("unique_graphs", 0)),
        "break_reasons": breaks,
        "recompile_reasons": again,
        "probe": "rankscope.probe.torch_hooks" in sys.modules,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--compiler", default=default_compiler())
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    utils.set_compilation_metrics_limit(METRICS_AT_MOST)
    device = set_up(asked.cpu).type
    layers = nn.Sequential(*(Layer(asked.width) for _ in range(2))).to(device)
    model = MODELS[asked.model](layers, asked.compiler, device)
    optimizer = optimizer_of(model)
    step = torch.compile(optimizer.step, backend=asked.compiler) if asked.model == "optimizer" else optimizer.step
    samples = [torch.randn(size, asked.width) for size in BATCHES]
    for batch in DataLoader(samples, batch_size=None):
        optimizer.zero_grad()
        loss_of(model(batch.to(device))).backward()
        step()
    if not asked.cpu:
        torch.cuda.synchronize()
    write_fact(asked.folder / f"counts-{os.environ['RANK']}.json", counts())
    os._exit(0)


if __name__ == "__main__":
    main()
