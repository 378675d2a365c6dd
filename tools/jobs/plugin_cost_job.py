"""Steps with the NCCL plugin's events and without, in turns.

    python3 plugin_cost_job.py --kind graph --folder FOLDER [--pairs 100] [--steps 10]

A CUDA graph has the events that were asked for while it was captured: there are two graphs of the same step, and their
replays take turns. FOLDER/cost-RANK.json has the milliseconds of a step in each block, and what was recorded."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from alternation import is_on
from frameworks import Network, fully_sharded, loss_of
from parts import set_up, write_fact
from torch.nn.parallel import DistributedDataParallel

from rankscope.probe import nccl_layout

SMALL_OPERATIONS, SMALL_VALUES = 100, 1024
WARM_UP_STEPS = 20


class Events:
    """The plugin's memory, which the probe leaves alone from now on."""

    def __init__(self) -> None:
        plugin = next(one for one in gc.get_objects() if type(one).__name__ == "NcclPlugin")
        plugin.next_step = lambda step: False
        self._memory = plugin._memory

    def want(self, wanted: bool) -> None:
        bits = nccl_layout.WANT_OPERATIONS if wanted else nccl_layout.WANT_NOTHING
        nccl_layout.WANTED.pack_into(self._memory, nccl_layout.WANTED_OFFSET, bits)

    @property
    def recorded(self) -> int:
        records, _ = nccl_layout.COUNTERS.unpack_from(self._memory, nccl_layout.COUNTERS_OFFSET)
        return int(records)


def trained(model: torch.nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        optimizer.step()

    return step


def reduced_by_hand(model: torch.nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        loss_of(model(batch)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    return step


def small(model: torch.nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    values = torch.zeros(SMALL_VALUES, device=batch.device)

    def step() -> None:
        for _ in range(SMALL_OPERATIONS):
            dist.all_reduce(values)

    return step


KINDS: dict[str, Callable[[Any, torch.Tensor], Callable[[], None]]] = {
    "ddp": lambda model, batch: trained(DistributedDataParallel(model), batch),
    "fsdp2": lambda model, batch: trained(fully_sharded(model), batch),
    "small": small,
    "graph": reduced_by_hand,
}


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--width", type=int, default=1024)
    asked = parser.parse_args()
    device = set_up(cpu=False)
    rank = int(os.environ["RANK"])
    step = KINDS[asked.kind](Network(asked.width, 4).to(device), torch.randn(32, asked.width, device=device))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.synchronize()
    events = Events()
    steps = {True: step, False: step}
    if asked.kind == "graph":
        for wanted in steps:
            events.want(wanted)
            step()  # NCCL hears of it with the next operation
            torch.cuda.synchronize()
            steps[wanted] = captured(step).replay
    write_fact(asked.folder / f"info-{rank}.json", {})
    millis: dict[bool, list[float]] = {True: [], False: []}
    recorded = {True: 0, False: 0}
    for block in range(2 * asked.pairs):
        wanted = is_on(block)
        events.want(wanted)
        steps[wanted]()
        torch.cuda.synchronize()
        before = events.recorded
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(asked.steps):
            steps[wanted]()
        end.record()
        end.synchronize()
        millis[wanted].append(begin.elapsed_time(end) / asked.steps)
        recorded[wanted] += events.recorded - before
    told = {"on": millis[True], "off": millis[False], "recorded": recorded[True], "recorded_off": recorded[False]}
    write_fact(asked.folder / f"cost-{rank}.json", told)
    # Graphs with collectives must be gone before their communicators are.
    steps.clear()
    gc.collect()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
