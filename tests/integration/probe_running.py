"""Runs training scripts with the probe injected and reads their rings as the daemon does."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rankscope.daemon.procfs import read_stat
from rankscope.daemon.samples import Problem, RankProcess, Span, StepSample
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.probe import injection
from tests.support.waiting import wait_until

# Importing torch takes two minutes on a machine with fifty others at work.
DEADLINE_SECONDS = 280.0
LIBKINETOS_OWN = ("USDT:", "ERROR: External init callback")
# The probe of this checkout, wherever another one is installed.
PROBE_PATH = os.pathsep.join([injection.inject_folder(), str(Path(injection.__file__).parents[2])])
# The script ends when the test closes its stdin, so that nothing depends on timing.
WAIT_FOR_THE_TEST = "\nprint('done', flush=True)\nsys.stdin.read()\n"
# For scripts of two ranks with `rank`: rank 1 comes later than rank 0 by LATE_SECONDS, however late rank 0 is.
LATE_SECONDS = 0.5
COME_LATE = f"""
import itertools, os, time
calls_so_far = itertools.count()
def come_late():
    mark = sys.argv[1] + "-call-%d" % next(calls_so_far)
    if rank == 0:
        open(mark, "w").close()
        return
    while not os.path.exists(mark):
        time.sleep(0.005)
    time.sleep({LATE_SECONDS})
"""


class PipedJob:
    """Processes of one script that a test talks to by stdin and stdout."""

    def __init__(self, folder: Path, script: str, ranks: int, environment: Mapping[str, str]) -> None:
        path = folder / "train.py"
        path.write_text(script)
        base = {name: value for name, value in os.environ.items() if not name.startswith(("RANKSCOPE", "KINETO"))}
        base |= {"PYTHONPATH": PROBE_PATH, "OMP_NUM_THREADS": "1", **environment}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(path), str(folder / "rendezvous")],
                env=base | {"RANK": str(rank), "WORLD_SIZE": str(ranks)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        self.ranks = [
            RankProcess("job", rank, rank, ranks, one.pid, read_stat(f"/proc/{one.pid}").start_ticks, (one.pid,))
            for rank, one in enumerate(self.processes)
        ]

    def finish(self) -> list[tuple[int, str]]:
        """Exit code and stderr of each, without libkineto's own lines."""
        ends = []
        for process in self.processes:
            _, errors = process.communicate(timeout=DEADLINE_SECONDS)
            ours = [line for line in errors.splitlines(keepends=True) if not line.startswith(LIBKINETOS_OWN)]
            ends.append((process.returncode, "".join(ours)))
        return ends

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


class Job(PipedJob):
    """Seen through a collector."""

    def __init__(self, folder: Path, script: str, ranks: int = 1, **environment: str) -> None:
        super().__init__(folder, script + WAIT_FOR_THE_TEST, ranks, environment)
        self.collector = StepsCollector()
        self._started_ns = time.time_ns()

    def wait_until_done(self) -> None:
        for process in self.processes:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert line == "done\n", line + process.stderr.read()

    def look(self) -> list[StepSample | Problem | None]:
        found = self.collector.collect(self.ranks, Span(self._started_ns, time.time_ns()))
        return [found.get(rank.key) for rank in self.ranks]

    def samples(self) -> list[StepSample]:
        found = self.look()
        assert all(isinstance(sample, StepSample) for sample in found), found
        return [sample for sample in found if isinstance(sample, StepSample)]

    def look_until(self, condition: Callable[[list[StepSample | Problem | None]], bool]) -> None:
        found: list[StepSample | Problem | None] = []

        def is_met() -> bool:
            found[:] = self.look()
            return condition(found)

        wait_until(is_met, lambda: found, DEADLINE_SECONDS)


@contextlib.contextmanager
def running(folder: Path, script: str, ranks: int = 1, **environment: str) -> Iterator[Job]:
    with contextlib.closing(Job(folder, script, ranks, **environment)) as job:
        yield job
