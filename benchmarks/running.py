"""Real jobs and real daemons as processes of their own, and what the kernel says they used."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankscope.common.run_names import run_name
from rankscope.probe import injection
from tools.jobs.launcher import Ranks, start_ranks

PATIENCE_SECONDS = 240.0
POLL_SECONDS = 0.05
END_SECONDS = 10.0
ROOT = Path(__file__).resolve().parent.parent
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_ANNOUNCED = re.compile(r"rankscope (?:daemon|up): metrics (http://\S+), grpc (unix:\S+)")


class BenchmarkError(RuntimeError):
    """A benchmark could not run; says which process, why and what to look at."""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE_SECONDS) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up_at:
            raise BenchmarkError(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(POLL_SECONDS)


class Control:
    """One byte that all ranks of a job read before every step."""

    STOP, PLAIN, PROBED = range(3)

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes([self.PROBED]))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 1)

    def set(self, state: int) -> None:
        self._memory[0] = state


@dataclass(frozen=True)
class Job:
    ranks: Ranks
    control: Control

    @property
    def name(self) -> str:
        return self.ranks.folder.name

    def times_path(self, rank: int) -> Path:
        return self.ranks.folder / f"times-{rank}"


@contextlib.contextmanager
def job(load: str, ranks: int, environment: Mapping[str, str] | None = None) -> Iterator[Job]:
    """Ranks with the probe, each one past its first steps, and more in their environment if asked. `load` is one of
    those of `timed_ddp.py`. They end when the control byte, or their parent, is gone."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-bench-")))
        control = Control(folder / "control")
        path = os.pathsep.join(filter(None, (injection.inject_folder(), str(ROOT), os.environ.get("PYTHONPATH"))))
        base = {"PYTHONPATH": path, "RANKSCOPE_PROBE": "1", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": folder.name}
        started = stack.enter_context(
            start_ranks("timed_ddp.py", [str(folder), load], folder, ranks, {**base, **(environment or {})})
        )
        stack.callback(started.wait, END_SECONDS)
        stack.callback(control.set, Control.STOP)
        started.wait_for(lambda: started.have_written("started-{}"), "the first steps of all ranks", PATIENCE_SECONDS)
        yield Job(started, control)


@dataclass(frozen=True)
class RunningDaemon:
    process: subprocess.Popen[str]
    metrics_url: str
    grpc_target: str

    def metrics(self) -> dict[str, float]:
        """Series as the endpoint spells them."""
        text = urllib.request.urlopen(self.metrics_url, timeout=PATIENCE_SECONDS).read().decode()
        pairs = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, _, value in pairs}

    def run_name(self, words: str) -> str:
        """As the daemon calls the run with these words in its name."""
        series = next(name for name in self.metrics() if name.startswith("rankscope_rank_up") and words in name)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', series))
        return run_name(labels["run_namespace"], labels["run"])

    def ranks(self, job: str) -> int:
        """How many ranks of this job are being exported; other jobs may run on the machine."""
        return sum(name.startswith("rankscope_rank_up") and job in name for name in self.metrics())


@contextlib.contextmanager
def daemon(
    *flags: str, environment: Mapping[str, str] | None = None, command: str = "daemon"
) -> Iterator[RunningDaemon]:
    """With no settings but these flags, and more in its environment if asked. The command "up" judges as well."""
    with tempfile.TemporaryDirectory(prefix="rankscope-bench-") as folder:
        settings = ("--metrics-listen", "127.0.0.1:0", "--socket", f"{folder}/daemon.sock")
        settings += ("--capture-dir", f"{folder}/captures", "--profile-dir", f"{folder}/profiles", *flags)
        base = {key: value for key, value in os.environ.items() if not key.startswith("RANKSCOPE_")}
        log = Path(folder) / "log"
        with log.open("w") as writing:
            words = [sys.executable, "-m", "rankscope.cli.main", command, *settings]
            process = subprocess.Popen(words, env=base | dict(environment or {}), stderr=writing, text=True)
        try:

            def announced() -> bool:
                if process.poll() is not None:
                    raise BenchmarkError(f"the daemon ended with {process.returncode}: {log.read_text()[-2000:]}")
                return _ANNOUNCED.search(log.read_text()) is not None

            wait_until(announced, "the daemon listened")
            found = _ANNOUNCED.search(log.read_text())
            assert found is not None
            yield RunningDaemon(process, found[1], found[2])
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def await_ranks(watching: RunningDaemon, running: Job) -> None:
    wait_until(lambda: watching.ranks(running.name) == len(running.ranks.processes), "the daemon had found all ranks")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of its children that were waited for, and of those that still run."""
    # The name in parentheses may hold spaces; fields are counted from behind it.
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ended = sum(int(field) for field in stat[11:15]) / TICKS_PER_SECOND
    running = 0.0
    for child in child_pids(pid):
        with contextlib.suppress(OSError):
            running += cpu_seconds(child)
    return ended + running


def child_pids(pid: int) -> list[int]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def memory_bytes(pid: int, kind: str) -> int:
    """`Rss` or `Pss` of one process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:")), 0)
