"""Training processes with the probe that do what a test tells them, line by line, between two steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rankscope.daemon.captures.orders import CaptureError, Options, Order, Recording, Stage, Workspace
from rankscope.daemon.captures.probe_backend import ProbeBackend
from rankscope.daemon.samples import RankProcess
from tests.integration.probe_running import DEADLINE_SECONDS, PipedJob
from tests.support.waiting import wait_until

SCRIPT = """
import os, queue, sys, threading, time, torch
import torch.distributed as distributed
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
if world > 1:
    distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
orders = queue.SimpleQueue()
threading.Thread(target=lambda: [orders.put(line) for line in sys.stdin], daemon=True).start()
ended = torch.zeros(1)
steps = 0
while not ended.item():
    model(torch.ones(8, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    time.sleep(0.005)
    while not orders.empty():
        order = orders.get()
        if order == "end\\n":
            ended.fill_(1)
        else:
            exec(order)
        print("did", order, end="", flush=True)
    if world > 1:
        distributed.all_reduce(ended)
print("ended", steps, flush=True)
"""


class CapturedJob(PipedJob):
    def __init__(self, folder: Path, ranks: int = 1, script: str = SCRIPT, **environment: str) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        super().__init__(folder, script, ranks, {"TMPDIR": str(self.temporary), **environment})
        self.backend = ProbeBackend()
        self._captures = 0

    def wait_until_it_steps(self) -> None:
        self.wait_until(lambda: all(self.backend.objection(rank) is None for rank in self.ranks))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Fails at once if a process ends meanwhile."""

        def is_met() -> bool:
            if condition():
                return True
            for process in self.processes:
                assert process.poll() is None, process.communicate()
            return False

        wait_until(is_met, seconds=DEADLINE_SECONDS)

    def tell(self, order: str) -> None:
        """Done between two steps; returns when it has been."""
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(order + "\n")
            process.stdin.flush()
        for process in self.processes:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert line == f"did {order}\n", line + process.stderr.read()

    def capture(
        self,
        steps: int | None = 3,
        seconds: float | None = None,
        patience_seconds: float = 60.0,
        options: Options = Options(),  # noqa: B008 - frozen
        when_running: Callable[[], None] = lambda: None,
    ) -> list[Recording | CaptureError]:
        """Of all ranks at once, each in a thread, as the runner does it."""
        self._captures += 1
        workspace = self.folder / f"capture{self._captures}"
        workspace.mkdir()
        start = time.time() + 1.0
        results: dict[int, Recording | CaptureError] = {}
        running = threading.Event()

        def record(rank: RankProcess) -> None:
            order = Order(workspace.name, rank, steps, seconds, round(start * 1000), start + patience_seconds, options)
            try:
                results[rank.rank] = self.backend.record(
                    order,
                    Workspace(workspace),
                    lambda stage: running.set() if stage is Stage.RUNNING else None,
                    threading.Event(),
                )
            except CaptureError as error:
                results[rank.rank] = error

        threads = [threading.Thread(target=record, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not running.wait(0.05):
            pass
        if running.is_set():
            when_running()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        return [results[rank.rank] for rank in self.ranks]

    def end(self) -> list[tuple[int, str]]:
        """A rank may hear of it from another, before it reads its own order."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("end\n")
                process.stdin.flush()
        return self.finish()


@contextlib.contextmanager
def captured_job(folder: Path, ranks: int = 1, script: str = SCRIPT, **environment: str) -> Iterator[CapturedJob]:
    with contextlib.closing(CapturedJob(folder, ranks, script, **environment)) as job:
        job.wait_until_it_steps()
        yield job


def holds_a_trace(pid: int) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "rankscope-trace" in str(link.readlink()):
                return True
    return False
