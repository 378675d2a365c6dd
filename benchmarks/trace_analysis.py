"""`rankscope analyze trace` against Holistic Trace Analysis on the same file: one process each, taking turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.repeated_traces import write_repeated
from benchmarks.reporting import Row
from benchmarks.running import PATIENCE_SECONDS, ROOT, BenchmarkError
from benchmarks.statistics import Ratio, paired_ratio, spread_of

SOURCE = ROOT / "tests" / "data" / "h200" / "nccl_world1_3steps.json.gz"
# Just above what is promised, where both spend much of their time on being started, and one as a longer capture gives.
TRACE_BYTES_AND_ROUNDS = ((16_000_000, 5), (48_000_000, 3))
# At least five times faster, and no more memory.
TIME_TARGET_RATIO = 0.2
MEMORY_TARGET_RATIO = 1.0
# HTA rounds each event to whole microseconds, and takes waits for other streams for work.
AGREEMENT_RATIOS = {"span_us": 0.05, "compute_us": 0.05}


def measure() -> list[Row]:
    made = subprocess.run([ROOT / "tools" / "setup_hta.sh"], stderr=subprocess.PIPE, text=True)
    if made.returncode:
        raise BenchmarkError(made.stderr.strip())
    with tempfile.TemporaryDirectory(prefix="rankscope-bench-") as folder:
        return [row for size, rounds in TRACE_BYTES_AND_ROUNDS for row in _compare(Path(folder), size, rounds)]


def _compare(folder: Path, at_least_bytes: int, rounds: int) -> list[Row]:
    trace = folder / "trace.json"
    size = write_repeated(SOURCE, trace, at_least_bytes)
    ours_command = [sys.executable, "-m", "rankscope.cli.main", "analyze", "trace", str(trace), "--json"]
    hta_command = [str(ROOT / ".venv-hta" / "bin" / "python"), str(ROOT / "tools" / "hta_breakdown.py"), str(trace)]
    # As pip leaves them: with their bytecode, which a checkout in development may lack.
    cache = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HTA_"))} | cache
    ours, theirs = [], []
    for _ in range(1 + rounds):
        theirs.append(_run(hta_command, environment))
        ours.append(_run(ours_command, environment))
        _check(ours[-1][0]["ranks"][0], theirs[-1][0])
    ours, theirs = ours[1:], theirs[1:]
    return [
        _row("time", "seconds", "s", 1.0, ours, theirs, TIME_TARGET_RATIO, size),
        _row("peak memory", "peak_bytes", "MB", 1e6, ours, theirs, MEMORY_TARGET_RATIO, size),
    ]


def _run(command: list[str], environment: Mapping[str, str]) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """What it printed, and what it cost."""
    launcher = [sys.executable, "-S", "-E", str(ROOT / "benchmarks" / "measured.py")]
    done = subprocess.run(
        launcher + command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    *printed, cost = done.stdout.rstrip().splitlines() or [""]
    measured = json.loads(cost) if cost.startswith("{") else {"status": done.returncode}
    if measured["status"]:
        raise BenchmarkError(f"{' '.join(command[1:4])} ended with {measured['status']}: {done.stderr.strip()[-500:]}")
    return json.loads("\n".join(printed)), measured


def _check(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Only who answers the same question may be compared."""
    if "error" in theirs or any(
        abs(ours[key] - theirs[key]) > ratio * theirs[key] for key, ratio in AGREEMENT_RATIOS.items()
    ):
        found = {key: (ours[key], theirs.get(key)) for key in AGREEMENT_RATIOS}
        raise BenchmarkError(f"the breakdowns differ (ours, HTA's): {found} {theirs.get('error', '')}")


def _row(
    what: str,
    key: str,
    unit: str,
    scale: float,
    ours: list[tuple[Mapping[str, Any], Mapping[str, float]]],
    theirs: list[tuple[Mapping[str, Any], Mapping[str, float]]],
    target: float,
    size: int,
) -> Row:
    mine, its = [cost[key] / scale for _, cost in ours], [cost[key] / scale for _, cost in theirs]
    ratio: Ratio = paired_ratio(mine, its)
    shown = f"{spread_of(mine).median:.1f} against {spread_of(its).median:.1f} {unit}: 1/{1 / ratio.ratio:.1f}"
    return Row(
        f"trace of {size / 1e6:.0f} MB: {what}, of HTA's",
        ratio.ratio,
        "",
        f"{shown} ({ratio.low:.3f} – {ratio.high:.3f})",
        target,
        3,
        raw={
            "trace_bytes": size,
            "rankscope": mine,
            "hta": its,
            "times_less": 1 / ratio.ratio,
            "cpu_ratio": paired_ratio(
                [cost["cpu_seconds"] for _, cost in ours], [cost["cpu_seconds"] for _, cost in theirs]
            ).ratio,
        },
        noisy=ratio.low < target < ratio.high,
    )
