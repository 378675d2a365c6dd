"""What reading GPUs costs: eight of them once a second, against a stub of the driver's library. The driver's own share
is measured where there is one (benchmarks/gpu)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.reporting import Row, between
from benchmarks.running import ROOT, BenchmarkError
from benchmarks.statistics import spread_of
from tools.nvml_stub import Script, build_stub

GPUS = 8
SETTLING_SECONDS = 5.0
SLICES = 6
SLICE_SECONDS = 10.0
# Both do nothing but wait; one of them reads GPUs meanwhile.
_PROGRAM = """
import sys, time
from rankscope.daemon.gpu.nvml import NvmlSource
source = NvmlSource(1.0)
if sys.argv[1] == "on":
    source.start()
    while len(source.latest().gpus) != int(sys.argv[2]):
        time.sleep(0.1)
print("ready", flush=True)
sys.stdin.read()
snapshot = source.latest()
print(snapshot.polls_total, snapshot.state.value, len(snapshot.gpus), snapshot.poll_seconds_total)
"""


def measure(slices: int = SLICES) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="rankscope-bench-") as name:
        folder = Path(name)
        library = build_stub(folder)
        # As on an H200 under load: GPM, counters of throttling, a process on every GPU.
        script = Script(folder / "script", gpus=GPUS)
        counters = {f"gpu.field.{field}": 0 for field in (74, 76, 269)}
        script.set({"gpu.gpm.2": 90.7, "gpu.gpm.5": 57.4, "gpu.processes": "412:1258291200", **counters})
        environment = script.environment(library)
        with _started("on", environment) as reading, _started("off", environment) as idle:
            time.sleep(SETTLING_SECONDS)
            looks = [(time.monotonic(), _cpu_seconds(reading.pid), _cpu_seconds(idle.pid))]
            for _ in range(slices):
                time.sleep(SLICE_SECONDS)
                looks.append((time.monotonic(), _cpu_seconds(reading.pid), _cpu_seconds(idle.pid)))
            polls, state, gpus, seconds = reading.communicate(timeout=60)[0].split()
            idle.communicate(timeout=60)
    expected = SETTLING_SECONDS + slices * SLICE_SECONDS
    if state != "ok" or int(gpus) != GPUS or int(polls) < 0.9 * expected:
        raise BenchmarkError(f"{polls} polls of {gpus} GPUs in {expected:.0f} s, at last {state}: it does not keep up")

    def percent(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
        used = (after[1] - before[1]) - (after[2] - before[2])
        return 100 * used / (after[0] - before[0])

    spread = spread_of([percent(before, after) for before, after in pairwise(looks)])
    raw = {"looks": looks, "polls": int(polls), "reading_seconds": float(seconds)}
    whole = percent(looks[0], looks[-1])
    name = f"gpu: CPU with {GPUS} stubbed GPUs once a second"
    return [Row(name, whole, "% core", between(spread.low, spread.high), 0.5, raw=raw)]


def _cpu_seconds(pid: int) -> float:
    """Of all threads, in nanoseconds of the scheduler: the ticks of /proc/<pid>/stat are too coarse for so little."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def _started(mode: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, mode, str(GPUS)],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        process.kill()
        raise BenchmarkError(f"the process that reads GPUs ({mode}) ended with {process.wait()}")
    return process
