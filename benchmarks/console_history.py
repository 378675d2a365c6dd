"""What the console costs with a run of 4,096 ranks: taking a tick, keeping it, and answering from it. CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from benchmarks.fleets import hold, rank_window
from benchmarks.reporting import Row, between
from benchmarks.statistics import spread_of
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.operator.console.history import MAX_BYTES, History
from rankscope.operator.console.run_views import heatmap, rank_history, run_detail
from rankscope.operator.console.signals import SIGNALS
from rankscope.operator.correlation.correlator import JobState, LostSeconds
from rankscope.operator.correlation.daemon_windows import HeldWindow, HeldWindows
from rankscope.v1.window_pb2 import GpuUsage, Memory

RANKS = 4096
TICKS = 1800  # an hour
TICK_SECONDS = 2.0
ROUNDS = 7
COLUMNS = 300
RUN = "team/llama"
_GPU = GpuUsage(
    gpus=1,
    utilization_ratio=0.9,
    tensor_active_ratio=0.4,
    sm_clock_hertz=1.9e9,
    power_watts=600,
    temperature_celsius=60,
    memory_used_bytes=1 << 36,
)


def measure() -> list[Row]:
    history = History(LostSeconds(), clock=lambda: 0.0)
    fleet = _fleet()
    taking = [_take(history, fleet, TICK_SECONDS * (1 + number)) for number in range(TICKS)]
    view = history.run(RUN)
    if view is None or len(view.signals) != len(SIGNALS) or history.bytes > MAX_BYTES:
        raise RuntimeError(f"the history has {history.bytes} bytes of {view and view.signals}: not what was made")
    header, matrix = heatmap(view, "self_seconds", 0.0, COLUMNS)
    answers: dict[str, Callable[[], object]] = {
        f"heat map of {len(header.starts)} columns ({len(matrix) / 1e6:.1f} MB)": lambda: heatmap(
            view, "self_seconds", 0.0, COLUMNS
        ),
        "one run": lambda: msgspec.json.encode(run_detail(view)),
        "one rank": lambda: msgspec.json.encode(rank_history(view, RANKS // 2)),
    }
    tick_bytes = view.ticks[-1].bytes / RANKS
    return [
        _row("a tick, share of a core", [100 * seconds / TICK_SECONDS for seconds in taking], "%", 1.0),
        Row(
            f"console: {RANKS:,} ranks, kept per rank and hour", tick_bytes * 3600 / TICK_SECONDS / 1e3, "kB", digits=0
        ),
        *(_row(name, [1e3 * _cpu_seconds(answer) for _ in range(ROUNDS)], "ms") for name, answer in answers.items()),
    ]


def _row(name: str, values: list[float], unit: str, target: float | None = None) -> Row:
    spread = spread_of(values)
    return Row(f"console: {RANKS:,} ranks, {name}", spread.median, unit, between(spread.low, spread.high), target)


def _fleet() -> dict[int, HeldWindow]:
    """With every signal."""
    windows = [rank_window(rank, RANKS) for rank in range(RANKS)]
    for rank, window in enumerate(windows):
        more = {"mfu_ratio": 0.4, "host_seconds": 0.05, "run_ahead_seconds": 0.01, "tokens_per_step": 4096.0}
        window.figures.update(more)
        window.gpu.CopyFrom(_GPU)
        window.memory.CopyFrom(Memory(allocated_bytes=1 << 35))
        place = window.identity.coordinates
        place.pipeline, place.tensor, place.data = rank % 4, rank // 4 % 8, rank // 32
    return hold(*windows)


def _take(history: History, fleet: dict[int, HeldWindow], now: float) -> float:
    for window in fleet.values():
        window.heard_monotonic = now
    healthy = Verdict(Kind.HEALTHY, "")
    compared = dict.fromkeys(fleet, (0.09, 0.01))  # as on GPUs
    state = JobState(RUN, RANKS, healthy, 1.0, now, RANKS, 0.1, 0.4, 0.1, HeldWindows(fleet, compared), now)
    return _cpu_seconds(lambda: history((state,)))


def _cpu_seconds(act: Callable[[], object]) -> float:
    started = time.thread_time()
    act()
    return time.thread_time() - started
