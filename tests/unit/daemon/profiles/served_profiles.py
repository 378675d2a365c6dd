"""A daemon whose sockets and store of profiles are real, and whose ranks and recordings are the test's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.daemon.loop import Daemon
from rankscope.daemon.samples import Problem, RankProcess, Recording, Span, StallDump
from tests.unit.daemon import window_makers as make

SECOND = 10**9
MAIN = Frame("main", "/app/train.py", 10)
LOAD: Stack = (Frame("load_image", "/app/dataset.py", 88), MAIN)
STEP: Stack = (Frame("step", "/x/site-packages/torch/optim/adam.py", 3), MAIN)
RUN = make.rank(0).job


def dump(rank: RankProcess) -> StallDump | Problem:
    if rank.rank == 2:
        return Problem("stacks", "permission", "rank 2: not\x1b[2J allowed")
    return StallDump("input", LOAD * 100 if rank.rank == 1 else LOAD)


@contextmanager
def served_profiles(folder: Path, *jobs: str) -> Iterator[Daemon]:
    """Three ranks of RUN, and one of each of `jobs`."""
    config = make.config(socket=str(folder / "d.sock"), profile_dir=str(folder / "profiles"))
    # Pids that no process of this machine has.
    ranks = [replace(make.rank(number, pid=(1 << 22) + number), pod=f"pod-{number}") for number in range(3)]
    more = [make.rank(0, job=job, pid=5000 + number) for number, job in enumerate(jobs)]
    daemon = Daemon(config, collectors=make.collectors(*ranks, *more), clock=make.FakeClock(seconds=-1.0))
    daemon._collectors.stacks.dump = dump  # type: ignore[attr-defined]
    daemon.start()
    try:
        daemon.tick(make.span(0))
        yield daemon
    finally:
        daemon.stop()


def record(daemon: Daemon, rank: int, stacks: dict[Stack, int], seconds_ago: float = 60.0, run: str = RUN) -> None:
    """As the stack collector hands it over."""
    start = time.time_ns() - round(seconds_ago * SECOND)
    recording = Recording(run, rank, Span(start, start + 4 * SECOND), SECOND // 10, Counter(stacks))
    daemon._collectors.stacks.keep(recording)  # type: ignore[attr-defined]
    assert daemon.profiles is not None
    assert daemon.profiles.flush(180)
