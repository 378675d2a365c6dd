"""Runs an unchanged training script as one rank of a job, slows one function on one rank, and ends the job in order.

The fault begins some seconds after the first step and lasts to the end. The script ends by its own means: Megatron-LM
by its time limit, whose start is moved, nanoGPT by its number of iterations, and DeepSpeed's example by a `range` that
ends early. A rank that is killed would take the GPU from all others (CUDA's multi-process service). `fault.json` in the
folder says when the fault began. With --pairs, blocks of steps without the probe and with it take turns instead."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from foreign_stand_ins import STAND_INS
from torch.optim.optimizer import register_optimizer_step_post_hook

JOBS = Path(__file__).resolve().parents[2] / "tools/jobs"

# Megatron-LM's own limit, in minutes. The wrapper moves the start time, so that training ends earlier.
EXIT_MINUTES = 60
# The ranks of nanoGPT and of DeepSpeed's example agree on their last step through a file, so long before it.
AHEAD_SECONDS, MIN_STEPS_AHEAD = 3.0, 4
CYCLES_PER_MILLISECOND = 1_800_000  # of the GPU's clock
# The trainers synchronise in every step: no rank is further ahead of rank 0.
ALTERNATION_AHEAD_STEPS = 12


class Session:
    """Counts the steps of this rank, switches the fault on, and ends the script."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.is_slow = False
        self._asked = asked
        self._rank = int(os.environ["RANK"])
        self._folder: Path = asked.folder
        self._optimizer: object = None
        self._steps = 0
        self._began_at = self._fault_at = self._end_at = 0.0
        self._has_begun = False
        self._last_step: int | None = None
        self._turns = Turns(asked, self._rank) if asked.pairs else None

    def step_ended(self, optimizer: object, *_: object) -> None:
        """Called after `step` of any optimizer. The first one counts steps: a job may have several."""
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self._steps += 1
        if self._steps == 1:
            self._begin()
        if self._turns is not None and self._turns.are_over(self._steps):
            self._turns = None
            self._end_after(0.0)
        if self._is_culprit and time.monotonic() >= self._fault_at:
            self._switch()
        if self._asked.trainer != "megatron" and self._last_step is None:
            self._agree_on_end()

    def steps(self, *bounds: int) -> Iterator[int]:
        """Iterate like `range`, but end after the last step that the ranks agreed on."""
        for number in range(*bounds):
            if self._last_step is not None and self._steps >= self._last_step:
                return
            yield number

    @property
    def _is_culprit(self) -> bool:
        return bool(self._asked.fault != "none" and self._rank == self._asked.rank)

    def _begin(self) -> None:
        self._began_at = time.monotonic()
        self._fault_at = self._began_at + self._asked.after
        self._write(f"info-{self._rank}.json")
        self._end_after(self._asked.seconds)

    def _end_after(self, seconds: float) -> None:
        self._end_at = time.monotonic() + seconds
        if self._asked.trainer == "megatron" and self._rank == 0:
            # The other ranks follow: they agree on the end in every step.
            training = sys.modules["megatron.training.training"]
            training.__dict__["_TRAIN_START_TIME"] = time.time() + seconds - 60 * EXIT_MINUTES

    def _switch(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._write("fault.json")
        self.is_slow = self._steps % self._asked.every == 0

    def _agree_on_end(self) -> None:
        path = self._folder / "last-step"
        now = time.monotonic()
        if self._rank == 0 and now >= self._end_at - AHEAD_SECONDS:
            step_seconds = (now - self._began_at) / self._steps
            last = self._steps + MIN_STEPS_AHEAD + int(AHEAD_SECONDS / step_seconds)
            path.with_suffix(".new").write_text(str(last))
            path.with_suffix(".new").replace(path)
        if path.exists():
            self._last_step = int(path.read_text())
            if self._asked.trainer == "nanogpt":
                sys.modules["__main__"].__dict__["max_iters"] = self._last_step

    def _write(self, name: str) -> None:
        """Write the time, by both clocks, and the number of the step that has just ended."""
        path = self._folder / name
        times = {"unix_seconds": time.time(), "monotonic_ns": time.monotonic_ns(), "step": self._steps}
        path.with_suffix(".new").write_text(json.dumps(times))
        path.with_suffix(".new").replace(path)


class Turns:
    """Blocks without the probe and with it, which `benchmarks.gpu.overhead` compares."""

    def __init__(self, asked: argparse.Namespace, rank: int) -> None:
        sys.path.insert(0, str(JOBS))
        from alternation import Alternation
        from parts import Stopwatch, shared_course

        sys.path.remove(str(JOBS))
        world = int(os.environ["WORLD_SIZE"])
        self._course, self._place = shared_course(asked.folder, world), world + 1 + rank
        self._watch: Any = None
        self._new_watch = functools.partial(Stopwatch, not asked.cpu, asked.folder / f"steps-{rank}")
        self._alternation = Alternation(
            asked.folder,
            rank,
            asked.pairs,
            asked.block_seconds,
            asked.after,
            keeps_probe=asked.keep_probe,
            ahead_steps=ALTERNATION_AHEAD_STEPS,
        )

    def are_over(self, steps: int) -> bool:
        """Record the step that has just ended, and switch the probe where a block begins."""
        if self._watch is None:
            self._watch = self._new_watch()
            return False
        self._watch.write_finished()
        self._course[self._place] = self._watch.written + 2  # the first step is not written
        is_over = self._alternation.at_border(steps, time.time())
        if is_over:
            self._watch.close()
        return is_over


def hold_up_host(milliseconds: float) -> None:
    time.sleep(milliseconds / 1000)


def hold_up_gpu(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MILLISECOND))


def slow_down(owner: Any, session: Session, hold_up: Callable[[], None]) -> None:
    """Patch `forward` of a class."""
    forward = owner.forward

    @functools.wraps(forward)
    def slow_forward(*arguments: Any, **keywords: Any) -> Any:
        if session.is_slow:
            hold_up()
        return forward(*arguments, **keywords)

    owner.forward = slow_forward


def use_cpu(trainer: str) -> None:
    """Let a trainer that wants a GPU for each rank run over gloo: to try the benchmark itself."""
    parallel = torch.nn.parallel
    plain = parallel.DistributedDataParallel
    torch.set_num_threads(1)
    changes: Any = {(torch.cuda, "set_device"): lambda device: None}
    if trainer == "nanogpt":
        changes |= {
            (torch.Tensor, "pin_memory"): lambda self: self,
            (torch.Tensor, "to"): lambda self, *arguments, **keywords: self,
            (torch.nn.Module, "to"): lambda self, *arguments, **keywords: self,
            (parallel, "DistributedDataParallel"): lambda model, device_ids: plain(model),
        }
    for (owner, name), value in changes.items():
        setattr(owner, name, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trainer", choices=("megatron", "nanogpt", "deepspeed"), required=True)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--arguments", type=json.loads, required=True, help="of the script, as a JSON list")
    parser.add_argument("--layer", required=True, help="MODULE:CLASS whose forward is slowed")
    parser.add_argument("--fault", choices=("none", "host", "gpu"), default="none")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--milliseconds", type=float, default=15.0, help="of a call")
    parser.add_argument("--every", type=int, default=1, help="steps from one slow step to the next")
    parser.add_argument("--after", type=float, required=True, help="seconds from the first step to the fault")
    parser.add_argument("--seconds", type=float, required=True, help="from the first step to the end")
    parser.add_argument("--pairs", type=int, default=0, help="of blocks without the probe and with it")
    parser.add_argument("--block-seconds", type=float, default=1.0)
    parser.add_argument("--keep-probe", action="store_true", help="in blocks without it too: only a daemon is switched")
    parser.add_argument("--stand-in", choices=STAND_INS, help="a package that the machine lacks")
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()

    sys.path[0] = str(asked.script.parent)
    os.chdir(asked.script.parent)
    if asked.cpu:
        use_cpu(asked.trainer)
    if asked.stand_in:
        STAND_INS[asked.stand_in]()
    session = Session(asked)
    register_optimizer_step_post_hook(session.step_ended)
    module, _, name = asked.layer.partition(":")
    layer = getattr(importlib.import_module(module), name)
    if asked.fault != "none" and int(os.environ["RANK"]) == asked.rank:
        hold_up = hold_up_gpu if asked.fault == "gpu" and not asked.cpu else hold_up_host
        slow_down(layer, session, functools.partial(hold_up, asked.milliseconds))
    if asked.trainer == "megatron":
        # It is compiled before the job starts: rank 0 would call `make`, in a folder that jobs share.
        importlib.import_module("megatron.core.datasets.utils").__dict__["compile_helpers"] = lambda: None
    sys.argv = [str(asked.script), *asked.arguments]
    names = {"range": session.steps} if asked.trainer == "deepspeed" else {}
    runpy.run_path(str(asked.script), names, run_name="__main__")


if __name__ == "__main__":
    main()
