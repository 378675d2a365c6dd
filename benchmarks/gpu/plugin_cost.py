"""What the NCCL plugin's events cost a step: with and without, in turns in one job (plugin_cost_job.py); one table.

python3 -m benchmarks.gpu.plugin_cost [--kinds ddp,fsdp2,small,graph] [--pairs 100]"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.gpu.lab import RANKS, lab_job, multi_process_service, probe_folder
from benchmarks.gpu.reporting import Report
from benchmarks.statistics import median_of_ratios

RATIO_AT_MOST = 1.01
MAX_SECONDS = 90.0


def measure(asked: argparse.Namespace, report: Report, probe: Path, kind: str) -> None:
    arguments = ["--kind", kind, "--pairs", str(asked.pairs)]
    with multi_process_service() as environment:
        job = lab_job("plugin_cost_job.py", arguments, cpu=False, environment=environment, probe=probe, label=kind)
        with job as running:
            running.wait_until_ended(MAX_SECONDS)
            told = [running.fact(f"cost-{rank}.json") or {} for rank in range(RANKS)]
    on, off = (np.median([one[name] for one in told], axis=0) for name in ("on", "off"))
    ratio = median_of_ratios(on.tolist(), off.tolist())
    recorded, recorded_off = told[0]["recorded"], told[0]["recorded_off"]
    interval = f"{ratio.low:.4f} – {ratio.high:.4f}"
    report.add(
        f"{kind} ({float(np.median(off)):.2f} ms), {len(on)} pairs",
        f"{ratio.ratio:.4f} × ({interval}); {recorded} operations recorded, {recorded_off} without",
        f"≤ {RATIO_AT_MOST:g} ×, none without",
        ratio.ratio <= RATIO_AT_MOST and recorded > 0 and not recorded_off,
    )
    report.raw[kind] = {"on_milliseconds": on.tolist(), "off_milliseconds": off.tolist()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="ddp,fsdp2,small,graph")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    asked = parser.parse_args()
    # Ended by `timeout`: nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = Report("Cost of the NCCL plugin", asked.out, "plugin_cost", asked.budget, judged=True)
    with tempfile.TemporaryDirectory(prefix="rankscope-probe-") as folder:
        probe = probe_folder(Path(folder))
        for kind in asked.kinds.split(","):
            report.part(kind, lambda kind=kind: measure(asked, report, probe, kind))
    return int(report.finish())


if __name__ == "__main__":
    sys.exit(main())
