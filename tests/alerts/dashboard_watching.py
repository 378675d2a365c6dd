"""What dashboards show: a real job with a slow rank, a real `rankscope up`, and a real Prometheus that scrapes it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rankscope.cli.demo_job.faults import SLOW_RANK, Fault
from rankscope.cli.demo_job.launcher import DemoJob
from tests.alerts.prometheus_running import Prometheus, run_matchers, running_prometheus
from tests.integration.daemon_process import MAIN, Serving, serving
from tools.nvml_stub import Script, build_stub

RING_KEEPER = Path(__file__).parents[1] / "integration" / "jobs" / "ring_keeper.py"
RANKS, SLOW = 3, 1
# MFU needs to know the FLOPs of a step and the device's peak.
ENVIRONMENT = {"RANKSCOPE_FLOPS_PER_STEP": "1G", "RANKSCOPE_PEAK_FLOPS": "100G"}
# A rank whose ring the daemon cannot read: its problem is shown, too.
UNREADABLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@dataclass(frozen=True)
class Watched:
    job: str
    up: Serving
    prometheus: Prometheus


@contextmanager
def watched_job(folder: Path) -> Iterator[Watched]:
    """Its slow rank has been found, captured once, and one of the GPUs has seen an error."""
    with ExitStack() as stack:
        library = build_stub(folder)
        script = Script(folder / "gpus", gpus=RANKS)
        # A target for MFU that the job cannot miss: there is to be one finding only.
        flags = (
            "--metrics-detail",
            "full",
            "--budget-ratio",
            "1",
            "--mfu-target",
            "0.000001",
            "--gpu-interval-seconds",
            "0.5",
        )
        environment = {**script.environment(library), **_no_rank()}
        up = stack.enter_context(serving(folder / "up", "up", *flags, environment=environment))
        address = urlsplit(up.metrics_url).netloc
        prometheus = stack.enter_context(
            # On a busy machine a scrape may take a second, and one that fails ends every series.
            running_prometheus(folder / "prometheus", {"rankscope": [address]}, interval_seconds=3)
        )
        keeper = [sys.executable, str(RING_KEEPER), "future-version"]
        unreadable = stack.enter_context(
            subprocess.Popen(keeper, env={**_no_rank(), **UNREADABLE}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        )
        stack.callback(unreadable.kill)
        fault = Fault(SLOW_RANK, SLOW, 60.0)
        job = stack.enter_context(DemoJob(RANKS, fault, probe=True, extra_environment=ENVIRONMENT))
        job.start()
        job.wait_until_training(timeout=180)
        gpus = {f"gpu.{rank}.processes": f"{pid}:1073741824" for rank, pid in enumerate(job.pids)}
        script.set({**gpus, "xids": f"{SLOW}:31", "gpu.ecc.volatile.uncorrected": 0})
        job.start_fault()
        prometheus.wait_for_data(f'rankscope_job_culprit{{{run_matchers(job.job_name)},rank="{SLOW}"}}')
        captured = [*MAIN, "capture", "--connect", up.grpc_target, "--run", job.job_name, "--ranks", str(SLOW)]
        subprocess.run([*captured, "--steps", "2"], check=True, timeout=180)
        yield Watched(job.job_name, up, prometheus)


def _no_rank() -> dict[str, str]:
    """The environment without what a launcher may have left in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "MASTER_", "WORLD_"))}
