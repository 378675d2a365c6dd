"""The environment of a rank of the demo."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

from rankscope.cli.demo_job.faults import Fault
from rankscope.cli.demo_job.model_size import PIPELINE_STAGES, flops_per_step

# Below the range of ephemeral ports, so that only another listener can conflict.
_PORTS = range(20000, 30000)
_PORT_TRIES = 100

# Best of several short runs: other load can only make a run slower.
_MEASURE_PEAK = """
import time, numpy
a = numpy.random.rand(512, 512).astype(numpy.float32)
a @ a
best = float("inf")
for _ in range(12):
    start = time.perf_counter()
    a @ a
    best = min(best, time.perf_counter() - start)
print(2 * 512 ** 3 / best)
"""


def choose_port() -> int:
    """A free port. It may be taken a moment later: then the launcher starts over with another."""
    for port in random.sample(_PORTS, _PORT_TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among {_PORT_TRIES} tried in {_PORTS.start}–{_PORTS.stop - 1}")


@functools.cache
def measure_peak_flops_per_second() -> float | None:
    """The rate of one core in a large matrix product; None if it could not be measured."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE_PEAK],
            env={**os.environ, **one_thread},
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return float(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def probe_environment() -> dict[str, str]:
    """Variables that load the probe in a Python process: the directory of its sitecustomize comes first on the path.
    And TEARDOWN_CUPTI=1, unless the user chose another value: without it, a capture leaves a CUDA process slower. The
    probe records on command, so libkineto need not poll a daemon (KINETO_USE_DAEMON): a process that polls one that has
    gone takes seconds longer to exit."""
    spec = importlib.util.find_spec("rankscope.probe")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("rankscope.probe is not installed; install the rankscope package with its probe")
    paths = [str(Path(next(iter(spec.submodule_search_locations))) / "inject")]
    if inherited := os.environ.get("PYTHONPATH"):
        paths.append(inherited)
    teardown = os.environ.get("TEARDOWN_CUPTI", "1")
    return {"RANKSCOPE_PROBE": "1", "PYTHONPATH": os.pathsep.join(paths), "TEARDOWN_CUPTI": teardown}


def rank_environment(
    rank: int, ranks: int, port: int, run_id: str, fault: Fault, board: Path, *, probe: bool
) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKSCOPE_")}
    environment.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=run_id,
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        PYTHONUNBUFFERED="1",
        RANKSCOPE_DEMO_FAULT=fault.spec,
        RANKSCOPE_DEMO_BOARD=str(board),
    )
    if fault.is_pipeline:
        environment["RANKSCOPE_PARALLELISM"] = f"pp={PIPELINE_STAGES},dp={ranks // PIPELINE_STAGES}"
    if probe:
        environment.update(probe_environment())
        environment["RANKSCOPE_FLOPS_PER_STEP"] = f"{flops_per_step(ranks, pipeline=fault.is_pipeline):.0f}"
        if (peak := measure_peak_flops_per_second()) is not None:
            environment["RANKSCOPE_PEAK_FLOPS"] = f"{peak:.0f}"
    return environment
