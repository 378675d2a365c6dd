"""One rank of a training job that becomes slow at a known time: no Rankscope and no profiler in it.

    python3 framework_job.py --framework fsdp2 --fault gpu --folder FOLDER [--rank 2] [--milliseconds 60]

The loop never synchronises by itself: on a GPU the host runs ahead of the device as far as the framework lets it.
Faults of one rank are a sleeping function in the forward (`host`), a kernel that spins in the forward (`gpu`) or after
backward, where nothing overlaps with it (`tail`), a dataset that sleeps (`input`), and sleeps in few
steps: of ten faults in every tenth step (`tenth`), of 3 s in every hundredth (`hundredth`). Others are sleeps of 200 ms
in a twentieth of the steps, on another rank each time (`moving`), and of 1 s in every fiftieth step on all ranks
(`together`), and kernels on all ranks that last up to twice as long as that of `gpu`, drawn for each step and rank
(`uneven`). They begin `--start-after` seconds after the first step. `--alternate-after` seconds later, steps with the
fault and without it take turns. FOLDER/steps-RANK grows by a line a step (`parts.Stopwatch`), FOLDER/fault.json says
when the fault began, FOLDER/blocks.json which steps took turns, FOLDER/summary-RANK.json how it ended."""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from alternation import Alternation, is_on
from frameworks import FRAMEWORKS, Setup, default_compiler, many_small_sums
from parts import Stopwatch, set_up, shared_course, write_fact
from torch.utils.data import Dataset

FAULTS = ("none", "host", "gpu", "tail", "input", "tenth", "hundredth", "moving", "together", "uneven")
# Steps from one sleep to the next, and its length: of so many steps with the usual fault, or in seconds.
TENTH = 10
HUNDREDTH, HUNDREDTH_SECONDS = 100, 3.0
MOVING_RATIO, MOVING_SECONDS = 0.05, 0.2
TOGETHER, TOGETHER_SECONDS = 50, 1.0
ON_ALL_RANKS = ("moving", "together", "uneven")
ON_DEVICE = ("gpu", "tail", "uneven")
ALTERNATION_SECONDS = 1.5
LOOPS = FRAMEWORKS | {"small": many_small_sums}
HOLDING = -1
LEAVING_SECONDS = 5.0
HOLD_SECONDS = 0.05
PATIENCE_SECONDS = 20.0
CALIBRATION_CYCLES = 40_000_000
SAMPLES = 4096


class Fault:
    """What slows one rank down, and from when on. The time is shared with the workers of data loaders."""

    def __init__(self, asked: argparse.Namespace, rank: int) -> None:
        self.kind = asked.fault if rank == asked.rank or asked.fault in ON_ALL_RANKS else "none"
        self._rank = rank
        self._seconds = asked.milliseconds / 1e3
        self._ratio = asked.slow_ratio
        self._folder = asked.folder
        self._steps = asked.folder / f"steps-{rank}"
        self._starts_at = torch.full((1,), float("inf"), dtype=torch.float64).share_memory_()
        self._batch = asked.batch
        self._began = False
        self._alternate_after = asked.alternate_after or float("inf")
        self._first_steps: list[int] = []  # of the blocks that take turns
        self._is_paused = False
        self._step = 0
        self._cycles_per_second = 0.0 if asked.cpu or self.kind not in ON_DEVICE else _cycles_per_second()

    def schedule(self, unix_seconds: float) -> None:
        self._starts_at[0] = unix_seconds

    def begin_step(self, step: int) -> None:
        """Decides whether the fault is on in this step, once both take turns."""
        self._step = step
        passed = time.time() - self._starts_at.item() - self._alternate_after
        if self.kind == "none" or passed < 0:
            return
        block = int(passed / ALTERNATION_SECONDS)
        self._first_steps += [step] * (block + 1 - len(self._first_steps))
        self._is_paused = not is_on(block)

    def tell_blocks(self) -> None:
        if self._first_steps:
            began = self._starts_at.item() + self._alternate_after
            write_fact(self._folder / "blocks.json", {"unix_seconds": began, "first_steps": self._first_steps})

    def in_forward(self) -> None:
        if self.kind == "host" and self._is_on():
            self._begin()
            slow_host(self._seconds)
        elif self.kind in ("tenth", "hundredth", "moving", "together") and self._is_on():
            seconds = self._sleep_seconds()
            if seconds:
                self._begin()
                slow_host(seconds)
        elif self.kind == "gpu" and self._is_on():
            self._occupy_device()
        elif self.kind == "uneven" and self._is_on():
            self._occupy_device(2 * random.Random(self._step * SAMPLES + self._rank).random())

    def _sleep_seconds(self) -> float:
        """Of the faults that sit in few steps. All ranks draw the same numbers for a step."""
        if self.kind == "tenth":
            return TENTH * self._seconds if self._step % TENTH == 0 else 0.0
        if self.kind == "hundredth":
            return HUNDREDTH_SECONDS if self._step % HUNDREDTH == 0 else 0.0
        if self.kind == "together":
            return TOGETHER_SECONDS if self._step % TOGETHER == 0 else 0.0
        draw = random.Random(self._step)
        is_stalled = draw.random() < MOVING_RATIO and draw.randrange(int(os.environ["WORLD_SIZE"])) == self._rank
        return MOVING_SECONDS if is_stalled else 0.0

    def before_optimizer(self) -> None:
        if self.kind == "tail" and self._is_on():
            self._occupy_device()

    def _occupy_device(self, factor: float = 1.0) -> None:
        self._begin()
        seconds = factor * self._seconds
        if self._cycles_per_second:
            torch.cuda._sleep(int(seconds * self._cycles_per_second))
        else:
            busy_device(seconds)

    def in_dataset(self) -> None:
        if self.kind == "input" and self._is_on():
            self._begin()
            slow_read(self._seconds / self._batch)

    def _is_on(self) -> bool:
        return not self._is_paused and time.time() >= self._starts_at.item()

    def _begin(self) -> None:
        if self._began:
            return
        self._began = True
        if self._ratio:
            lines = self._steps.read_text().rpartition("\n")[0].splitlines()
            self._seconds = self._ratio * statistics.median(float(line.split()[2]) for line in lines) / 1e3
        fact = {"unix_seconds": time.time(), "milliseconds": self._seconds * 1e3, "kind": self.kind}
        if not (self._folder / "fault.json").exists():
            write_fact(self._folder / "fault.json", fact)


def slow_host(seconds: float) -> None:
    time.sleep(seconds)


def slow_read(seconds: float) -> None:
    time.sleep(seconds)


def busy_device(seconds: float) -> None:
    """Where the device is the CPU."""
    until = time.perf_counter() + seconds
    matrix = torch.ones(32, 32)
    while time.perf_counter() < until:
        torch.mm(matrix, matrix)


def _cycles_per_second() -> float:
    """Of the device's clock, as `torch.cuda._sleep` counts it; the second time, since an idle clock is slow."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        start.record()
        torch.cuda._sleep(CALIBRATION_CYCLES)
        end.record()
        end.synchronize()
    return float(CALIBRATION_CYCLES / start.elapsed_time(end) * 1e3)


class Samples(Dataset[Any]):
    def __init__(self, asked: argparse.Namespace, fault: Fault) -> None:
        self._rows = torch.randn(SAMPLES, asked.width)
        self._fault = fault

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self._fault.in_dataset()
        return self._rows[index % SAMPLES]


class Course:
    """The steps of one rank, up to a last one that all ranks agree on. A rank that left alone would leave kernels that
    wait for it behind, which CUDA's multi-process service may not survive.

    Through the array that they share, rank 0 asks for 0 (go on), HOLDING (begin no other step), or the last step."""

    def __init__(self, asked: argparse.Namespace, rank: int, world: int, fault: Fault) -> None:
        self._asked, self._rank, self._world, self._fault = asked, rank, world, fault
        self._steps = 0
        self._watch: Stopwatch | None = None
        self._ends_at = float("inf")
        self._parent = os.getppid()
        self._alternation: Alternation | None = None
        if asked.pairs:
            self._alternation = Alternation(
                asked.folder, rank, asked.pairs, asked.block_seconds, asked.start_after, asked.keep_probe
            )
        self._shared = shared_course(asked.folder, world)
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        self._ends_at = 0.0

    def step_ended(self) -> None:
        """At every border of a step. Does not return after the last one."""
        self._steps += 1
        if self._watch is None:
            self._first_step()
        else:
            self._watch.write_finished()
            self._shared[self._world + 1 + self._rank] = self._watch.written + 2  # the first step is not written
        self._shared[self._rank] = self._steps + 1
        if os.getppid() != self._parent:
            os._exit(4)
        now = time.time()
        if self._alternation is not None and self._alternation.at_border(self._steps, now):
            self._ends_at = 0.0
        if self._rank == 0 and now > self._ends_at and not self._shared[self._world]:
            self._shared[self._world] = HOLDING
            time.sleep(HOLD_SECONDS)
            self._shared[self._world] = max(self._shared[: self._world])
        while self._shared[self._world] == HOLDING:
            time.sleep(HOLD_SECONDS / 10)
        if 0 < self._shared[self._world] <= self._steps:
            self._leave()
        self._fault.begin_step(self._steps + 1)

    def _first_step(self) -> None:
        now = time.time()
        self._watch = Stopwatch(not self._asked.cpu, self._asked.folder / f"steps-{self._rank}")
        self._ends_at = now + self._asked.seconds
        self._fault.schedule(now + self._asked.start_after)
        watchdog = threading.Timer(self._asked.seconds + PATIENCE_SECONDS, os._exit, (3,))
        watchdog.daemon = True
        watchdog.start()
        fact = {"pid": os.getpid(), "first_step_unix_seconds": now, "torch": torch.__version__}
        write_fact(self._asked.folder / f"info-{self._rank}.json", fact)

    def _leave(self) -> None:
        assert self._watch is not None
        if not self._asked.cpu:
            torch.cuda.synchronize()
        self._watch.write_finished()
        self._watch.close()
        self._fault.tell_blocks()
        write_fact(
            self._asked.folder / f"summary-{self._rank}.json", {"steps": self._steps, "unix_seconds": time.time()}
        )
        # NCCL's threads of this process may still be sending what the last collective of another rank waits for.
        give_up_at = time.monotonic() + LEAVING_SECONDS
        while len(list(self._asked.folder.glob("summary-*.json"))) < self._world and time.monotonic() < give_up_at:
            time.sleep(HOLD_SECONDS / 10)
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=LOOPS, required=True)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=2, help="the slow one")
    parser.add_argument("--milliseconds", type=float, default=60.0)
    parser.add_argument("--slow-ratio", type=float, help="of the step so far, instead of --milliseconds")
    parser.add_argument("--start-after", type=float, default=11.0, help="seconds from the first step to the fault")
    parser.add_argument("--alternate-after", type=float, help="seconds from the fault to turns with it and without")
    parser.add_argument("--seconds", type=float, default=30.0, help="from the first step to the last")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=0, help="of blocks without the probe and with it; then it ends")
    parser.add_argument("--block-seconds", type=float, default=4.0)
    parser.add_argument("--keep-probe", action="store_true", help="in blocks without it too: only a daemon is switched")
    parser.add_argument("--workers", type=int, default=0, help="of the data loader")
    parser.add_argument(
        "--compiler", default=default_compiler(), help="backend of torch.compile (default: %(default)s)"
    )
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    device = set_up(asked.cpu)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fault = Fault(asked, rank)
    course = Course(asked, rank, world, fault)
    LOOPS[asked.framework](Setup(asked, device, fault, course, Samples(asked, fault)))


if __name__ == "__main__":
    main()
