"""Programs that write profiles where it goes wrong. `killed FOLDER ROUNDS`: writers that are killed at random moments;
a line for each has the samples it counted as stored, those that are found, those of the first writer, and the problem.
`full_disk FOLDER`: on a disk that gets full; a line for each stretch has the samples lost, found, and the problem."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rankscope.analysis.profiles.frames import Frame
from rankscope.daemon.profiles.database import Limits
from rankscope.daemon.profiles.store import ProfileStore, Query
from rankscope.daemon.samples import Recording, Span

SECOND = 10**9
EVER = Span(0, 1 << 60)
LIMITS = Limits(total_bytes=1 << 30, age_seconds=7 * 86400.0)


def recording(number: int, run: str, stacks: int = 1) -> Recording:
    """Of minute `number`, with stacks that were not there before."""
    places = range(number * stacks, (number + 1) * stacks)
    seen = [tuple(Frame(f"f{(n * step) % 97}", f"file{n}.py", n) for step in range(40)) for n in places]
    span = Span(60 * number * SECOND, (60 * number + 1) * SECOND)
    return Recording(run, 0, span, SECOND, Counter(seen))


def write(folder: Path, run: str, confirm: int) -> None:
    store = ProfileStore(folder, LIMITS, 60.0, unix_nanos=lambda: 0)
    for number in range(1, 1_000_000):
        store.record(recording(number, run))
        store.flush()
        os.write(confirm, b"x" * (store.status().samples_stored == number))


def killed(folder: Path, rounds: int) -> None:
    chosen = random.Random(17)
    for round_number in range(rounds):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            write(folder, f"run{round_number}", writing)
        os.close(writing)
        # Every other one is killed while it opens the store or begins its file.
        confirmed = len(os.read(reading, 1)) if round_number % 2 == 0 else 0
        time.sleep(chosen.uniform(0.0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while part := os.read(reading, 65536):
            confirmed += len(part)
        os.close(reading)
        store = ProfileStore(folder, LIMITS, 60.0, unix_nanos=lambda: 0)
        store.flush()
        found = store.query(Query(f"run{round_number}", EVER)).samples_total
        first = store.query(Query("run0", EVER)).samples_total
        problem = store.status().problem
        store.close()
        print(confirmed, found, first, problem.kind if problem else "none", flush=True)


def full_disk(folder: Path) -> None:
    store = ProfileStore(folder / "profiles", replace(LIMITS, free_ratio=0.0), 60.0, unix_nanos=lambda: 0)
    filling = folder / "filling"
    for number, stacks in ((1, 1), (2, 300), (3, 1)):
        if number == 2:
            with filling.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    pass
        else:
            filling.unlink(missing_ok=True)
        store.record(recording(number, "run", stacks))
        store.flush()
        status, found = store.status(), store.query(Query("run", EVER)).samples_total
        print(status.samples_lost, found, status.problem.kind if status.problem else "none", flush=True)
    store.close()


if __name__ == "__main__":
    if sys.argv[1] == "killed":
        killed(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        full_disk(Path(sys.argv[2]))
