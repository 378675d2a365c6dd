"""One rank of a job that is trained in several variants, in turns: as it is, and with a remedy.

    python3 remedies_job.py --shape small --variants base,fused,graph --folder FOLDER

A variant is one or more remedies joined by `+`; `base` has none. FOLDER/remedies-RANK.json has the milliseconds of a
step by variant, the median over the turns, without a profiler. FOLDER/VARIANT-RANK.json.gz is the trace of some steps
of each variant in --traced."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from frameworks import Network, Setup, captured, fully_sharded, hugging_face, no_fault
from parts import Block, set_up, set_up_torch, write_fact
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

# layers, width, sequence, batch
SHAPES = {"small": (12, 256, 128, 8), "medium": (6, 768, 256, 16), "large": (8, 1536, 512, 8), "tiny": (2, 64, 16, 2)}
SLOW_RANK = 2
READ_SECONDS = 0.002
WARM_UP_STEPS = 8
WARM_UP_TRACED, TRACED_STEPS = 3, 5


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, is_recomputed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self._is_recomputed = is_recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._is_recomputed else block(x)
        return x


class Samples(Dataset[Any]):
    """Each takes a while to read."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._sample = torch.randn(shape)

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(READ_SECONDS)
        return self._sample


def number_in(remedies: set[str], name: str, default: int) -> int:
    """Of a remedy such as batch4."""
    numbers = [one.removeprefix(name) for one in remedies if one.startswith(name)]
    return next((int(number) for number in numbers if number.isdigit()), default)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def batches(
    asked: argparse.Namespace, remedies: set[str], device: torch.device, size: int, sample: tuple[int, ...]
) -> Iterator[torch.Tensor]:
    """The variant `memory` has its batches there."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not asked.reads or "memory" in remedies or asked.reading_rank not in (None, rank):
        fixed = torch.randn(size, *sample, device=device)
        while True:
            yield fixed
    workers = number_in(remedies, "workers", asked.workers)
    loader = DataLoader(
        Samples(sample),
        batch_size=size,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
    )
    while True:
        for batch in loader:
            yield batch.to(device, non_blocking=True)


def transformer_step(asked: argparse.Namespace, remedies: set[str], device: torch.device) -> Callable[[], None]:
    layers, width, sequence, size = SHAPES[asked.shape]
    model = Transformer(layers, width, "recompute" in remedies).to(device)
    is_graph = "graph" in remedies
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-4,
        fused=True if "fused" in remedies else None,
        foreach=False if "forloop" in remedies else None,
        capturable=is_graph and device.type == "cuda",
    )
    source = batches(asked, remedies, device, size * number_in(remedies, "batch", 1), (sequence, width))
    inputs = next(source).clone()
    forward = torch.compile(model) if "compiled" in remedies else model
    micro_batches = number_in(remedies, "accumulate", 1)
    turn = 0

    def compute(batch: torch.Tensor) -> None:
        nonlocal turn
        turn += 1
        torch.backends.cuda.matmul.allow_tf32 = "tf32" in remedies
        with torch.autocast(device.type, torch.bfloat16, enabled="bf16" in remedies):
            loss = loss_of(forward(batch))
        loss.backward()
        if turn % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not is_graph)

    if not is_graph or device.type == "cpu":
        return lambda: compute(next(source))
    replay = captured(lambda: compute(inputs))

    def step() -> None:
        inputs.copy_(next(source))
        replay()

    return step


def distributed_step(asked: argparse.Namespace, remedies: set[str], device: torch.device) -> Callable[[], None]:
    megabytes = number_in(remedies, "bucket", 25)
    plain = Network(asked.width, 4).to(device)
    model: nn.Module = plain
    if asked.kind == "fsdp2":
        model = fully_sharded(plain)
    elif asked.kind == "ddp":
        model = DistributedDataParallel(plain, bucket_cap_mb=megabytes)
    if isinstance(model, DistributedDataParallel) and "compressed" in remedies and device.type == "cuda":
        model.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    source = batches(asked, remedies, device, asked.batch, (asked.width,))
    micro_batches = number_in(remedies, "accumulate", 1)
    turn = 0
    is_slow = asked.straggler and "even" not in remedies and dist.get_rank() == SLOW_RANK
    pause_seconds = asked.work_ms / 1e3 + (asked.slow_ms / 1e3 if is_slow else 0.0)

    def step() -> None:
        nonlocal turn
        turn += 1
        batch = next(source)
        if pause_seconds:
            time.sleep(pause_seconds)
        if turn % micro_batches:
            with model.no_sync():
                loss_of(model(batch)).backward()
            return
        loss_of(model(batch)).backward()
        if asked.kind == "loop":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


class TrainerSteps:
    """Steps of a loop that calls instead of being called: some to warm up, some timed, some traced."""

    def __init__(self, asked: argparse.Namespace, rank: int, device: torch.device) -> None:
        self._asked, self._rank, self._device = asked, rank, device
        self._count = 0
        self._began = 0.0
        self._profiler: torch.profiler.profile | None = None

    def step_ended(self) -> None:
        self._count += 1
        timed_steps = self._asked.rounds * self._asked.steps
        if self._count in (WARM_UP_STEPS, WARM_UP_STEPS + timed_steps):
            _synchronize(self._device)
            passed, self._began = time.perf_counter() - self._began, time.perf_counter()
            if self._count > WARM_UP_STEPS:
                self._millis = passed / timed_steps * 1e3
                self._profiler = profiler_of(self._asked, self._device)
                self._profiler.start()
        elif self._profiler is not None:
            self._profiler.step()
            if self._count >= WARM_UP_STEPS + timed_steps + WARM_UP_TRACED + TRACED_STEPS:
                self._profiler.stop()
                self._profiler.export_chrome_trace(str(self._asked.folder / f"base-{self._rank}.json.gz"))
                told = {"milliseconds": {"base": self._millis}}
                write_fact(self._asked.folder / f"remedies-{self._rank}.json", told)
                dist.barrier()
                os._exit(0)


def train_with_hugging_face(asked: argparse.Namespace, rank: int, device: torch.device) -> None:
    shape = argparse.Namespace(
        width=asked.width, layers=4, batch=64, workers=0, folder=asked.folder, cpu=device.type == "cpu"
    )
    fault = SimpleNamespace(in_forward=no_fault)
    samples = torch.randn(4096, asked.width)
    hugging_face(Setup(shape, device, fault, TrainerSteps(asked, rank, device), samples))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Milliseconds of a step; on a GPU nothing waits for the device but the end."""
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    _synchronize(device)
    return (time.perf_counter() - began) / count * 1e3


def profiler_of(asked: argparse.Namespace, device: torch.device) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=0, warmup=WARM_UP_TRACED, active=TRACED_STEPS, repeat=1)
    return torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        record_shapes=True,
        with_stack=asked.stacks,
        profile_memory=asked.stacks or asked.memory,
    )


def trace(step: Callable[[], None], path: Path, asked: argparse.Namespace, device: torch.device) -> None:
    with profiler_of(asked, device) as profiler:
        for _ in range(WARM_UP_TRACED + TRACED_STEPS):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", choices=("transformer", "ddp", "fsdp2", "loop", "hf"), default="transformer")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--width", type=int, default=1024, help="of ddp, fsdp2, loop and hf")
    parser.add_argument("--batch", type=int, default=256, help="of ddp, fsdp2 and loop")
    parser.add_argument(
        "--work-ms", type=float, default=0.0, help="each rank sleeps so long in a step, as if it worked"
    )
    parser.add_argument("--variants", default="base")
    parser.add_argument("--traced", default="base")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    parser.add_argument("--reads", action="store_true", help="batches come from a data loader, which takes its time")
    parser.add_argument("--reading-rank", type=int, help="the only rank whose batches come from a data loader")
    parser.add_argument("--workers", type=int, default=1, help="of the data loader")
    parser.add_argument(
        "--straggler", action="store_true", help="rank 2 sleeps in each step, but for the variant `even`"
    )
    parser.add_argument("--slow-ms", type=float, default=20.0, help="how long rank 2 sleeps")
    parser.add_argument("--stacks", action="store_true", help="traces with Python stacks and memory")
    parser.add_argument("--memory", action="store_true", help="traces with memory")
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    device = set_up_torch(asked.cpu) if asked.kind == "transformer" else set_up(asked.cpu)
    if asked.kind == "hf":
        train_with_hugging_face(asked, rank, device)
    make = transformer_step if asked.kind == "transformer" else distributed_step
    steps: dict[str, Callable[[], None]] = {}
    memory: dict[str, int] = {}
    for name in asked.variants.split(","):
        before = 0 if asked.cpu else torch.cuda.memory_allocated()
        if not asked.cpu:
            torch.cuda.reset_peak_memory_stats()
        steps[name] = make(asked, set(name.split("+")), device)
        timed(steps[name], WARM_UP_STEPS, device)
        memory[name] = 0 if asked.cpu else torch.cuda.max_memory_allocated() - before
    write_fact(asked.folder / f"info-{rank}.json", {})
    turns: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(asked.rounds):
        for name, step in steps.items():
            timed(step, 2, device)
            turns[name].append(timed(step, asked.steps, device))
    for name in filter(None, asked.traced.split(",")):
        trace(steps[name], asked.folder / f"{name}-{rank}.json.gz", asked, device)
    told = {
        "milliseconds": {name: statistics.median(millis) for name, millis in turns.items()},
        "turns": turns,
        "peak_bytes": memory,
    }
    write_fact(asked.folder / f"remedies-{rank}.json", told)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # workers of data loaders, and graphs, would take their time


if __name__ == "__main__":
    main()
