"""`python -m tests.fuzz --seconds 600 --jobs 16`: every target at once, a table at the end, status 1 if anything was
found. `--state FOLDER` keeps what was learned: a second run goes on from there, and its time counts together."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz import targets
from tests.fuzz.fuzzing import Finding
from tests.fuzz.reporting import print_progress, print_table
from tests.fuzz.working import keep_finding, last_tried

ROOT = Path(__file__).resolve().parent.parent.parent
# The source roots, for where nothing is installed.
SOURCES = ("proto", "analysis", "daemon", "operator", "cli")
HUNG_SECONDS = 90.0
LOOK_SECONDS = 1.0
PROGRESS_SECONDS = 15.0


@dataclass
class Worker:
    name: str
    seed: int
    folder: Path
    ends_at: float
    child: subprocess.Popen[bytes]
    tried: int = -1
    moved_at: float = field(default_factory=time.monotonic)


def main() -> int:
    asked = _arguments()
    if asked.reproduce:
        sys.path[:0] = [str(ROOT / source) for source in SOURCES]
        targets.load(asked.target[0]).run(asked.reproduce.read_bytes())
        print("nothing happened")
        return 0
    state = asked.state or Path(tempfile.mkdtemp(prefix="rankscope-fuzz-"))
    state.mkdir(parents=True, exist_ok=True)
    names = asked.target or targets.names()
    waiting = [(name, number) for number in range(max(1, asked.jobs // len(names))) for name in names]
    running: list[Worker] = []
    absent: dict[str, str] = {}
    told_at = time.monotonic()
    seeds: dict[str, list[int]] = {name: [] for name in names}
    while waiting or running:
        while waiting and len(running) < asked.jobs:
            name, number = waiting.pop(0)
            seed = asked.seed * 1000 + number
            seeds[name].append(seed)
            running.append(_start(state, name, seed, asked.seconds))
        time.sleep(LOOK_SECONDS)
        for worker in list(running):
            again = _look(worker, absent)
            if again is not worker:
                running.remove(worker)
            if again is not None and again is not worker:
                seeds[worker.name].append(again.seed)
                running.append(again)
        if time.monotonic() - told_at > PROGRESS_SECONDS:
            told_at = time.monotonic()
            print_progress([(worker.name, _read(worker.folder, worker.seed)) for worker in running])
    return _conclude(state, names, seeds, absent, asked)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", action="append", choices=targets.names(), help="may be given more than once; all")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target (60)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="folder for the corpus, the findings and the figures")
    parser.add_argument("-o", "--output", type=Path, help="write the figures there as well")
    parser.add_argument("--reproduce", type=Path, metavar="FILE", help="run one input on the --target and stop")
    return parser.parse_args()


def _start(state: Path, name: str, seed: int, seconds: float) -> Worker:
    folder = state / name
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"{seed}.*"):
        old.unlink()
    paths = [str(ROOT), *(str(ROOT / source) for source in SOURCES), os.environ.get("PYTHONPATH", "")]
    # One thread each: the processes are the parallel part, and the sums of CPU time stay honest.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONHASHSEED": "0",
        "PYTHONFAULTHANDLER": "1",  # where it was when it died
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.fuzz.working", name, str(folder), str(seconds), str(seed)]
    with (folder / f"{seed}.log").open("wb") as log:
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    return Worker(name, seed, folder, time.monotonic() + seconds, child)


def _look(worker: Worker, absent: dict[str, str]) -> Worker | None:
    """The worker itself while it is well, None when it is done, another one where an input killed it."""
    status = worker.child.poll()
    tried = worker.folder / f"{worker.seed}.tried"
    if status is None:
        count, data = last_tried(tried) if tried.is_file() and tried.stat().st_size else (-1, b"")
        if count != worker.tried:
            worker.tried, worker.moved_at = count, time.monotonic()
        if time.monotonic() - worker.moved_at < HUNG_SECONDS:
            return worker
        worker.child.send_signal(signal.SIGKILL)
        worker.child.wait()
        keep_finding(worker.folder, Finding("Hang", "", f"no answer for {HUNG_SECONDS} s", data))
    elif status == 0:
        tried.unlink()
        return None
    else:
        text = (worker.folder / f"{worker.seed}.log").read_text(errors="replace")
        if not tried.is_file() or not tried.stat().st_size:
            absent[worker.name] = text.strip().splitlines()[-1] if text.strip() else f"status {status}"
            return None
        _, data = last_tried(tried)
        keep_finding(worker.folder, Finding("Died", f"status {status}", text, data))
    left = worker.ends_at - time.monotonic()
    return _start(worker.folder.parent, worker.name, worker.seed + 100, left) if left > LOOK_SECONDS else None


def _read(folder: Path, seed: int) -> dict[str, Any]:
    try:
        told = json.loads((folder / f"{seed}.json").read_text())
    except (OSError, ValueError):
        return {}
    assert isinstance(told, dict)
    return told


def _conclude(
    state: Path, names: Sequence[str], seeds: dict[str, list[int]], absent: dict[str, str], asked: argparse.Namespace
) -> int:
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        folder = state / name
        told = [one for seed in seeds[name] if (one := _read(folder, seed))]
        total = folder / "total.json"
        before = json.loads(total.read_text()) if total.is_file() else {}
        found = sorted(path.name for path in (folder / "findings").glob("*") if path.suffix != ".txt")
        rows[name] = {
            # Side by side counts once: this is how long the target was fuzzed, not how much work that was.
            "seconds": round(before.get("seconds", 0) + max((one["seconds"] for one in told), default=0), 1),
            "executions": before.get("executions", 0) + sum(one["executions"] for one in told),
            "places": max((one["places"] for one in told), default=0),
            "corpus": len(list((folder / "corpus").glob("*"))),
            "slowest_cpu_seconds": max((one["slowest_cpu_seconds"] for one in told), default=0),
            "grown_mebibytes": max((one["grown_mebibytes"] for one in told), default=0),
            "findings": found,
            "not_here": absent.get(name, ""),
        }
        if not absent.get(name):
            total.write_text(json.dumps(rows[name]))
    figures = {"python": platform.python_version(), "machine": platform.machine(), "jobs": asked.jobs, "targets": rows}
    (state / "figures.json").write_text(json.dumps(figures, indent=1))
    if asked.output:
        asked.output.write_text(json.dumps(figures, indent=1))
    print_table(rows, state)
    return 1 if any(row["findings"] for row in rows.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
