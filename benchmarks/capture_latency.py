"""From asking for a capture to the first thing it recorded, on a real 2-rank job, and how far apart the ranks began.

libkineto asks for work every 5 s, so that is what a capture waits for at worst; the rest is ours."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks.reporting import Row, between
from benchmarks.running import PATIENCE_SECONDS, BenchmarkError, await_ranks, daemon, job

CAPTURES = 20
RANKS = 2
POLL_SECONDS = 5.0
OURS_AT_MOST_SECONDS = 2.0


def measure() -> list[Row]:
    reports = []
    with job("heavy", RANKS, {"KINETO_USE_DAEMON": "1"}) as running, daemon() as watching:
        await_ranks(watching, running)
        name = watching.run_name(running.name)
        for _ in range(CAPTURES):
            reports.append(_capture(watching.grpc_target, name))
            running.ranks.check()
    waits = [(min(_starts(report)) - report["requested_unix_ms"]) / 1000 for report in reports]
    skews = [max(_starts(report)) - min(_starts(report)) for report in reports]
    low, p95 = np.quantile(waits, [0.05, 0.95])
    return [
        Row(
            f"captures: from asking to recording, 95th percentile of {CAPTURES}",
            float(p95),
            "s",
            f"{between(float(low), max(waits), 2)}, median {np.median(waits):.2f}",
            POLL_SECONDS + OURS_AT_MOST_SECONDS,
            2,
            raw={"seconds": waits},
        ),
        Row(
            "captures: ranks begin apart, median",
            float(np.median(skews)),
            "ms",
            f"at most {max(skews):.0f}",
            50.0,
            0,
            raw={"millis": skews},
        ),
    ]


def _capture(target: str, name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "rankscope.cli.main", "capture", "--connect", target, "--run", name]
    command += ["--ranks", "all", "--seconds", "0.3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    if done.returncode:
        raise BenchmarkError(f"a capture ended with {done.returncode}: {done.stderr[-500:]} {done.stdout[-1500:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _starts(report: dict[str, Any]) -> list[int]:
    return [rank["start_unix_ms"] for rank in report["ranks"]]
