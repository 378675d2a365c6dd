"""What the benchmark's jobs share: the times they leave behind, the byte that steers them, the probe on and off."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

STOP, PLAIN, PROBED = range(3)
FIRST_STEPS = 20
MAX_STEPS = 500_000
DDP_OWN_SAMPLE_RATE = 100
RANK = int(os.environ["RANK"])


class ProbeSwitch:
    """Takes the probe out of this process and puts it back: hooks, wrappers, and the rate at which DDP times itself."""

    def __init__(self, model: Any) -> None:
        from torch._C import _distributed_c10d as bindings
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        self._hooks = [optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks]
        self._kept = [dict(hooks) for hooks in self._hooks]
        places = ((bindings.Work, "wait"), (dataloader._BaseDataLoaderIter, "__next__"))
        self._wrapped = [(owner, name, getattr(owner, name)) for owner, name in places]
        self._set_rate = model._set_ddp_runtime_logging_sample_rate
        self._rate = DDP_OWN_SAMPLE_RATE
        model._set_ddp_runtime_logging_sample_rate = self._rate_chosen
        self.on = True
        assert all(self._kept), "the probe is not in this process"

    def _rate_chosen(self, rate: int) -> None:
        self._rate = rate
        self._set_rate(rate)

    def set(self, on: bool) -> None:
        if on == self.on:
            return
        self.on = on
        for hooks, kept in zip(self._hooks, self._kept, strict=True):
            hooks.clear()
            hooks.update(kept if on else {})
        for owner, name, wrapper in self._wrapped:
            setattr(owner, name, wrapper if on else wrapper.__wrapped__)
        self._set_rate(self._rate if on else DDP_OWN_SAMPLE_RATE)


def train(model: Any, step: Callable[[], None]) -> None:
    """Steps until told to stop; writes the end and the length of each one."""
    folder = Path(sys.argv[1])
    times = np.lib.format.open_memmap(folder / f"times-{RANK}", mode="w+", dtype=np.int64, shape=(MAX_STEPS, 2))
    with (folder / "control").open("r+b") as file:
        control = mmap.mmap(file.fileno(), 1)
    parent = os.getppid()
    for _ in range(FIRST_STEPS):
        step()
    probe = ProbeSwitch(model)
    (folder / f"started-{RANK}").touch()
    stop = torch.zeros(1)
    before_ns = time.monotonic_ns()
    for number in range(MAX_STEPS):
        step()
        now_ns = time.monotonic_ns()
        times[number] = now_ns, now_ns - before_ns
        before_ns = now_ns
        state = control[0]
        # A rank that stopped alone would leave the others in a collective: they stop together, or die with the parent.
        if number % 16 == 15:
            stop.fill_(state == STOP or os.getppid() != parent)
            torch.distributed.all_reduce(stop)
            if stop.item():
                return
            before_ns = time.monotonic_ns()
        probe.set(state != PLAIN)
