"""A loop without an optimizer: in each step every rank works a little and issues many small all_reduces, as inference
does. Nothing tells the probe that a step has ended.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python3 communication_loop.py --slow-rank 2

It runs on the first GPU with NCCL, and with --cpu over gloo. Rank --slow-rank is late by --milliseconds in each step,
from --fault-after seconds on. --folder gets the step times (steps-RANK)."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from parts import Stopwatch, set_up

VALUES = 1024
CYCLES_PER_SECOND = 1.7e9
# All ranks end after the same step. Hosts are ahead of each other by fewer steps than this.
CHECK_STEPS, NOTICE_STEPS = 10, 100


def be_late(where: str, seconds: float) -> None:
    if where == "host":
        time.sleep(seconds)
    else:
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))


class End:
    """The step after which the job ends, as rank 0 decides. It takes no collective, which would be part of the loop."""

    def __init__(self, seconds: float) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._ends_at = time.monotonic() + seconds
        self._last: int | None = None

    def is_after(self, step: int) -> bool:
        if step % CHECK_STEPS == 0 and self._last is None:
            if dist.get_rank() == 0 and time.monotonic() >= self._ends_at:
                self._store.set("last", str(step + NOTICE_STEPS))
            if self._store.check(["last"]):
                self._last = int(self._store.get("last"))
        return self._last is not None and step >= self._last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--operations", type=int, default=100, help="all_reduces in a step; 0: the ranks only compute")
    parser.add_argument("--products", type=int, default=8, help="matrix products in a step; 0: they only communicate")
    parser.add_argument("--width", type=int, default=1024, help="of the matrices")
    parser.add_argument("--total", action="store_true", help="one more all_reduce of another size ends each step")
    parser.add_argument("--log-every", type=int, default=0, help="steps from one more all_reduce to the next")
    parser.add_argument("--synchronize", action="store_true", help="the host waits for its device after each step")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow", choices=("host", "device"), default="host")
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--fault-after", type=float, default=0.0)
    asked = parser.parse_args()
    device = set_up(asked.cpu)
    is_slow = dist.get_rank() == asked.slow_rank
    matrix = torch.randn(asked.width, asked.width, device=device)
    values, total = torch.ones(VALUES, device=device), torch.ones(1, device=device)
    began, step, end = time.monotonic(), 0, End(asked.seconds)
    watch = Stopwatch(not asked.cpu, asked.folder / f"steps-{dist.get_rank()}") if asked.folder else None
    while not end.is_after(step):
        product = matrix
        for _ in range(asked.products):
            product = torch.tanh(product @ matrix)
        if is_slow and time.monotonic() - began >= asked.fault_after:
            be_late(asked.slow, asked.milliseconds * 1e-3)
        for _ in range(asked.operations):
            dist.all_reduce(values, dist.ReduceOp.MAX)
        if asked.total:
            dist.all_reduce(total, dist.ReduceOp.MAX)
        if asked.log_every and step % asked.log_every == 0:
            dist.all_reduce(total, dist.ReduceOp.MAX)
        if asked.synchronize and not asked.cpu:
            torch.cuda.synchronize()
        step += 1
        if watch is not None:
            watch.write_finished()
    if not asked.cpu:
        torch.cuda.synchronize()
    print(f"{step} steps, {1e3 * (time.monotonic() - began) / max(step, 1):.2f} ms each", flush=True)
    if watch is not None:
        watch.close()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
