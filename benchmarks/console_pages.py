"""The console with 4,096 simulated ranks: frames in Chromium while the pointer moves over the heat map, the first view,
and what three viewers cost the server, which is a process of its own (`python -m benchmarks.console_pages`)."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from benchmarks.reporting import Row, between
from benchmarks.statistics import spread_of
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.console.api import STATIC
from rankscope.operator.console.server import ConsoleServer
from tools.chromium import Browser, Page, browser
from tools.played_runs import RUN, TICK_SECONDS, Figures, Played

RANKS = 4096
SLOW_RANK = 2741
TICKS = 450  # a quarter of an hour
VIEWERS = 3
VIEWS = 5
MEASURED_SECONDS = 20.0
HEAT_MAP = ".heatmap canvas"
SLOW = Verdict(Kind.SLOW_RANK, "", Severity.ALARM, culprits=(SLOW_RANK,), impact_ratio=0.3)
# In the page, from its beginning: when the heat map is drawn, and the times of frames.
WATCH = f"""(() => {{
  window.frames_seen = [];
  const frame = (now) => {{
    window.frames_seen.push(now);
    const canvas = document.querySelector('{HEAT_MAP}');
    if (window.first_view === undefined && canvas !== null && canvas.width > 0) window.first_view = performance.now();
    requestAnimationFrame(frame);
  }};
  requestAnimationFrame(frame);
}})()"""


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, serving() as (url, costs), browser(Path(folder)) as chromium:
        idle = _costs(costs)
        views = [_view(chromium, url) for _ in range(VIEWS)]
        pages = [page for page, _ in views[:VIEWERS]]
        for page, _ in views[VIEWERS:]:
            page.close()
        if any(page.value("document.hidden") for page in pages):
            raise RuntimeError("a hidden page asks less often")
        watched = _costs(costs)
        gaps = _move(pages[-1])
    first, times = spread_of([seconds for _, seconds in views]), sorted(gaps)
    frame = sum(times) / len(times)
    rate = f"{1000 / frame:.0f} a second; 99th percentile {times[int(0.99 * len(times))]:.0f} ms"
    size = sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) / 1e6
    return [
        Row(f"console: {RANKS:,} ranks, time between frames", frame, "ms", rate, 1000 / 30, 1),
        Row(f"console: {VIEWERS} viewers, CPU", watched, "%", f"without viewers {idle:.1f}", 10.0, 1),
        Row("console: first view of the run", first.median, "s", between(first.low, first.high), 1.0),
        Row("console: assets", size, "MB", target=1.0),
    ]


def _view(chromium: Browser, url: str) -> tuple[Page, float]:
    page = chromium.page()
    page.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
    page.open(f"{url}?run={RUN}", 1280, 900)
    return page, page.wait_for("window.first_view") / 1000


def _move(page: Page) -> list[float]:
    """Milliseconds between frames while the pointer moves over the heat map."""
    page.call("Page.bringToFront")
    left, top = page.center(HEAT_MAP)
    page.value("window.frames_seen.length = 0")
    deadline = time.monotonic() + MEASURED_SECONDS
    turn = 0.0
    while time.monotonic() < deadline:
        turn += 0.05
        page.point(left + 400 * math.sin(turn), top + 200 * math.sin(1.7 * turn))
    times = page.value("window.frames_seen")
    return [after - before for before, after in itertools.pairwise(times)]


def _costs(server: IO[str]) -> float:
    """CPU in percent of a core over the next ticks."""
    lines = [json.loads(server.readline()) for _ in range(2 + int(MEASURED_SECONDS / TICK_SECONDS))][1:]
    (begin, before), (end, after) = lines[0], lines[-1]
    return 100 * float(after - before) / float(end - begin)


@contextmanager
def serving() -> Iterator[tuple[str, IO[str]]]:
    """The address, and a line per tick: time, and CPU time of the console until then."""
    command = [sys.executable, "-m", "benchmarks.console_pages"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.stdout
        finally:
            process.terminate()


def figures(seed: int) -> Figures:
    chosen = random.Random(seed)

    def of_rank(rank: int) -> Mapping[str, float]:
        own = 0.4 * chosen.gauss(1.0, 0.01) + (0.2 if rank == SLOW_RANK else 0.0)
        names = ("forward", "backward", "optimizer", "other", "input")
        return {
            "steps": 4.0,
            "step_seconds": 0.62,
            "self_seconds": own,
            "wait_seconds": 0.62 - own,
            **{f"{name}_seconds": own / len(names) for name in names},
            "mfu_ratio": 0.4,
            "cpu_ratio": 1.1,
            "resident_bytes": 3e10,
            "memory_allocated_bytes": 1e11,
            "gpu_utilization_ratio": 0.9,
            "gpu_sm_clock_hertz": 1.7e9,
            "gpu_power_watts": 600.0,
        }

    return of_rank


def played_run(ticks: int, ranks: int = RANKS) -> tuple[Played, list[Figures]]:
    """A run until now, and the figures of its ticks, one after the other."""
    variants = [figures(seed) for seed in range(8)]
    played = Played(begin=time.time() - ticks * TICK_SECONDS)
    for tick in range(ticks):
        played.tick(variants[tick % len(variants)], ranks=ranks, verdict=SLOW, pace=(0.62, 0.4, 0.3))
    return played, variants


def serve() -> None:
    played, variants = played_run(TICKS)
    console = ConsoleServer(played.history, "127.0.0.1", 0)
    console.start()
    print(console.url, flush=True)
    next_tick, tick = time.monotonic(), 0
    begin, playing, history = time.process_time(), time.thread_time(), played.history_cpu_seconds
    while True:
        next_tick += TICK_SECONDS
        time.sleep(max(0.0, next_tick - time.monotonic()))
        tick += 1
        played.tick(variants[tick % len(variants)], ranks=RANKS, verdict=SLOW, pace=(0.62, 0.4, 0.3))
        of_playing = time.thread_time() - playing - (played.history_cpu_seconds - history)
        print(json.dumps([time.monotonic(), time.process_time() - begin - of_playing]), flush=True)


if __name__ == "__main__":
    serve()
