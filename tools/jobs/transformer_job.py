"""One rank of a DDP job, as a user would write it, without Rankscope and without a profiler. It records its step times,
which benchmarks compare with what Rankscope measures.

    python3 transformer_job.py SHAPE BACKEND FOLDER [--cpu]     trains until SIGTERM

FOLDER/info-RANK.json appears after the first steps; FOLDER/steps-RANK grows by a line a step (`parts.Stopwatch`)."""

from __future__ import annotations

import os
import platform
import signal
import sys
from pathlib import Path
from types import FrameType

import torch
from parts import Block, Stopwatch, set_up, write_fact
from shapes import SHAPES
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

WARM_UP_STEPS = 20


def main() -> None:
    name, backend, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    shape, rank = SHAPES[name], int(os.environ["RANK"])
    on_cuda = "--cpu" not in sys.argv[4:]
    device = set_up(not on_cuda, backend)
    kind = torch.bfloat16 if on_cuda else torch.float32
    model = nn.Sequential(*(Block(shape.width, causal=False) for _ in range(shape.layers))).to(device, kind)
    data = torch.randn(shape.batch, shape.sequence, shape.width, device=device, dtype=kind)
    with FlopCounterMode(display=False) as counting:
        model(data).square().mean().backward()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=on_cuda)
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    signal.signal(signal.SIGTERM, stop)
    watch, done = None, 0
    while not stopped:
        optimizer.zero_grad()
        ddp(data).square().mean().backward()
        optimizer.step()
        done += 1
        if watch is not None:
            watch.write_finished()
        elif done == WARM_UP_STEPS:
            watch = Stopwatch(on_cuda, folder / f"steps-{rank}")
            info = {
                "pid": os.getpid(),
                "device": torch.cuda.get_device_name(0) if on_cuda else platform.machine(),
                "torch": torch.__version__,
                "python": platform.python_version(),
                "parameters": sum(one.numel() for one in model.parameters()),
                # With attention's forward done twice, as flash attention does in its backward.
                "counted_flops_per_step": counting.get_total_flops(),
            }
            write_fact(folder / f"info-{rank}.json", info)
    # Collectives of the other ranks may hang now, so skip the cleanup.
    os._exit(0)


if __name__ == "__main__":
    main()
