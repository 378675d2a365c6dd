"""Code that the training jobs share: the process group, a transformer block, step times, and JSON files for the
launcher. Jobs import it from their own folder. It does not import Rankscope."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FLUSH_SECONDS = 0.2


def set_up_torch(cpu: bool) -> torch.device:
    """Uses one thread per rank on CPUs, otherwise the first GPU. All ranks start with the same weights."""
    if cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0)
    torch.manual_seed(0)
    return torch.device("cpu" if cpu else "cuda:0")


def set_up(cpu: bool, backend: str = "", **options: Any) -> torch.device:
    """Creates the process group from the environment, by default with gloo on CPUs and NCCL on GPUs."""
    device = set_up_torch(cpu)
    dist.init_process_group(backend or ("gloo" if cpu else "nccl"), **options)
    return device


def write_fact(path: Path, fact: dict[str, Any]) -> None:
    """Writes a JSON file atomically, so that a reader never sees a part of it."""
    mine = path.with_suffix(f".{os.getpid()}")
    mine.write_text(json.dumps(fact))
    mine.replace(path)


def shared_course(folder: Path, world: int) -> memoryview:
    """Return an array that all ranks share: for each rank the step that it may be in, what rank 0 asks for, and for
    each rank the step that its device may be in."""
    with os.fdopen(os.open(folder / "course", os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        file.truncate(8 * (2 * world + 1))
        return memoryview(mmap.mmap(file.fileno(), 8 * (2 * world + 1))).cast("q")


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, sequence, 3, -1, 64).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Stopwatch:
    """Records the device time of each step, with CUDA events on a GPU, without waiting for the device. A line of the
    file is a finished step: its end by the host's clock and on the device (Unix ns), and its device time (ms)."""

    def __init__(self, on_cuda: bool, path: Path) -> None:
        self._on_cuda = on_cuda
        self._file = path.open("w")
        self._pending: deque[tuple[int, Any]] = deque()
        self._flushed = time.monotonic()
        self.written = 0  # steps
        if on_cuda:
            torch.cuda.synchronize()
        self._device_ns = time.time_ns()
        self._pending.append((self._device_ns, self._now()))

    def write_finished(self) -> None:
        self._pending.append((time.time_ns(), self._now()))
        while len(self._pending) > 1 and (not self._on_cuda or self._pending[1][1].query()):
            before = self._pending.popleft()[1]
            host_ns, after = self._pending[0]
            millis = before.elapsed_time(after) if self._on_cuda else (after - before) / 1e6
            self._device_ns += round(millis * 1e6)
            self._file.write(f"{host_ns} {self._device_ns} {millis:.4f}\n")
            self.written += 1
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
