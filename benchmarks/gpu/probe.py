"""What the probe costs and says on a GPU: interleaved runs with and without it, and its ring read from outside.

    PYTHONPATH=daemon:analysis python3 benchmarks/gpu/probe.py [PAIRS [FIRST_WORKLOAD]]

Needs nothing but Python, torch and numpy. Prints one JSON object per workload."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from rankscope.analysis.models.device_peaks import peak_flops_per_second
from rankscope.daemon.samples import RankProcess, Span, StepSample
from rankscope.daemon.steps.collector import StepsCollector

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 6.0
WORKLOADS = (("launch-bound", "nccl", 1), ("compute-bound", "nccl", 1), ("launch-bound", "gloo", 2))


def launch(shape: str, backend: str, world: int, probe: bool) -> tuple[list[dict], list[StepSample]]:
    """One run; the last ranks' samples are read from outside while they wait to be let go."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": str(ROOT / "daemon/rankscope/probe/inject") if probe else "",
            "RANKSCOPE_PROBE": "1" if probe else "0",
        }
        command = [sys.executable, str(ROOT / "benchmarks/gpu/training.py"), shape, backend, str(SECONDS)]
        ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    lines = [json.loads(process.stdout.readline()) for process in ranks]
    samples = [read(process.pid, rank, world) for rank, process in enumerate(ranks)] if probe else []
    for process in ranks:
        process.communicate(b"\n", timeout=60)
    return lines, samples


def read(pid: int, rank: int, world: int) -> StepSample:
    start_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    found = RankProcess("gpu", rank, rank, world, pid, start_ticks, (pid,))
    now = time.time_ns()
    sample = StepsCollector().collect([found], Span(now - 2_000_000_000, now))[found.key]
    if not isinstance(sample, StepSample):
        raise SystemExit(f"rank {rank}: {sample.text}")
    return sample


def compare(shape: str, backend: str, world: int, pairs: int) -> dict:
    off, on, sample, line = [], [], None, {}
    for _ in range(pairs):
        off.append(statistics.median(entry["median_seconds"] for entry in launch(shape, backend, world, False)[0]))
        lines, samples = launch(shape, backend, world, True)
        on.append(statistics.median(entry["median_seconds"] for entry in lines))
        sample, line = samples[0], lines[0]
    ratios = sorted(b / a for a, b in zip(off, on, strict=True))
    measured = ~np.isnan(sample.forward_seconds)
    peak = peak_flops_per_second(sample.facts.device_name or "")
    step = float(np.median(sample.step_seconds))
    return {
        "workload": f"{shape}, {world} rank(s), {backend}",
        "step_off_ms": round(statistics.median(off) * 1e3, 3),
        "step_on_ms": round(statistics.median(on) * 1e3, 3),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_low": round(ratios[0], 4),
        "ratio_high": round(ratios[-1], 4),
        "pairs": pairs,
        "device": sample.facts.device_name,
        "steps_read": len(sample.step_seconds),
        "steps_total": sample.steps_total,
        "steps_lost": sample.steps_lost,
        "probe_step_ms": round(step * 1e3, 3),
        "script_step_ms": round(line["median_seconds"] * 1e3, 3),
        "ddp_sampled_share": round(float(measured.mean()), 4),
        "ddp_forward_ms": _milliseconds(sample.forward_seconds),
        "ddp_backward_ms": _milliseconds(sample.backward_seconds),
        "communication_ms": _milliseconds(sample.communication_seconds),
        "wait_ms": _milliseconds(sample.wait_seconds),
        "allocated_mib": round(sample.memory.get("allocated_bytes", 0) / 2**20, 1),
        "script_allocated_mib": round(line["allocated_bytes"] / 2**20, 1),
        "reserved_mib": round(sample.memory.get("reserved_bytes", 0) / 2**20, 1),
        "script_reserved_mib": round(line["reserved_bytes"] / 2**20, 1),
        "device_total_mib": round(sample.memory.get("total_bytes", 0) / 2**20),
        "collectives_enqueued": sample.collectives_enqueued,
        "collectives_completed": sample.collectives_completed,
        "mfu_ratio": round(line["flops_per_step"] / (step * peak), 4) if peak else None,
    }


def _milliseconds(seconds: np.ndarray) -> float | None:
    known = seconds[~np.isnan(seconds)]
    return round(float(np.median(known)) * 1e3, 4) if len(known) else None


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for shape, backend, world in WORKLOADS[int(sys.argv[2]) if len(sys.argv) > 2 else 0 :]:
        print(json.dumps(compare(shape, backend, world, pairs)), flush=True)


if __name__ == "__main__":
    main()
