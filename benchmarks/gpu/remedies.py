"""What remedies bring in truth: jobs in several variants, in turns (remedies_job.py), and a trace of each as it was.

python3 -m benchmarks.gpu.remedies [--jobs small,large] [--cpu]
python3 -m benchmarks.gpu.remedies --cpu --jobs cpu_straggler,cpu_input,cpu_input_one,cpu_even,cpu_loop,cpu_fsdp2

OUT/remedies.json has the milliseconds of a step by job and variant, OUT/remedies/ the traces."""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.lab import RANKS, lab_job, multi_process_service
from benchmarks.gpu.reporting import Report

MAX_SECONDS = 180.0


@dataclass(frozen=True)
class Job:
    flags: str
    ranks: int = 1


BATCHES = "--variants base,batch2,batch4,batch8 --traced base,batch2,batch4,batch8 --memory"
JOBS = {
    "small": Job(
        "--shape small --variants base,fused,forloop,graph,graph+fused,bf16,compiled,batch2,accumulate4,recompute"
        " --traced base,bf16,compiled,graph,recompute --steps 20"
    ),
    "small_forloop": Job("--shape small --variants forloop,base,fused --traced forloop --rounds 3"),
    "small_stacks": Job("--shape small --variants base --rounds 1 --stacks"),
    "large": Job(
        "--shape large --variants base,fused,graph,bf16,bf16+fused,tf32,compiled,batch2,accumulate4,recompute"
        " --traced base,bf16 --steps 4 --rounds 4"
    ),
    # No rule of a prediction was made with this one at hand.
    "medium": Job(
        "--shape medium --variants base,fused,graph,bf16,tf32,compiled,batch2,accumulate4,recompute --steps 12"
    ),
    "batch_small": Job(f"--shape small {BATCHES} --rounds 3"),
    "batch_large": Job(f"--shape large {BATCHES} --rounds 2 --steps 4"),
    "input": Job("--shape small --reads --workers 1 --variants base,workers2,workers8 --steps 20 --rounds 3"),
    "input_main": Job("--shape small --reads --workers 0 --variants base,workers8 --steps 20 --rounds 3"),
    "ddp": Job("--kind ddp --variants base,bucket1,bucket100,compressed,accumulate4 --steps 12", RANKS),
    "ddp_straggler": Job("--kind ddp --straggler --variants base,even", RANKS),
    "fsdp2": Job("--kind fsdp2 --variants base", RANKS),
    "hf": Job("--kind hf", RANKS),
}
# On a CPU, with sleeps that take most of the step: four ranks share the cores of a small machine.
_SLEEPING = "--batch 32 --work-ms 100 --rounds 3"
_SLOW = f"{_SLEEPING} --straggler --slow-ms 60 --variants base,even"
_READING = f"{_SLEEPING} --reads --workers 0 --variants base,workers2,memory"
CPU_JOBS = {
    "cpu_straggler": Job(f"--kind ddp {_SLOW}", RANKS),
    "cpu_loop": Job(f"--kind loop {_SLOW}", RANKS),
    "cpu_fsdp2": Job(f"--kind fsdp2 {_SLOW}", RANKS),
    "cpu_input": Job(f"--kind ddp {_READING}", RANKS),
    "cpu_input_one": Job(f"--kind ddp {_READING} --reading-rank 1", RANKS),
    "cpu_even": Job(f"--kind ddp {_SLEEPING}", RANKS),
}


def measure(report: Report, name: str, cpu: bool, traces: Path) -> None:
    job = (JOBS | CPU_JOBS)[name]
    flags = job.flags.split()
    if cpu:
        flags += ["--shape", "tiny", "--width", "64"]
    with (
        multi_process_service() as environment,
        lab_job("remedies_job.py", flags, cpu=cpu, ranks=job.ranks, environment=environment, label=name) as running,
    ):
        running.wait_until_ended(min(MAX_SECONDS, max(report.seconds_left, 1)))
        told = [running.fact(f"remedies-{rank}.json") or {} for rank in range(job.ranks)]
        for path in sorted(running.folder.glob("*.json.gz")):
            shutil.copyfile(path, traces / f"{name}-{path.name}")
    report.raw.setdefault("jobs", {})[name] = told
    first = told[0]["milliseconds"]
    base = next(iter(first))
    for variant in first:
        millis = statistics.median(one["milliseconds"][variant] for one in told)
        before = statistics.median(one["milliseconds"][base] for one in told)
        report.add(f"{name}, {variant}", f"{millis:.2f} ms, {100 * (millis / before - 1):+.1f} %")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--budget", type=float, default=400.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    # Ended by `timeout`: nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = Report("What remedies bring", asked.out, "remedies", asked.budget, judged=False)
    traces = asked.out / "remedies"
    traces.mkdir(parents=True, exist_ok=True)
    for name in asked.jobs.split(","):
        report.part(name, lambda name=name: measure(report, name, asked.cpu, traces), needs_seconds=20)
    return int(report.finish())


if __name__ == "__main__":
    sys.exit(main())
