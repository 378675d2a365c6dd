"""Live bus bandwidth against nccl-tests' formula: collectives of known size, timed by the job itself
(bandwidth_job.py), beside what `rankscope up` says of each; one table.

    python3 -m benchmarks.gpu.bandwidth [--megabytes 32]"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import grpc

from benchmarks.gpu.lab import RANKS, lab_job, multi_process_service, probe_folder
from benchmarks.gpu.reporting import Report
from benchmarks.running import daemon
from rankscope.v1.job_service_pb2 import ListJobsRequest
from rankscope.v1.job_service_pb2_grpc import JobServiceStub

# Of nccl-tests, for `n` ranks.
FACTORS = {
    "all_reduce": 2 * (RANKS - 1) / RANKS,
    "all_gather": (RANKS - 1) / RANKS,
    "reduce_scatter": (RANKS - 1) / RANKS,
}
ERROR_RATIO = 0.05
EVERY_SECONDS = 1.0


def measure(asked: argparse.Namespace, report: Report, probe: Path) -> None:
    live: dict[str, dict[int, list[float]]] = {name: {} for name in FACTORS}
    with multi_process_service() as environment, daemon(command="up") as watching:
        arguments = ["--megabytes", str(asked.megabytes)]
        job = lab_job("bandwidth_job.py", arguments, cpu=False, environment=environment, probe=probe, label="bandwidth")
        with job as running, grpc.insecure_channel(watching.grpc_target) as channel:
            jobs = JobServiceStub(channel)
            while running.running:
                running.check(may_end=True)
                for status in jobs.ListJobs(ListJobsRequest()).jobs:
                    for window in status.ranks:
                        for rate in window.collectives:
                            if rate.function in live and rate.HasField("bus_bytes_per_second"):
                                of_rank = live[rate.function].setdefault(window.identity.rank, [])
                                of_rank.append(rate.bus_bytes_per_second / 1e9)
                time.sleep(EVERY_SECONDS)
            told = [running.fact(f"bandwidth-{rank}.json") or {} for rank in range(RANKS)]
    for name, factor in FACTORS.items():
        seconds = statistics.mean(one[name] for one in told)
        true = (asked.megabytes << 20) / seconds / 1e9 * factor
        said = max((statistics.median(values) for values in live[name].values()), default=float("nan"))
        error = said / true - 1
        text = f"{said:.3f} GB/s, by the job's own events {true:.3f} ({100 * error:+.1f} %)"
        report.add(f"{name}, {asked.megabytes} MiB", text, f"within {ERROR_RATIO:.0%}", abs(error) <= ERROR_RATIO)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=32, help="of the whole array")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    asked = parser.parse_args()
    # Ended by `timeout`: nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = Report("Bus bandwidth", asked.out, "bandwidth", asked.budget, judged=True)
    with tempfile.TemporaryDirectory(prefix="rankscope-probe-") as folder:
        probe = probe_folder(Path(folder))
        report.part("bandwidth", lambda: measure(asked, report, probe))
    return int(report.finish())


if __name__ == "__main__":
    sys.exit(main())
