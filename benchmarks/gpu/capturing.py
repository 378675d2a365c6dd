"""One capture of a running job through the command line, and what the job's own record says about the same time."""

from __future__ import annotations

import bisect
import gzip
import json
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.jobs import TrainingJob
from benchmarks.running import RunningDaemon

CAPTURE_SECONDS = 100.0
SETTLE_SECONDS = 0.5
# What libkineto says that matters here, on the job's stderr with KINETO_LOG_LEVEL=0.
_TELLING = re.compile(r"late|in the past|refus|fail|error|warn|not start|CUPTI|teardown|finaliz|overflow|dropp", re.I)


@dataclass(frozen=True)
class Captured:
    flags: tuple[str, ...]
    status: int
    report: dict[str, Any]  # empty where none was printed
    stderr: str
    asked_unix_seconds: float
    answered_unix_seconds: float
    kernels: list[dict[str, Any]] = field(default_factory=list)  # per rank, see `look_into`

    @property
    def ranks(self) -> list[dict[str, Any]]:
        return list(self.report.get("ranks", ()))

    @property
    def delivered(self) -> bool:
        return self.status == 0 and all(rank["state"] == "analysed" for rank in self.ranks) and bool(self.ranks)

    @property
    def latency_seconds(self) -> float | None:
        starts = [rank["start_unix_ms"] for rank in self.ranks if rank.get("start_unix_ms")]
        return (min(starts) - self.report["requested_unix_ms"]) / 1e3 if starts else None

    @property
    def why_not(self) -> str:
        errors = [str(rank["error"]) for rank in self.ranks if rank.get("error")]
        return "; ".join(errors) or self.stderr.strip()[-300:] or f"exit status {self.status}"


def capture(watching: RunningDaemon, job: TrainingJob, name: str, flags: tuple[str, ...], output: Path) -> Captured:
    command = [sys.executable, "-m", "rankscope.cli.main", "capture", "--connect", watching.grpc_target]
    command += ["--run", name, "--ranks", "all", "--json", "--output", str(output), *flags]
    asked = time.time()
    done = subprocess.run(command, capture_output=True, text=True, timeout=CAPTURE_SECONDS, check=False)
    answered = time.time()
    job.check()
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = {}
    files = [Path(rank["file"]) for rank in report.get("ranks", ()) if rank.get("file")]
    looked = [look_into(file) for file in files if file.is_absolute() and file.name.endswith(".json.gz")]
    return Captured(flags, done.returncode, report, done.stderr, asked, answered, looked)


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds by the job's own record: medians, and means behind them."""

    before: float
    during: float | None
    after: float | None
    before_mean: float
    after_mean: float | None
    steps: tuple[int, int, int]

    @property
    def after_ratio(self) -> float | None:
        return None if self.after is None else self.after / self.before

    @property
    def during_ratio(self) -> float | None:
        return None if self.during is None else self.during / self.before


def step_times(job: TrainingJob, one: Captured, before_seconds: float, after_seconds: float) -> StepTimes:
    """Waits until enough has come after the capture."""
    time.sleep(max(0.0, one.answered_unix_seconds + SETTLE_SECONDS + after_seconds + 0.5 - time.time()))
    job.check()
    steps = job.steps()
    before = steps.between(one.asked_unix_seconds - before_seconds, one.asked_unix_seconds)
    ready = one.answered_unix_seconds + SETTLE_SECONDS
    after = steps.between(ready, ready + after_seconds)
    during = np.array([])
    if one.ranks and one.ranks[0].get("start_unix_ms"):
        during = during_millis(job, one)
    return StepTimes(
        before=float(np.median(before)),
        during=float(np.median(during)) if len(during) else None,
        after=float(np.median(after)) if len(after) else None,
        before_mean=float(before.mean()),
        after_mean=float(after.mean()) if len(after) else None,
        steps=(len(before), len(during), len(after)),
    )


def during_millis(job: TrainingJob, one: Captured, rank: int = 0) -> np.ndarray:
    """Device time of the very steps that were captured: those that the host ended within the artifact. It may be some
    steps ahead of the device."""
    entry = one.ranks[rank]
    start = entry["start_unix_ms"] / 1e3
    steps = job.steps(rank)
    first = int(np.searchsorted(steps.host_end, start + 0.001, side="right"))
    if entry.get("steps"):
        return steps.first(first, entry["steps"])
    span = (entry.get("summary") or {}).get("span_seconds") or 0.0
    return steps.first(first, int(np.searchsorted(steps.host_end, start + span, side="right")) - first)


def look_into(path: Path) -> dict[str, Any]:
    """What an artifact holds, read without our own reader: launches per step and how many of them have their kernel.
    Where the device's tracing began late, the first steps lack kernels."""
    text = gzip.decompress(path.read_bytes())
    trace = json.loads(text)
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ends = sorted(
        event["ts"] + event["dur"]
        for event in events
        if str(event.get("name", "")).startswith("Optimizer.step#") and event.get("cat") == "user_annotation"
    )
    ran = {
        event["args"]["correlation"] for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    }
    launches, matched = Counter[int](), Counter[int]()
    for event in events:
        if event.get("cat") not in ("cuda_runtime", "cuda_driver") or not re.search(
            "Launch|Memcpy|Memset", event["name"]
        ):
            continue
        step = bisect.bisect_left(ends, event["ts"])
        launches[step] += 1
        matched[step] += event["args"].get("correlation") in ran
    return {
        "file": path.name,
        "json_bytes": len(text),
        "gzip_bytes": path.stat().st_size,
        "events": len(events),
        "optimizer_steps": len(ends),
        "kernels": sum(event.get("cat") == "kernel" for event in events),
        "collective_kernels": sorted({event["name"][:60] for event in events if "nccl" in str(event["name"]).lower()})[
            :8
        ],
        "launches_per_step": [launches[step] for step in range(min(len(ends), 40))],
        "matched_per_step": [matched[step] for step in range(min(len(ends), 40))],
        "categories": dict(Counter(str(event.get("cat")) for event in events).most_common(12)),
    }


def libkineto_said(job: TrainingJob, rank: int = 0, lines: int = 12) -> list[str]:
    found = [line.strip()[-220:] for line in job.log(rank).splitlines() if _TELLING.search(line)]
    counted = Counter(re.sub(r"\d+", "#", line) for line in found)
    shown: dict[str, str] = {}
    for line in found:
        key = re.sub(r"\d+", "#", line)
        shown[key] = f"{counted[key]}× {line}" if counted[key] > 1 else line
    return list(shown.values())[-lines:]
