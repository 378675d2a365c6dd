"""NVTX ranges of a real job in the windows of a real daemon. torch for CPUs has no NVTX: a stand-in takes the place of
its C module before the job imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import grpc
import msgspec

from rankscope.v1.rank_service_pb2 import WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.integration.daemon_process import MAIN, PATIENCE_SECONDS, Serving, serving
from tests.integration.probe_running import PROBE_PATH
from tests.support.waiting import wait_until

JOB = """
import sys, time, types
c_module = types.ModuleType("torch._C._nvtx")
vars(c_module).update(rangePushA=lambda message: 0, rangePop=lambda: 0)
sys.modules[c_module.__name__] = c_module
import torch
from torch.cuda import nvtx
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
end = time.monotonic() + 600
step = 0
while time.monotonic() < end:
    step += 1
    nvtx.range_push(f"iteration {step}")
    with nvtx.range("forward"):
        time.sleep(0.02)
        loss = model(torch.ones(4, 8)).sum()
    with nvtx.range("\\x1b[31mbackward"):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    nvtx.range_pop()
"""


def shown_ranges(daemon: Serving, name: str) -> Mapping[str, float]:
    command = [*MAIN, "top", "--once", "--json", "--connect", daemon.grpc_target]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (rank,) = [rank for run in msgspec.json.decode(shown)["runs"] if name in run["run"] for rank in run["ranks"]]
    ranges: Mapping[str, float] = rank["range_seconds"]
    return ranges


def test_ranges_of_a_job_reach_windows_and_top(tmp_path: Path) -> None:
    name = f"nvtx-{os.getpid()}"
    environment = {"PYTHONPATH": PROBE_PATH, "OMP_NUM_THREADS": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"TORCHELASTIC_RUN_ID": name}
    with serving(tmp_path, "daemon") as daemon:
        job = subprocess.Popen([sys.executable, "-c", JOB], env={**os.environ, **environment})
        try:
            with grpc.insecure_channel(daemon.grpc_target) as channel:
                stream = RankServiceStub(channel).WatchRanks(WatchRanksRequest(), timeout=PATIENCE_SECONDS)
                windows = (window for message in stream for window in message.windows)
                window = next(window for window in windows if name in window.identity.job and window.ranges)
                stream.cancel()
            seconds = {one.name: one.seconds for one in window.ranges}
            assert set(seconds) == {"iteration #", "forward", "\ufffd[#mbackward"}
            assert seconds["forward"] > 0.02
            wait_until(lambda: "forward" in shown_ranges(daemon, name), lambda: shown_ranges(daemon, name))
        finally:
            job.kill()
            job.wait()
