"""One rank of a DDP job, as a user would write it: no Rankscope and no profiler in it. Keeps its own record of how long
each step took, by CUDA events, so that others can be held to it.

    python3 job.py SHAPE BACKEND FOLDER     trains until SIGTERM

FOLDER/info-RANK.json appears after the first steps; FOLDER/steps-RANK grows by a line a step: when it ended by the
host's clock, when on the device (unix ns), and how long it took there (ms)."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from shapes import SHAPES
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from training import Block

WARM_UP_STEPS = 20
FLUSH_SECONDS = 0.2


class Stopwatch:
    """Device time of each step. Never waits for the device: a step is told when a later one finds it done."""

    def __init__(self, on_cuda: bool, path: Path) -> None:
        self._on_cuda = on_cuda
        self._file = path.open("w")
        self._pending: deque[tuple[int, Any]] = deque()
        self._flushed = time.monotonic()
        self.told = 0  # steps
        if on_cuda:
            torch.cuda.synchronize()
        self._device_ns = time.time_ns()
        self._pending.append((self._device_ns, self._now()))

    def tell(self) -> None:
        self._pending.append((time.time_ns(), self._now()))
        while len(self._pending) > 1 and (not self._on_cuda or self._pending[1][1].query()):
            before = self._pending.popleft()[1]
            host_ns, after = self._pending[0]
            millis = before.elapsed_time(after) if self._on_cuda else (after - before) / 1e6
            self._device_ns += round(millis * 1e6)
            self._file.write(f"{host_ns} {self._device_ns} {millis:.4f}\n")
            self.told += 1
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def main() -> None:
    name, backend, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    shape, rank = SHAPES[name], int(os.environ["RANK"])
    device = "cpu" if os.environ.get("JOB_DEVICE") == "cpu" else "cuda"
    on_cuda = device == "cuda"
    if on_cuda:
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend)
    torch.manual_seed(0)
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
            watch.tell()
        elif done == WARM_UP_STEPS:
            watch = Stopwatch(on_cuda, folder / f"steps-{rank}")
            _tell(folder / f"info-{rank}.json", model, counting.get_total_flops(), on_cuda)
    # Collectives of the other ranks may hang now; there is nothing to tidy up.
    os._exit(0)


def _tell(path: Path, model: nn.Module, counted_flops: int, on_cuda: bool) -> None:
    info = {
        "pid": os.getpid(),
        "device": torch.cuda.get_device_name(0) if on_cuda else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "parameters": sum(one.numel() for one in model.parameters()),
        # With attention's forward done twice, as flash attention does in its backward.
        "counted_flops_per_step": counted_flops,
    }
    path.with_suffix(".new").write_text(json.dumps(info))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
